"""``python -m hpctrain``, and the command ``hpctrain``: the subcommand between two frames."""

import sys

from hpctrain.signals import ignore, listen


def program() -> int:
    """Catch the scheduler's notices, run the subcommand, end MPI if it began; the exit code."""
    words = sys.argv[1:]
    trains = not words or words[0] == "train" or words[0].startswith("-")
    if trains:
        listen()  # before anything slow is imported: a notice may come at any moment
    from hpctrain.cli import main

    code = main(words)
    if trains:
        ignore()
    if "mpi4py.MPI" in sys.modules:
        from hpctrain.parallel.mpi import end_mpi

        end_mpi()
    return code


if __name__ == "__main__":
    sys.exit(program())
