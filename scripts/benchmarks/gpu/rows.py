"""The rows of ``scripts/gpu_check``, and the command that runs one of them in a process:

    python -m scripts.benchmarks.gpu.rows ROW FOLDER [--rehearse cpu|cuda] [--data PACK]

A row is a function of a module in this folder. Every result is written to FOLDER/results.jsonl as a
line of JSON as soon as it is known, so that a row that hangs or crashes keeps its earlier results.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path
from typing import NamedTuple

from scripts.benchmarks.gpu.case import Case

RESULTS = "results.jsonl"


class Row(NamedTuple):
    """One part of the check."""

    about: str
    place: str  # module:function
    seconds: float  # after which it is ended


ROWS = {
    "parity": Row("gradients against float64", "parity:measure", 45),
    "message": Row("the message is shared, not copied", "memory:message", 30),
    "memory": Row("device memory, batches", "memory:memory", 30),
    "trace": Row("what a step does to the device", "trace:measure", 45),
    "staging": Row("through pinned host memory", "peers:staging", 30),
    "digits": Row("learning the digits", "runs:digits", 45),
    "flowers": Row("learning the flowers", "runs:flowers", 150),
    "peers": Row("against plain torch and DDP", "peers:measure", 75),
    "digests": Row("the same bits", "runs:digests", 120),
    "several": Row("several GPUs", "runs:several", 120),
    "speed": Row("images/s of ResNet-50", "runs:speed", 200),
}


def main() -> None:
    """Run one row."""
    parser = argparse.ArgumentParser(description="Run one row of scripts/gpu_check.")
    parser.add_argument("row", choices=ROWS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rehearse", choices=("cpu", "cuda"))
    parser.add_argument("--data")
    options = parser.parse_args()
    module, _, function = ROWS[options.row].place.partition(":")
    measure = getattr(importlib.import_module(f"scripts.benchmarks.gpu.{module}"), function)
    with open(options.folder / RESULTS, "w") as file:
        for result in measure(Case(options.folder, options.rehearse, options.data)):
            print(result, flush=True)
            print(json.dumps(result._asdict()), file=file, flush=True)
    if "mpi4py.MPI" in sys.modules:
        from hpctrain.parallel.mpi import end_mpi

        end_mpi()


if __name__ == "__main__":
    main()
