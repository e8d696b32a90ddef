"""The tests of hpctrain. Folders mirror those of the package; `launch` starts subprocesses."""
