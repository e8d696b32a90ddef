"""``python -m scripts.benchmarks CASE``: run a case, print a table and whether goals are met.

With --against COMMIT, this package and that of an earlier commit run in turn (against.py).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from hpctrain.errors import Failure
from hpctrain.report.console import Console
from scripts.benchmarks.against import compare_packages
from scripts.benchmarks.cases import CASES
from scripts.benchmarks.harness import Options, machine_lines


def main() -> int:
    """Run one case; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--data", help="pack; default: digits or random images; data: any source")
    parser.add_argument("--cache-dir", default="data", help="folder of built-in sets")
    parser.add_argument("--ranks", type=int, default=2, help="of digits and resnet50 (default: 2)")
    parser.add_argument("--rounds", type=int, default=3, help="interleaved rounds (default: 3)")
    parser.add_argument("--against", metavar="COMMIT", help="compare with an earlier package")
    given = vars(parser.parse_args())
    commit = given.pop("against")
    options = Options(**given)
    console = Console(width=None if sys.stdout.isatty() else 120)
    for line in machine_lines():
        console.print(line)
    with tempfile.TemporaryDirectory(prefix="hpctrain-bench-") as folder:
        try:
            if commit:
                compare_packages(options, commit, Path(folder), console.print)
                return 0
            for line in CASES[options.case](options, Path(folder), console.print):
                console.print(line)
        except Failure as error:
            print(f"benchmarks: {error}", file=sys.stderr)
            return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
