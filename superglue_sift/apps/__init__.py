"""Programs around the matcher.

cli          runs the command superglue-match, and matches two images.
folder       chooses pairs of a folder or a list, and matches them into files.
serve        shows a page in the browser.
"""
