"""Stage `evaluate`: make one long table of every value of every pair, and report on it.

`pairs` gives pairs with ground truth, and `matchers` gives their matches. `estimators` and
`scoring` make the rows of the table. `metrics` computes means, intervals and differences. `report`
writes the tables, the files and the page.
"""
