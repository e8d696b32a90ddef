"""What `hpctrain bundle` saves at the start of ranks when the shared file system is slow.

python -m scripts.benchmarks.start --data data/digits.h5 [--rounds 3] [--delay 5]

Four nodes are folders of this machine, each with its own copy of Python and two ranks of one
mpirun. A run of one step is timed three ways, under strace: from the copies; from the copies with
every system call that names a file of the shared folders (the environment, its interpreter, this
repository, the pack) delayed; and from the environment itself, delayed alike. Temporary files of
the run folder are not delayed: their names are not known before. Also counts the calls of a rank.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from hpctrain.bundle import ON_NODE
from hpctrain.bundle.archive import BESIDE, make_archive
from hpctrain.launch import environment

NODES, RANKS = 4, 2  # ranks of a node
CALL = re.compile(r'^\d+ +\w+\(.*?"([^"]+)"')


def main() -> int:
    """Print the table; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", required=True, help="a pack")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each kind (default: 3)")
    parser.add_argument("--delay", type=float, default=5.0, help="milliseconds (default: 5)")
    settings = parser.parse_args()
    os.environ.pop("PYTHONPATH", None)  # what is beside hpctrain would be on the path of the copies
    with tempfile.TemporaryDirectory(prefix="hpctrain-start-") as name:
        folder = Path(name)
        copies = extract(folder)
        shared = [sys.prefix, sys.base_prefix, BESIDE, str(folder / "work")]
        (folder / "work").mkdir()
        os.symlink(os.path.abspath(settings.data), folder / "work" / "pack.h5")
        original = [f"{sys.prefix}/bin/python"] * NODES
        paths = {}
        for kind, pythons in (("copies", copies), ("environment", original)):
            run(folder, pythons, [])
            counts = [calls(folder / f"trace.{rank}", shared) for rank in range(NODES * RANKS)]
            paths[kind] = sorted({path for found in counts for path in found})
            others = max(map(len, counts[1:]))
            print(f"{kind}: {len(counts[0])} calls on shared folders by rank 0, {others} by others")
        slow = [f"--inject=%file:delay_exit={round(settings.delay * 1000)}"]
        cases = {
            "copies": (copies, paths["copies"], []),
            "copies, delayed": (copies, paths["copies"], slow),
            "environment, delayed": (original, paths["environment"], slow),
        }
        seconds: dict[str, list[float]] = {case: [] for case in cases}
        for _ in range(settings.rounds):
            for case, (pythons, named, inject) in cases.items():
                flags = [f"--trace-path={path}" for path in named]
                seconds[case].append(run(folder, pythons, [*flags, *inject]))
        for case, times in seconds.items():
            each = ", ".join(f"{t:.1f}" for t in times)
            print(f"{case}: median {statistics.median(times):.1f} s of {each}")
        print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    return 0


def extract(folder: Path) -> list[str]:
    """Return the Python of each node, from copies made as on a node."""
    archive, key = make_archive(folder)
    began, pythons = time.monotonic(), []
    for node in range(NODES):
        place = folder / f"node{node}" / "hpctrain-job-python-1"
        words = ["sh", "-c", ON_NODE, "bundle", str(archive), str(place), key, "", "go"]
        subprocess.run(words, check=True, stdout=subprocess.PIPE)
        pythons.append(str(place / "venv" / "bin" / "python"))
    took = (time.monotonic() - began) / NODES
    print(f"archive of {archive.stat().st_size / 1e9:.2f} GB, extracted in {took:.1f} s per node")
    return pythons


def run(folder: Path, pythons: Sequence[str], flags: Sequence[str]) -> float:
    """Return the seconds that a run of one step takes, traced by strace with these flags."""
    script = folder / "rank.sh"
    trace = ["strace", "-f", "-qq", "--seccomp-bpf", "--trace=%file", *flags]
    traced = f'{shlex.join(trace)} -o {folder}/trace.$OMPI_COMM_WORLD_RANK "$@"'
    script.write_text(f"#!/bin/sh\nexec {traced}\n")
    script.chmod(0o755)
    words = ["-m", "hpctrain", "--data", "pack.h5", "--batch-size", "8000", "--epochs", "1"]
    words += ["--run", f"r{time.monotonic_ns()}", "--no-test", "--progress", "none"]
    command = [str(Path(pythons[0]).with_name("mpirun"))]  # its libraries are beside it
    for number, python in enumerate(pythons):
        command += [":"] * bool(number) + ["-n", str(RANKS), str(script), python, *words]
    env = {**environment(), "PYTHONPATH": "" if pythons[0] != pythons[1] else BESIDE}
    began = time.monotonic()
    done = subprocess.run(
        command, env=env, cwd=folder / "work", capture_output=True, text=True, timeout=1200
    )
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    return time.monotonic() - began


def calls(trace: Path, shared: Sequence[str]) -> list[str]:
    """Return the paths that the traced calls of a rank name, of those in the shared folders."""
    work = shared[-1]
    found = [CALL.match(line) for line in trace.read_text(errors="replace").splitlines()]
    paths = [os.path.normpath(os.path.join(work, match[1])) for match in found if match]
    return [path for path in paths if any(f"{path}/".startswith(f"{s}/") for s in shared)]


if __name__ == "__main__":
    sys.exit(main())
