"""``python -m scripts.benchmarks CASE``: run a case, print a table and whether goals are met."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from hpctrain.bench.harness import machine_lines
from hpctrain.config import BenchConfig
from hpctrain.console import Console
from hpctrain.errors import Failure
from scripts.benchmarks.cases import CASES


def main() -> int:
    """Run one case; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--data", help="pack; default: digits or random images; data: any source")
    parser.add_argument("--data-dir", default="data", help="folder of built-in sets")
    parser.add_argument("--rounds", type=int, default=3, help="interleaved rounds (default: 3)")
    settings = BenchConfig(**vars(parser.parse_args()))
    console = Console(width=None if sys.stdout.isatty() else 120)
    for line in machine_lines():
        console.print(line)
    with tempfile.TemporaryDirectory(prefix="hpctrain-bench-") as folder:
        try:
            goals = CASES[settings.case](settings, Path(folder), console.print)
        except Failure as error:
            print(f"benchmarks: {error}", file=sys.stderr)
            return error.exit_code
    for line in goals:
        console.print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
