"""Memory and CPU time of a rank for three steps, by the number of samples of a pack.

    python -m scripts.benchmarks.samples [--samples 1e6,1e8,1e9] [--ranks 1] [SETTINGS]

The packs hold black images of 16x16x3 pixels in sparse files, which take little disk space. Each
run is stopped after three steps and uses one thread per rank. SETTINGS are settings of training,
such as --shuffle blocks. Memory is the peak resident set size of any rank, of which the interpreter
and its libraries take 220 MiB.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

from hpctrain.cli import main as hpctrain
from hpctrain.launch import mpirun
from tests.launch import peak_memory, run
from tests.packs import make_sparse_pack
from tests.training.runs import leave_after

SHAPE = (16, 16, 3)
CHILD = "HPCTRAIN_BENCH_SAMPLES"  # set in the processes that train


def train(words: list[str]) -> int:
    """Run three steps in this process; print its peak memory in MiB and its CPU seconds."""
    with leave_after(3):
        code = hpctrain(words)
    print(f"took {peak_memory() >> 10} {time.process_time():.1f}", file=sys.stderr, flush=True)
    return 0 if code == 75 else code or 1


def main() -> int:
    """Print a row for each number of samples."""
    if CHILD in os.environ:
        return train(sys.argv[1:])
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--samples", default="1e6,1e8,1e9")
    parser.add_argument("--ranks", type=int, default=1)
    given, settings = parser.parse_known_args()
    print(f"{'samples':>14}{'ranks':>7}{'MiB a rank':>12}{'CPU s':>7}")
    with tempfile.TemporaryDirectory(prefix="hpctrain-bench-") as folder:
        for samples in (int(float(text)) for text in given.samples.split(",")):
            pack = make_sparse_pack(Path(folder) / f"{samples}.h5", {"train": samples}, SHAPE)
            words = ["--data", str(pack), "--runs-dir", folder, "--run", str(samples)]
            words += ["--model", "digits", "--threads", "1", *settings]
            command = [sys.executable, "-m", "scripts.benchmarks.samples", *words]
            launch = [mpirun(), "-n", str(given.ranks)] if given.ranks > 1 else []
            done = run([*launch, *command], 600, {CHILD: "1"})
            took = [t.split()[1:] for t in done.stderr.splitlines() if t.startswith("took ")]
            if len(took) != given.ranks:
                print(done.stdout, done.stderr, sep="\n", file=sys.stderr)
                return 1
            peak, seconds = (max(float(each[k]) for each in took) for k in (0, 1))
            print(f"{samples:>14,}{given.ranks:>7}{peak:>12,.0f}{seconds:>7.1f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
