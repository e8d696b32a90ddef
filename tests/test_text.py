"""Names are data: no terminal, table, figure or shell does what they say."""

from __future__ import annotations

import errno
import io
import os
import tomllib
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from rich.table import Table

from hpctrain.config import Config, check_settings, to_toml
from hpctrain.console import Console, styled
from hpctrain.errors import RunError, UsageError, did_you_mean
from hpctrain.files import temporary_name
from hpctrain.report.figures import shortened
from hpctrain.report.pictures import draw_captioned, write_rows
from hpctrain.report.tables import open_predictions
from hpctrain.text import brief, listed, printable, say, told_apart

NAMES = (
    *("[/x]", "[bold]a", ":smile:", "=cmd|' /C calc'!A0", "@SUM(1)", "\x1b]0;evil\x07", "\x9b2J"),
    *("\u202eabc", "$x^{", "\udcff", "a\nb", "\ttab", "x" * 300, "<b>&", "%a;$(id)`id`'\"", "-1+1"),
)


def is_harmless(text: str) -> bool:
    return all(c.isprintable() or c == "\n" for c in text)


@pytest.mark.parametrize("name", NAMES)
def test_a_table_a_line_and_an_error_show_a_name_as_it_is(name, capsys):
    table = Table(title=name)
    table.add_column(name)
    table.add_row(name)
    table.add_row(styled(name, "bold"))
    drawn = io.StringIO()
    console = Console(file=drawn, width=1000)
    console.print(table)
    console.print(name, soft_wrap=True)
    assert is_harmless(drawn.getvalue())
    assert drawn.getvalue().count(printable(name.partition("\n")[0]).strip()) >= 5
    assert drawn.getvalue().count(printable(name, newlines=False).strip()) >= 4  # each in a line
    for error in (UsageError(name), RunError(f"{name}!")):
        assert is_harmless(str(error))
    say(name)
    assert is_harmless(capsys.readouterr().out)
    assert shortened(name, 20).isprintable()


def test_pictures_with_any_caption(tmp_path):
    images = np.zeros((len(NAMES), 5, 5, 1))
    draw_captioned(images, [(name, name) for name in NAMES])
    write_rows(tmp_path / "x.png", {name: images[:2] for name in NAMES[:12]})


def test_equal_names_of_classes_are_numbered():
    assert told_apart(("a", "b", "a")) == ("a (0)", "b", "a (2)")
    assert told_apart(("a", "file"), ("file", "row")) == ("a", "file (1)")


def test_settings_come_back_from_their_file():
    for text in ("caf\u00e9 \U0001f600", "\x1b[31m\x7f\n\t\"'\\", "a\u202eb"):
        check_settings(config := Config(data=text, lr=1e-5))
        assert tomllib.loads(to_toml(config))["data"] == text
    assert tomllib.loads(to_toml(Config(clip_norm=float("inf"))))["clip_norm"] == float("inf")
    with pytest.raises(UsageError, match=r"--data .*\\udcff.*: this name is not UTF-8"):
        check_settings(Config(data="a\udcff"))


def test_what_is_proposed_is_never_what_was_given():
    assert did_you_mean("first", ["first", "second"]) == ""
    assert did_you_mean("frist", ["first", "frist"]) == ", did you mean 'first'?"


def test_many_names_and_long_texts_are_shortened():
    assert listed("abc", 3) == "a, b, c" and listed([]) == ""
    assert listed(range(1003), 2) == "0, 1 and 1,001 more"
    assert listed("abcd", 2, "; ") == "a; b; and 2 more"
    assert brief("a\n  b") == "a b" and brief("x" * 40, 40) == "x" * 40
    assert brief("x" * 41, 40) == "x" * 37 + "..."


def test_predictions_on_a_full_disk_are_one_error_even_after_another_error(tmp_path, monkeypatch):
    class Full(io.StringIO):
        def close(self):
            failed = self.closed
            super().close()
            if not failed:
                raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("hpctrain.report.tables.as_text", lambda binary: Full())
    path = tmp_path / "answers.csv"
    full = {"expected_exception": RunError, "match": "answers.csv: No space left"}
    with pytest.raises(**full), open_predictions(str(path), ("a", "b"), False) as write:
        write(["x"], None, np.full((1, 2), 0.5))
        raise RunError("another rank failed")
    with pytest.raises(**full), open_predictions(str(path), ("a", "b"), False):
        pass
    assert not list(tmp_path.iterdir())


def test_temporary_files_of_a_killed_predict_are_removed_and_the_old_output_stays(tmp_path):
    path = tmp_path / "answers.csv"
    path.write_text("before")
    temporary = Path(str(temporary_name(path)).replace(f"-{os.getpid()}-", "-999999999-"))
    temporary.write_text("half of the answers")
    with pytest.raises(RunError), open_predictions(str(path), ("a", "b"), False):
        assert not temporary.exists()
        raise RunError("no image can be read")
    assert [each.read_text() for each in tmp_path.iterdir()] == ["before"]


def test_predictions_are_written_line_by_line(tmp_path):
    """A million images of a thousand classes are more text than a host has memory."""
    count, classes = 500, tuple(f"c{number}" for number in range(1000))
    names, probabilities = [str(row) for row in range(count)], np.full((count, 1000), 0.001)
    tracemalloc.start()
    path = tmp_path / "predictions.csv"
    with open_predictions(str(path), classes, False) as write:
        write(names, None, probabilities)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert path.stat().st_size > 4e6 > 1e6 > peak
