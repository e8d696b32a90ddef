"""Command lines that must be refused: exit code 2, one line that names the mistake, no file.

A row of a table is a command line, and after a bar what its error must name; by default all of its
words but the subcommand. The wording is free.
"""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

import pytest

from tests.support.ranks import Ended

#: Lines before the error, which list what it is about.
NOTICES = re.compile(": starting on |^unreadable: ")


def rows(text):
    """The rows of a table, as parameters: the words of a command, what its error must name."""
    found = []
    for line in text.strip().splitlines():
        command, bar, names = line.partition(" | ")
        words = shlex.split(command)
        own = words[1:] if words and not words[0].startswith("-") else words
        found.append(pytest.param(words, shlex.split(names) if bar else own, id=line.strip()))
    return found


def listing(folder):
    """What lies in a folder: sizes and times by path. Python may keep what it has compiled."""
    found = {}
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name != "__pycache__"]
        for name in names:
            facts = (Path(place) / name).stat()
            found[f"{place}/{name}"] = facts.st_size, facts.st_mtime_ns
        found[place] = ()
    return found


def check_refused(ended: Ended, names):
    """The command was refused in one line, and what it printed holds all `names`."""
    lines = [line for line in ended.err.splitlines() if not NOTICES.search(line)]
    assert (ended.code, len(lines), ended.out) == (2, 1, ""), ended
    missing = [name for name in names if name not in ended.err]
    assert not missing, f"{missing} not in: {ended.err}"
