"""Programs around the matcher.

cli          runs the command superglue-match, and matches two images.
pairing      chooses pairs of a folder or a list, and names their results.
folder       matches all pairs of a folder into files.
retrieval    finds similar photographs.
serve        shows a page in the browser.
"""
