"""Records that are broken: each is named, and no reader of others ends by it."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest

from hpctrain.cli import main
from hpctrain.errors import UsageError
from hpctrain.plot import read_curves
from hpctrain.report.fields import REQUIRED, parse_record
from hpctrain.report.record import FILE_NAME, HistoryReader, is_done, read_history
from hpctrain.typed import parse_json
from hpctrain.watch.drawing import cells, draw, status_line
from hpctrain.watch.runs import WatchedRuns
from hpctrain.watch.web import curves
from tests.records import append, end_line, evaluation_line, line, make_run, run_line, step_line

WRONG = ("NaN", "null", "true", '""', '"x"', "[]", "{}", '{"a": {}}', "-1", "0", "1.5")
CONTROL = (
    run_line(),
    *map(step_line, range(5, 13)),
    evaluation_line(10),
    evaluation_line(12, "test"),
    line("epoch", epoch=1, loss=0.5, accuracy=0.5, images_per_second=8.0, seconds=1.0),
    line("note", text="a note"),
    line("digest", step=12, digest="ab"),
    end_line(shares={"data": 0.25, "other": 0.75}, step_seconds=0.1, idle=0.0),
)


def scan(folder: Path) -> str:
    """What a resumed launch finds wrong with a record."""
    reader = HistoryReader(folder, strict=True)
    reader.poll()
    return reader.problem or reader.history.corruption or ""


def look_at_all(folder: Path) -> list[dict]:
    """What every display makes of the runs in a folder, as the page gets it."""
    runs = WatchedRuns([str(path) for path in sorted(folder.iterdir())], "runs")
    runs.poll()
    for run in runs.all():
        summary = run.summary()
        json.dumps([summary, curves(run)], allow_nan=False)
        for name in ("loss", "accuracy"):
            draw(run.history, name, 25, 7)
        assert all(text.isprintable() for text in (*cells(summary), status_line(summary)))
        read_history(run.folder, "none")
        is_done(run.folder)
    return [run.summary() for run in runs.all()]


@pytest.mark.parametrize("text", ["1e999", "NaN", "[-Infinity]", "{"])
def test_json_without_bounds_is_a_value_error(text):
    with pytest.raises(ValueError, match=r"too large|no number|no JSON"):
        parse_json(text)
    assert parse_json(b'{"a": [1, -2.5, null, true, "x"]}') == {"a": [1, -2.5, None, True, "x"]}


@pytest.mark.parametrize("number", [0, *range(8, len(CONTROL))])
def test_no_value_of_a_field_ends_a_reader(tmp_path, number):
    """Every field of every kind of line, every wrong value; beside it a run that is shown."""
    good = make_run(tmp_path / "runs" / "good", *CONTROL)
    bad = make_run(tmp_path / "runs" / "bad")
    record = json.loads(CONTROL[number])
    refused = 0
    for name in record:
        for value in WRONG:
            text = json.dumps({**record, name: "HERE"}).replace('"HERE"', value)
            lines = [*CONTROL[:number], text.encode() + b"\n", *CONTROL[number + 1 :]]
            (bad / FILE_NAME).write_bytes(b"".join(lines))
            try:
                parse_record(text)
            except ValueError:
                refused += 1
                assert f"line {number + 1}" in scan(bad)
            _, other = look_at_all(tmp_path / "runs")
            assert (other["status"], other["step"], other["notes"]) == ("done", 12, ["a note"])
            try:
                read_curves(bad, "bad")
            except UsageError as error:
                assert f"line {number + 1}" in str(error)
    assert refused >= len(WRONG) // 2 and scan(good) == ""


def test_lines_cut_and_mixed_at_random(tmp_path):
    rng, whole = random.Random(7), b"".join(CONTROL)
    make_run(tmp_path / "runs" / "good", *CONTROL)
    bad = make_run(tmp_path / "runs" / "bad")
    for _ in range(100):
        content = bytearray(whole)
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(content))
            content[at : at + rng.randint(0, 9)] = rng.choice((b"\n", b"{", b'"', b"-9e9", b"\0"))
        (bad / FILE_NAME).write_bytes(content)
        assert look_at_all(tmp_path / "runs")[1]["status"] == "done"
        scan(bad)


@pytest.mark.parametrize("beat", ["{", '{"time": "x"}', '{"doing": [[]], "seconds": 1e308}'])
def test_a_heartbeat_that_is_none_stops_nothing(tmp_path, beat):
    make_run(tmp_path / "runs" / "good", *CONTROL)
    bad = make_run(tmp_path / "runs" / "bad", run_line())
    (bad / "ranks").mkdir()
    (bad / "ranks" / "0.json").write_text(beat)
    assert look_at_all(tmp_path / "runs")[1]["status"] == "done"


def test_what_a_kind_needs_is_there():
    for kind, names in REQUIRED.items():
        record = next(r for r in map(json.loads, CONTROL) if r["kind"] == kind)
        for name in names:
            with pytest.raises(ValueError, match=f"{kind} without {name}"):
                parse_record(json.dumps({**record, name: None}))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"step": True}, "step is True, not int"),
        ({"seconds": {"total": "1"}}, "seconds is '1', not float"),
        ({"seconds": 1.0}, "seconds is 1.0, not dict"),
    ],
)
def test_a_value_beyond_what_its_field_holds_is_named(fields, message):
    record = {"kind": "step", "step": 1, "loss": 2, "seconds": {"total": 1.0}}
    assert parse_record(json.dumps(record)) == record
    with pytest.raises(ValueError, match=re.escape(message)):
        parse_record(json.dumps({**record, **fields}))


def test_plot_leaves_out_the_run_that_cannot_be_read(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "runs" / "good", *CONTROL)
    bad = make_run(tmp_path / "runs" / "bad", *CONTROL[:3], b'{"kind": "step", "step": "x"}\n')
    append(bad, *CONTROL[3:])
    assert main(["plot", "good", "bad"]) == 0
    printed = capsys.readouterr().out
    assert (
        "left out: runs/bad/progress.jsonl, line 4" in printed and "step is 'x', not int" in printed
    )
    assert main(["plot", "bad"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_watch_names_the_line_where_it_prints_a_line_for_each_run(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "runs" / "good", *CONTROL)
    make_run(tmp_path / "runs" / "bad", b'{"kind": "run", "epochs": "x"}\n')
    assert main(["watch", "good", "bad", "--once"]) == 0
    good, bad = capsys.readouterr().out.splitlines()
    assert "cannot be read" not in good
    assert "1 line of the record cannot be read: runs/bad" in bad and "line 1: " in bad
