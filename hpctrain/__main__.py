"""``python -m hpctrain``, and the command ``hpctrain``: how the process begins and ends."""

import sys

from hpctrain.launcher import catch_signals, end_with_launcher, ignore_signals
from hpctrain.text import discard_stdout


def program() -> int:
    """Catch the scheduler's notices, run the subcommand, end MPI if it began; the exit code, also
    where nobody reads the output any longer.
    """
    words = sys.argv[1:]
    trains = not words or words[0] == "train" or words[0].startswith("-")
    if trains:  # before anything slow is imported: it may come at any moment
        catch_signals()
        end_with_launcher()
    from hpctrain.cli import main

    try:
        try:
            code = main(words)
            if trains:
                ignore_signals()
            if "mpi4py.MPI" in sys.modules:
                from hpctrain.parallel.mpi import end_mpi

                end_mpi()
            return code
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # as in `hpctrain --help | head -1`
        discard_stdout()
        return 1


if __name__ == "__main__":
    sys.exit(program())
