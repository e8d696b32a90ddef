"""Write the tables of docs/parts.md: the names of hpctrain/config/parts.toml.

python docs/parts.py

With --print, the page is printed instead.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path

from hpctrain.config.parts import MODULES, REGISTRIES, NamesOfLibrary, read_table

PAGE = Path(__file__).with_name("parts.md")
MARK = "<!-- Made from hpctrain/config/parts.toml by: python docs/parts.py -->\n"
DIRECTIONS = {"max": "more is better", "min": "less is better", "": "no direction"}


def rows(setting: str, names: NamesOfLibrary) -> dict[str, list[str]]:
    """The names by what is said of them."""
    of_text = defaultdict(list)
    for name, direction in names.accepted.items():
        text = "accepted"
        if setting == "metric":
            text = f"accepted, {DIRECTIONS[direction]}"
        of_text[text].append(f"`{name}`")
    for name, reason in names.refused.items():
        of_text[f"refused: {reason}"].append(f"`{name}`")
    return of_text


def tables() -> str:
    """The tables of all libraries."""
    text = "\n## Accepted names\n"
    for setting, libraries in MODULES.items():
        for library in libraries:
            text += f"\n### `--{setting} {library}:`\n\n"
            if (setting, library) in REGISTRIES:
                text += f"All networks of {library}'s registry.\n"
                continue
            text += "| | Names |\n|---|---|\n"
            for said, names in rows(setting, read_table()[setting, library]).items():
                text += f"|{said.replace('*', chr(92) + '*')}|{', '.join(names)}|\n"
    return text


def page() -> str:
    """The page, with its tables made anew."""
    return PAGE.read_text().partition(MARK)[0] + MARK + tables()


if __name__ == "__main__":
    if sys.argv[1:] == ["--print"]:
        print(page(), end="")
    else:
        PAGE.write_text(page())
