"""Command lines in processes that may be killed: forked from one that has imported torch.

Starting Python with torch takes three seconds of a core, a process forked from such a one a tenth.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence

from tests.support.launch import run

Case = tuple[dict[str, str], Sequence[str]]  # variables, words of the command line


def run_each(cases: Sequence[Case], cwd: object, timeout: float = 90) -> list[int]:
    """Run the command lines one after the other; return their exit codes, -9 of a killed one."""
    words = [sys.executable, "-m", "tests.support.killed", json.dumps(cases)]
    done = run(words, timeout, cwd=str(cwd))
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def _fork(variables: dict[str, str], words: Sequence[str]) -> int:
    from hpctrain.__main__ import program

    if child := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    code = 70
    try:
        os.environ.update(variables)
        sys.argv = ["hpctrain", *words]
        code = program()
        sys.stdout.flush()
    finally:
        os._exit(code)


if __name__ == "__main__":
    import h5py  # noqa: F401 -- now, for all of them
    import torch  # noqa: F401

    codes = [_fork(*case) for case in json.loads(sys.argv[1])]
    print(json.dumps(codes))
