"""``python -m scripts.bench CASE``: run a case and print a table.

With --against COMMIT, this package and that of an earlier commit run in turn (against.py).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from functools import partial
from pathlib import Path

from hpctrain.errors import Failure
from scripts.bench.against import compare_packages
from scripts.bench.harness import print_machine
from scripts.bench.packing import measure_packing
from scripts.bench.reading import measure_data
from scripts.bench.training import compare_training, measure_tree
from scripts.bench.transforming import measure_transforms

CASES = {
    "digits": compare_training,
    "resnet50": compare_training,
    "tree": measure_tree,
    "data": measure_data,
    "pack": measure_packing,
    "transforms": measure_transforms,
}


def main() -> int:
    """Run one case; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--data", help="pack; default: digits or random images; data: any source")
    parser.add_argument("--cache-dir", default="data", help="folder of built-in sets")
    parser.add_argument("--ranks", type=int, default=2, help="of digits and resnet50 (default: 2)")
    parser.add_argument("--rounds", type=int, default=3, help="interleaved rounds (default: 3)")
    parser.add_argument("--against", metavar="COMMIT", help="compare with an earlier package")
    options = parser.parse_args()
    run = CASES[options.case]
    if options.against:
        run = partial(compare_packages, commit=options.against)
    print_machine()
    with tempfile.TemporaryDirectory(prefix="hpctrain-bench-") as folder:
        try:
            run(options, Path(folder))
        except Failure as error:
            print(f"bench: {error}", file=sys.stderr)
            return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
