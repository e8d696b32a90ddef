"""Entry point of ``python -m hpctrain`` and of the command ``hpctrain``."""

import sys


def program() -> int:
    """Run the subcommand, finalize MPI if it was initialized, and return the exit code.

    For training, the signals of the scheduler are caught first. The exit code is 1 if standard
    output could not be written, or if its reader has closed it.
    """
    from hpctrain.cluster import catch_signals, ignore_signals
    from hpctrain.text import discard_stdout, open_standard_files, output_error, say

    words = sys.argv[1:]
    trains = not words or words[0] == "train" or words[0].startswith("-")
    if trains:  # before any slow import: a signal may arrive at any time
        catch_signals()
    open_standard_files()
    from hpctrain.cli import main

    try:
        try:
            code = main(words)
            if trains:
                ignore_signals()
            if "mpi4py.MPI" in sys.modules:
                from hpctrain.parallel.mpi import end_mpi

                end_mpi()
        except SystemExit as ended:  # after --help and --version
            code = int(ended.code or 0)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # as in `hpctrain --help | head -1`
        discard_stdout()
        return 1
    error = output_error()
    if error:
        say(f"hpctrain: cannot write standard output: {error.strerror}", sys.stderr)
        return code or 1
    return code


if __name__ == "__main__":
    if not sys.flags.safe_path:  # Python looks for every module in the current folder first
        here = sys.path.pop(0)  # own functions are imported from it (config/functions.py)
        if __file__ == f"{here}/hpctrain/__main__.py":
            sys.path.append(here)
    sys.exit(program())
