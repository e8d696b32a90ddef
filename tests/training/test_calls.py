"""How far it is from the command line to the communication of a step."""

from __future__ import annotations

import sys

from tests.support.launch import run
from tests.support.packs import make_pack

PROGRAM = """
import sys, traceback
from hpctrain.parallel import mpi

class Traced(mpi.MPI.Intracomm):
    def Allreduce(self, *buffers):
        names = [frame.name for frame in traceback.extract_stack()]
        if "train_step" in names:
            print(*names)
        return super().Allreduce(*buffers)

mpi.start_mpi = lambda: Traced(mpi.MPI.COMM_WORLD.Dup())
from hpctrain.__main__ import program
sys.argv[1:] = "train --data pack.h5 --epochs 1 --threads 1 --no-test --progress none".split()
sys.exit(program())
"""


def test_nine_calls_from_the_command_line_to_allreduce(tmp_path):
    make_pack(tmp_path / "pack.h5", {"train": 17})
    done = run([sys.executable, "-c", PROGRAM], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for line in done.stdout.splitlines():
        module, *calls = line.split()
        assert module == "<module>"
        assert (calls[0], calls[-1]) == ("program", "Allreduce") and len(calls) <= 9, calls
    assert done.stdout
