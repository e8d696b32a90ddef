"""Image files -> pack -> batches."""

import os

os.environ.setdefault("HDF5_PLUGIN_PRELOAD", "::")  # a file may name filter plug-ins: load none
