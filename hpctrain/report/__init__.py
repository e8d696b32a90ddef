"""Records of a run: writing, reading, displaying and summarizing them.

fields.py            the fields of a record; new fields are added here
console.py           what progress.py and tables are printed with
record.py            writes, reads and truncates records; progress.py and tensorboard.py show them
history.py           what a record tells of a run, also while it grows
find.py              finds runs and sweeps by name, and the best run of a sweep
figures.py           common functions of figures, and the confusion matrix of plot
tables.py            the output of evaluate and predict; pictures.py writes images as PNG
step_stats.py        how the time of steps is spent
"""
