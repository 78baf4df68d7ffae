"""Programs around the matcher.

cli          the command superglue-match, and two images
pairing      which pairs of folders, lists and videos
folder       matches all pairs of a folder
retrieval    similar photographs
results      files of a pair
serve        the page in the browser
"""
