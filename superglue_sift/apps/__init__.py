"""Run the matcher from the command line or a page, on two images or many.

cli          runs the command superglue-match, and matches two images.
pairing      names the photographs of a command, and chooses pairs of them.
folder       matches pairs of a folder or a list into files.
serve        shows a page in the browser.
"""
