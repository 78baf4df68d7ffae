"""Stage 1: list the photographs, download what is missing, hold some out.

`coco` (what COCO publishes), `download` and `partial` (archives, whole or in part), `containers`
(folders and archives read in place), `splits` (training, validation, test).
"""
