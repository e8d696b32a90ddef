"""Names are data: no terminal, table, figure or shell does what they say."""

from __future__ import annotations

import ast
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
from hpctrain.data.pack import write_pack
from hpctrain.errors import RunError, UsageError, did_you_mean
from hpctrain.files import temporary_name
from hpctrain.report.confusion import Confusion
from hpctrain.report.figures import shortened
from hpctrain.report.pictures import draw_captioned, write_rows
from hpctrain.report.tables import open_predictions, print_evaluation
from hpctrain.text import brief, listed, printable, say, told_apart
from tests.launch import ROOT, run_cli

NAMES = (
    *("[/x]", "[bold]a", ":smile:", "=cmd|' /C calc'!A0", "@SUM(1)", "\x1b]0;evil\x07", "\x9b2J"),
    *("\u202eabc", "$x^{", "\udcff", "a\nb", "\ttab", "x" * 300, "<b>&", "%a;$(id)`id`'\"", "-1+1"),
)
PRINT_ALLOWED = {  # text that names nothing, other processes, stacks, and what is drawn already
    *("text", "cli", "parallel/mpi", "parallel/choose", "doctor/__init__"),
}


def is_harmless(text: str) -> bool:
    return all(c.isprintable() or c == "\n" for c in text)


def calls(tree: ast.AST) -> set[str]:
    found = {n.func.id for n in ast.walk(tree) if isinstance(n, ast.Call) and hasattr(n.func, "id")}
    modules = {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    return found | modules


def test_text_goes_to_terminals_through_two_doors_only():
    """A new print or rich console would show names as they are."""
    for path in (ROOT / "hpctrain").rglob("*.py"):
        name = str(path.relative_to(ROOT / "hpctrain").with_suffix(""))
        found = calls(ast.parse(path.read_text()))
        assert "print" not in found or name in PRINT_ALLOWED, f"{name}: use text.say"
        assert "rich.console" not in found or name == "console", f"{name}: use console.Console"


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


def test_the_tables_of_an_evaluation(capsys):
    for classes in (NAMES[:8], NAMES[8:], NAMES, ("x", "y", "x")):
        counts = Confusion(len(classes))
        counts.add(np.arange(len(classes)), np.arange(len(classes)))
        print_evaluation({"loss": 1.0, "accuracy": 0.5, "rows": 9}, counts, classes, "te\x1b[2Jst")
    printed = capsys.readouterr().out
    assert is_harmless(printed) and "[/x]" in printed and "\\x1b]0;evil" in printed
    assert "x (0)" in printed and "x (2)" in printed and "y (1)" not in printed


def test_pictures_with_any_caption(tmp_path):
    images = np.zeros((len(NAMES), 5, 5, 1))
    draw_captioned(images, [(name, name) for name in NAMES])
    write_rows(tmp_path / "x.png", {name: images[:2] for name in NAMES[:12]})


def test_equal_names_of_classes_are_numbered():
    assert told_apart(("a", "b", "a")) == ("a (0)", "b", "a (2)")
    assert told_apart(("a", "file"), ("file", "row")) == ("a", "file (1)")


def test_answers_on_standard_output_steer_no_terminal(capsys):
    names = ["\x1b[2J.png", "\udcff.png"]
    with open_predictions("-", ("a", "\x07"), False) as write:
        write(names, None, np.full((2, 2), 0.5))
        write([], None, np.empty((0, 2)))
    assert capsys.readouterr().out.splitlines()[1:] == [
        "\\x1b[2J.png,a,0.500000,0.500000,0.500000",
        "\\udcff.png,a,0.500000,0.500000,0.500000",
    ]


def test_settings_come_back_from_their_file():
    for text in ("caf\u00e9 \U0001f600", "\x1b[31m\x7f\n\t\"'\\", "a\u202eb"):
        check_settings(config := Config(data=text, lr=1e-5))
        assert tomllib.loads(to_toml(config))["data"] == text
    assert tomllib.loads(to_toml(Config(clip_norm=float("inf"))))["clip_norm"] == float("inf")
    with pytest.raises(UsageError, match=r"--data .*\\udcff.*: this name is not UTF-8"):
        check_settings(Config(data="a\udcff"))


def test_a_pack_of_hostile_names_is_trained_and_tested(tmp_path):
    rng = np.random.default_rng(0)
    names = NAMES[:8]

    def rows(count):
        return rng.integers(0, 255, (count, 28, 28, 1), np.uint8), np.arange(count) % len(names)

    write_pack(tmp_path / "p.h5", {"train": rows(16), "test": rows(8)}, names, {"source": "[/y]"})
    words = ["--data", "p.h5", "--epochs", "1", "--run", "a", "--batch-size", "8", "--tensorboard"]
    done = run_cli(words, cwd=tmp_path, timeout=120)
    assert (done.returncode, done.stderr) == (0, "hpctrain train: starting on 1 rank ...\n")
    assert is_harmless(done.stdout)


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
