"""Records of a run: writing, reading, displaying and summarizing them.

console.py           what the bar and tables are printed with
record.py            the fields of a record; writes, reads and truncates it
sinks.py             opens the record and what shows it
display.py           shows records while they are written, tensorboard.py writes them as events
metrics.py           figures over a split, and which of two is better
history.py           what a record tells of a run, also while it grows
settings.py          reads the settings and the plan of a run
find.py              finds runs and sweeps by name, and the best runs of a sweep
figures.py           hpctrain plot: curves of runs, confusion matrices
results.py           the output of evaluate and predict: tables, CSV, sheets of images
step_stats.py        how the time of steps is spent, and advice
"""
