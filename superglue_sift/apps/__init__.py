"""Run the matcher from the command line or a page, on two images or many.

cli          runs the command superglue-match, and matches two images.
pairing      names the photographs of a command, and chooses pairs of them.
store        keeps the features of many photographs on disk.
folder       has `match_folder`, which matches pairs of a folder or a list into files.
results      writes and reads the files of a pair, and says what they were made from.
serve        serves a page for the browser.
"""
