"""Data: image files are packed into one HDF5 file, which is read in batches."""

import os

os.environ.setdefault("HDF5_PLUGIN_PRELOAD", "::")  # load no filter plug-in that a file may name
