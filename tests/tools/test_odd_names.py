"""Names of classes and files are data: no terminal, table, figure or shell does what they say."""

from __future__ import annotations

import csv
import os
import resource

import pytest
from PIL import Image

import hpctrain as hp
from tests.support.api import command_line
from tests.support.ranks import command, on_ranks
from tests.support.short import images

NAMES = (
    *("[/x]", "[bold]a", ":smile:", "=cmd|' /C calc'!A0", "@SUM(1)", "\x1b]0;evil\x07", "\x9b2J"),
    *("\u202eabc", "$x^{", "a\nb", "\ttab", "x" * 300, "<b>&", "%a;$(id)`id`'\"", "-1+1", "file"),
)
#: As `hpctrain.text.printable` shows them: made printable once, where a pack is read.
SHOWN = [ascii(name)[1:-1] if not name.isprintable() else name for name in NAMES]
SHORT = ["--epochs", "1", "--threads", "1", "--progress", "plain"]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a run on classes of these names, and what its training printed."""
    place = tmp_path_factory.mktemp("names")
    splits = {
        name: images(rows, (12, 12, 1), len(NAMES)) for name, rows in (("train", 40), ("test", 33))
    }
    hp.write_pack(place / "pack.h5", splits, NAMES, {"source": NAMES[5]})
    trained = command(1, "--data", "pack.h5", "--model", "digits", "--run", "a", *SHORT, cwd=place)
    assert trained.code == 0, trained.err
    return place, trained


def check_harmless(ended):
    assert ended.code == 0, ended.err
    assert all(c.isprintable() or c == "\n" for c in ended.out + ended.err), ended


def test_subcommands_show_and_draw_classes_of_any_name(place):
    folder, trained = place
    check_harmless(trained)
    check_harmless(command(1, "pack", "--check", "pack.h5", cwd=folder))
    output = folder / "runs/a/evaluation-test.json"
    tested = command(1, "evaluate", "a", "--mistakes", "30", "--output", output, cwd=folder)
    check_harmless(tested)
    assert "[bold]a" in tested.out and ":smile:" in tested.out
    check_harmless(command(1, "plot", "a", "--confusion", cwd=folder))
    check_harmless(command(1, "predict", "a", "--figure", "20", cwd=folder))
    for made in ("predictions.png", "runs/a/evaluation-test.png", "runs/a/training.png"):
        with Image.open(folder / made) as picture:
            assert min(picture.size) > 100


def test_tables_of_answers_hold_printable_names_and_columns_differ(place):
    check_harmless(command(1, "predict", "a", "--output", "-", cwd=place[0]))
    assert command(1, "predict", "a", "--output", "answers.csv", cwd=place[0]).code == 0
    with open(place[0] / "answers.csv", newline="", encoding="utf-8") as file:
        header, *answers = csv.reader(file)
    assert len({*header}) == len(header) and {*SHOWN} - {"file"} <= {*header}
    assert {row[1] for row in answers} <= {*header} and len(answers) == 33


def with_small_files(comm, folder, words):
    """Run a command that may write files of 2 kB."""
    os.chdir(folder)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
    try:
        return command_line(words)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_answers_that_find_no_room_leave_the_old_ones(place, tmp_path):
    (tmp_path / "answers.csv").write_text("before")
    words = ["predict", str(place[0] / "runs/a"), "--output", str(tmp_path / "answers.csv")]
    assert on_ranks(1, with_small_files, folder=place[0], words=words) == [1]
    assert [path.read_text() for path in tmp_path.iterdir()] == ["before"]
