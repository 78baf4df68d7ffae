"""Programs around the matcher.

cli          the command superglue-match, and two images
pairing      which pairs of a folder or a list, and the names of their results
folder       match all pairs of a folder into files
retrieval    similar photographs
serve        the page in the browser
"""
