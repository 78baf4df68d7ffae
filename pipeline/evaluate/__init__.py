"""Stage `evaluate`: one long table of every value of every pair, and all that is read off it.

`pairs` and `folders` give pairs with ground truth, `matchers` their matches, `estimators` and
`scoring` the rows of the table, `metrics` means, intervals and differences, `report` the tables and
files, `charts` the page.
"""
