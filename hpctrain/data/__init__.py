"""Data: image files are packed into one HDF5 file, which is read in batches."""
