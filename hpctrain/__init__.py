"""Train image networks data-parallel on HPC machines: one command, one Allreduce a step.

Importing hpctrain starts nothing: no MPI, no torch, no CUDA. The parts are plain modules,
``hpctrain.data`` (image files -> pack -> batches), ``hpctrain.parallel`` (everything that
crosses ranks), ``hpctrain.models``, ``hpctrain.training`` and ``hpctrain.report``.
"""

__version__ = "0.1.0"
