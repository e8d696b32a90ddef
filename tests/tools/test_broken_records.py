"""Records with wrong values or lost lines: each is named, and no reader of others ends by it."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hpctrain as hp
from tests.support.api import FIELDS, read_records
from tests.support.page import watched
from tests.support.ranks import alone
from tests.support.records import (
    FILE,
    beat,
    end_line,
    epoch_line,
    evaluation_line,
    line,
    make_run,
    run_line,
    step_lines,
)

WRONG = ["NaN", "1e999", "null", "true", '""', '"x"', "[]", "{}", '{"a": {}}', "-1", "0", "1.5"]
HOLDS = {int: int, float: (int, float), str: str, bool: bool}  # JSON's values of a field's type
GOOD = [
    run_line(name="good", rows={"train": 8}),
    *step_lines(5, 12, learning_rate=0.5),
    evaluation_line(10, metrics={"f1": 0.5}, balanced_accuracy=0.5),
    evaluation_line(12, "test"),
    epoch_line(1),
    line("note", text="a note"),
    line("digest", step=12, digest="ab"),
    end_line(shares={"data": 0.25, "other": 0.75}, step_seconds=0.1, idle=0.0),
]
KINDS = {json.loads(each)["kind"]: number for number, each in enumerate(GOOD)}


def fits(field, value):
    """Whether a field can hold this value, as docs/runs.md says."""
    if value is None:
        return not field.required
    if field.is_object and not isinstance(value, dict):
        return False
    return all(
        each is None
        or (isinstance(each, HOLDS[field.type]) and isinstance(each, bool) == (field.type is bool))
        for each in (value.values() if field.is_object else [value])
    )


def spoiled(number, name, text):
    """The good record with the JSON text `text` as the value of a field of a line."""
    record = json.dumps({**json.loads(GOOD[number]), name: "HERE"})
    own = record.replace('"HERE"', text).encode() + b"\n"
    return b"".join([*GOOD[:number], own, *GOOD[number + 1 :]])


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """The folder of a good run and a bad one, whose record tests write."""
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "runs" / "good", *GOOD)
    make_run(tmp_path / "runs" / "bad")
    return tmp_path / "runs"


@pytest.mark.parametrize("kind", FIELDS)
def test_a_value_that_a_field_cannot_hold_is_refused_by_line_and_name(runs, kind):
    number = KINDS[kind]
    for (name, field), text in itertools.product(FIELDS[kind].items(), WRONG):
        (runs / "bad" / FILE).write_bytes(spoiled(number, name, text))
        beyond = text in ("NaN", "1e999")
        if not beyond and fits(field, json.loads(text)):
            assert len(list(read_records(runs / "bad"))) == len(GOOD), (name, text)
            continue
        with pytest.raises(hp.UsageError, match=f"line {number + 1} [^\n]*$") as caught:
            list(read_records(runs / "bad"))
        assert name in str(caught.value) or beyond
        history = hp.History(runs / "bad")  # as a resumed launch reads it
        history.follow()
        assert f"line {number + 1}" in history.problem


@given(data=st.data())
@settings(max_examples=60)
def test_no_record_keeps_another_run_from_being_shown(data, tmp_path_factory):
    """Values of any field exchanged, or bytes anywhere: displays show what can be read."""
    whole, runs = b"".join(GOOD), tmp_path_factory.mktemp("runs")
    if data.draw(st.booleans()):
        number = data.draw(st.integers(0, len(GOOD) - 1))
        name = data.draw(st.sampled_from(list(json.loads(GOOD[number]))))
        content = bytearray(spoiled(number, name, data.draw(st.sampled_from(WRONG))))
    else:
        content = bytearray(whole)
        for _ in range(data.draw(st.integers(1, 4))):
            at = data.draw(st.integers(0, len(content) - 1))
            length = data.draw(st.integers(0, 9))
            content[at : at + length] = data.draw(
                st.sampled_from([b"\n", b"{", b'"', b"-9e9", b"\0"])
            )
    bad = make_run(runs / "bad", bytes(content))
    good = make_run(runs / "good", *GOOD)
    with watched(bad, good) as page:
        _, second = page.runs()
        page.curves(0)
    assert (second["status"], second["notes"]) == ("done", ["a note"])
    assert "step 12 of" in second["progress"]
    done = alone("watch", bad, good, "--once")
    assert (done.code, done.err, len(done.out.splitlines())) == (0, "", 2)
    assert done.out.splitlines()[1].startswith("good  done")


def test_plot_leaves_out_the_run_that_cannot_be_read_and_names_the_line(runs):
    (runs / "bad" / FILE).write_bytes(spoiled(3, "step", '"x"'))
    done = alone("plot", "good", "bad")
    assert done.code == 0 and (runs / "training.png").exists()
    assert "bad/progress.jsonl, line 4" in done.out and "'x'" in done.out
    alone_bad = alone("plot", "bad")
    assert (alone_bad.code, alone_bad.err.count("\n")) == (2, 1)


def test_watch_names_the_line_in_the_line_of_that_run(runs):
    (runs / "bad" / FILE).write_bytes(b'{"kind": "run", "epochs": "x"}\n')
    good, bad = alone("watch", "good", "bad", "--once").out.splitlines()
    assert "cannot be read" not in good
    assert "1 line of the record cannot be read: runs/bad" in bad and "line 1 " in bad
    (runs / "bad" / FILE).write_bytes(b"rubbish\n")
    bad, good = alone("watch", "bad", "good", "--once").out.splitlines()
    assert "progress.jsonl, line 1 is no line of a record" in bad and good.startswith("good  done")


@pytest.mark.parametrize("text", ["{", '{"time": "x"}', '{"doing": [[]], "seconds": 1e308}'])
def test_a_heartbeat_that_is_none_stops_nothing(runs, text):
    beat(runs / "bad")
    (runs / "bad" / FILE).write_bytes(run_line())
    (runs / "bad" / "ranks" / "0.json").write_text(text)
    bad, good = alone("watch", "bad", "good", "--once").out.splitlines()
    assert bad.startswith("bad  ") and good.startswith("good  done")


def test_odd_facts_and_values_do_no_harm(tmp_path):
    odd = {"loss": "x", "accuracy": True, "seconds": None, "slowest_rank": "?", "rows": []}
    lines = [run_line(epochs="?"), *step_lines(1, 1, **odd), *step_lines(2, 2, loss=None)]
    run = make_run(tmp_path / "a", *lines)
    with watched(run) as page:
        (found,) = page.runs()
        assert page.curves()["loss"] == {}
    assert found["progress"] == "epoch 1, step 2" and found["share"] is None
    assert dict(found["facts"])["step"].startswith("100.0 ms")
