"""Stage `evaluate`: make one long table of every value of every pair, and report on it.

`pairs` gives pairs with ground truth, and `matchers` gives their matches. `estimators` and
`scoring` make the rows of the table. `metrics` computes means, intervals and differences.
`evaluation` does all of this for a source of pairs. `report` writes the tables, the files and the
page.
"""

from __future__ import annotations

# Names of files of a report
SUMMARY = "summary.txt"
TEXT = "report.txt"
PAGE = "index.html"
