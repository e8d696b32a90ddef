"""Standard output and error on a full disk, or closed: one line, and no other file suffers."""

from __future__ import annotations

import sys

import pytest

from tests.support.launch import run
from tests.support.records import end_line, make_run, run_line, step_lines

FULL = "hpctrain: cannot write standard output: No space left on device\n"
CLOSED = "hpctrain: cannot write standard output: Bad file descriptor\n"
COMMANDS = ["--help", "--version", "train --help", "watch a --once", "stop a", "plot a"]


@pytest.fixture
def shell(tmp_path):
    """Run a line of bash in a folder with a run, where $h is hpctrain: code, output and errors."""
    make_run(tmp_path / "runs/a", run_line(), *step_lines(1, 9), end_line())

    def call(line):
        script = f'h="{sys.executable} -m hpctrain"; {line}'
        done = run(["bash", "-c", script], cwd=tmp_path)
        return done.returncode, done.stdout, done.stderr

    return call


@pytest.mark.parametrize("command", COMMANDS)
def test_output_that_is_lost_is_one_line_and_exit_code_1(shell, command):
    assert shell(f"$h {command} >/dev/full") == (1, "", FULL)
    assert shell(f"$h {command} >&-") == (1, "", CLOSED)


def test_errors_that_are_lost_change_nothing(shell):
    for target in ("/dev/full", "&-"):
        code, out, _ = shell(f"$h watch a --once 2>{target}")
        assert code == 0 and out.startswith("a  done")
        assert shell(f"$h watch a --once >{target} 2>{target}") == (1, "", "")
        assert shell(f"$h stop gone 2>{target}") == (2, "", "")


def test_a_current_folder_that_was_removed_is_one_line(shell):
    line = "mkdir gone; cd gone; rmdir ../gone; $h watch a --once"
    removed = "hpctrain: the current folder was removed: change to one that exists\n"
    assert shell(line) == (2, "", removed)


def test_a_page_whose_address_is_lost_is_not_served(shell):
    assert shell("$h watch a --web >/dev/full") == (1, "", FULL)


def test_files_do_not_take_the_numbers_of_closed_descriptors(shell):
    """What a library prints would be written into them."""
    program = "import os; from hpctrain.text import open_standard_files as f; f(); os.open('/', 0)"
    line = f"{sys.executable} -c \"{program}; os._exit(os.open('/', 0))\" <&- >&- 2>&-"
    assert shell(f"cd {sys.path[0] or '.'}; {line}")[0] == 4


def test_what_was_computed_is_written_though_its_table_is_lost(shell, trained, tmp_path):
    line = f"$h evaluate {trained.run('plain')} --output e.json --threads 1 >/dev/full"
    code, _, errors = shell(line)
    assert (code, errors.splitlines()[-1:]) == (1, [FULL.strip()])
    assert (tmp_path / "e.json").stat().st_size > 100


def test_predictions_are_not_computed_in_vain(shell, trained):
    """Training goes on, however: tests/tools/test_progress.py."""
    line = f"$h predict {trained.run('plain')} --output - --threads 1 >/dev/full"
    code, _, errors = shell(line)
    assert (code, errors.splitlines()[-1:]) == (1, [FULL.strip()])
