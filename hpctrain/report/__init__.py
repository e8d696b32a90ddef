"""What a run leaves to read.

fields.py            the fields of a record: here a field is added
recorder.py          writes records during training; progress.py, bar.py show them, tensorboard.py
record.py            reads records, corrupt ones too; history.py what they amount to
find.py              runs and sweeps by name; the best run of a sweep
figures.py           what figures share, and the confusion matrix of plot
tables.py            what evaluate and predict leave; pictures.py images as PNG
step_stats.py        curves, and where the time of steps goes
"""
