"""``asc ablate``: the paper's four ablation tables, cell by cell.

Files, in reading order
    variants.py    what is compared: changes of one pre-training recipe
    tables.py      the four tables, with the paper's numbers
    changes.py     other settings of the recipe, by words
    study.py       which runs and cells are wanted, and the digests that name them
    cells.py       the files of cells, and the locks by which processes share them
    training.py    pre-training of one run, and its speed
    judge.py       what an encoder is judged by
    work.py        one process at work
    report.py      Markdown and CSV from the cells
    pictures.py    the tables as a picture, and curves
    run.py         the command
"""
