"""What a run leaves to read: records, the progress bar, tables."""
