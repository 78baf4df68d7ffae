"""Programs around the matcher.

cli          runs the command superglue-match, and matches two images.
pairing      chooses pairs of a folder or a list, finds similar photographs, and names results.
folder       matches all pairs of a folder into files.
serve        shows a page in the browser.
"""
