"""The two kinds of failure that a user meets, each with its exit code.

Anything else that escapes is a bug and is shown with its traceback.
"""


class UsageError(Exception):
    """The command line, a file or the data cannot be used as asked: say what, with the numbers."""

    exit_code = 2


class RunError(Exception):
    """The job was well asked for but failed under way (full disk, NaN loss, file cut short)."""

    exit_code = 1
