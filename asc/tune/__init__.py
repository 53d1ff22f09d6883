"""The search for settings: many short pre-trainings, judged by kNN on images held out of the training side.

Files, in reading order
    values.py      settings of a run by their dotted names, read from text
    space.py       which settings are searched; the paper's grid
    validation.py  what is held out: labelled images and whole videos
    trial.py       one point of the space: trained, judged, continued after an interruption
    study.py       the points of all processes, kept by Optuna in one file
    recipe.py      the best values as a recipe
    page.py        the results as a page and a table
    run.py         the command
"""
