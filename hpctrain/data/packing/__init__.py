"""Making packs: sources -> decoded rows -> splits -> HDF5. The reader needs nothing of this."""
