"""Run the matcher from the command line or a page, on two images or many.

cli          runs the command superglue-match, and matches two images.
folder       chooses pairs of a folder or a list, and matches them into files.
serve        shows a page in the browser.
"""
