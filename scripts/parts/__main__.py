"""Judge the parts of other libraries, and compare with hpctrain/config/parts.toml, or write it.

    python -m scripts.parts                     compare; exit code 1 if names differ
    python -m scripts.parts --update            write the file
    python -m scripts.parts augment --update    of one setting alone

With a CPU build of torch, PYTHONPATH=tests/libraries/site lets torchvision be imported.
"""

from __future__ import annotations

import argparse
import sys

from hpctrain.config.parts import TABLE
from scripts.parts import JUDGES, differences, judge_all, to_toml


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.parts")
    parser.add_argument("settings", nargs="*", choices=[[], *JUDGES], help="default: all")
    parser.add_argument("--update", action="store_true", help="write parts.toml")
    given = parser.parse_args()
    table = judge_all(given.settings or JUDGES)
    lines = differences(table)
    print("\n".join(lines) or f"{TABLE.name}: as judged")
    if given.update:
        TABLE.write_text(to_toml(table), encoding="utf-8")
        return 0
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())
