"""Records with lost lines: each is named, and no reader of others ends by it."""

from __future__ import annotations

import json
from contextlib import nullcontext

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hpctrain as hp
from tests.support.api import FIELDS, read_records
from tests.support.page import watched
from tests.support.ranks import alone
from tests.support.records import (
    FILE,
    NEEDED,
    beat,
    end_line,
    epoch_line,
    evaluation_line,
    line,
    make_run,
    run_line,
    step_lines,
)

GOOD = [
    run_line(name="good", rows={"train": 8}, figures={"accuracy": "max", "loss": "min"}),
    *step_lines(5, 12, learning_rate=0.5),
    evaluation_line(10, metrics={"f1": 0.5}, balanced_accuracy=0.5),
    evaluation_line(12, "test"),
    epoch_line(1),
    line("note", text="a note"),
    line("digest", step=12, digest="ab"),
    end_line(shares={"data": 0.25, "other": 0.75}, step_seconds=0.1, idle=0.0),
]


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """The folder of a good run and a bad one, whose fourth line is lost."""
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "runs" / "good", *GOOD)
    make_run(tmp_path / "runs" / "bad", *GOOD[:3], b"\0" * 90 + b"\n", *GOOD[4:])
    return tmp_path / "runs"


@given(data=st.data())
@settings(max_examples=60)
def test_no_record_keeps_another_run_from_being_shown(data, tmp_path_factory):
    """Bits flipped and bytes lost anywhere, and the end: displays show what can be read."""
    content, runs = bytearray(b"".join(GOOD)), tmp_path_factory.mktemp("runs")
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(content) - 1))
        length = min(data.draw(st.integers(1, 4096)), len(content) - at)
        content[at : at + length] = b"\0" * length
    for _ in range(data.draw(st.integers(0, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 6))
    bad = make_run(runs / "bad", bytes(content[: data.draw(st.integers(0, len(content)))]))
    good = make_run(runs / "good", *GOOD)
    with watched(bad, good) as page:
        _, second = page.runs()
        page.curves(0)
    assert (second["status"], second["notes"]) == ("done", ["a note"])
    assert "step 12 of" in second["facts"][0]
    done = alone("watch", bad, good, "--once")
    assert (done.code, done.err, len(done.out.splitlines())) == (0, "", 2)
    assert done.out.splitlines()[1].startswith("good  done")


def test_the_line_is_named_by_plot_which_leaves_out_the_run_and_by_watch(runs):
    done = alone("plot", "good", "bad")
    assert done.code == 0 and (runs / "training.png").exists()
    assert "left out: runs/bad/progress.jsonl, line 4 is no line of a record" in done.out
    done = alone("plot", "bad")
    assert (done.code, done.err.count("\n")) == (2, 1)
    good, bad = alone("watch", "good", "bad", "--once").out.splitlines()
    assert "cannot be read" not in good and bad.startswith("bad  done")
    assert "1 line of the record cannot be read: runs/bad" in bad and "line 4 " in bad


@pytest.mark.parametrize("text", ["{", '{"time": "x"}', '{"doing": [[]], "seconds": 1e308}'])
def test_a_heartbeat_that_is_none_stops_nothing(runs, text):
    beat(runs / "bad")
    (runs / "bad" / FILE).write_bytes(run_line())
    (runs / "bad" / "ranks" / "0.json").write_text(text)
    bad, good = alone("watch", "bad", "good", "--once").out.splitlines()
    assert bad.startswith("bad  ") and good.startswith("good  done")


def test_steps_that_two_jobs_wrote_are_named(runs):
    """Without locks on their file system, both append: then neither curve is right."""
    make_run(runs / "two", GOOD[0], *step_lines(1, 4), GOOD[0], *step_lines(1, 6), GOOD[-1])
    two, good = alone("watch", "two", "good", "--once").out.splitlines()
    assert "4 lines of the record cannot be read: runs/two" in two and "step 6 of" in two
    assert "line 7 is no line of a record: step 1 comes after step 4" in two
    assert "cannot be read" not in good
    assert "line 7 is no line" in alone("plot", "two", "good").out


# Values that a field cannot have

ODD = ["null", "true", "-1", "0", "0.5", "2", "1e308", "-1e308", "1e999", str(2**63), "9" * 400]
ODD += ["NaN", "Infinity", "-Infinity", '"x"', '"\\ud800"', "[]", "[1]", "[" * 50_000]
ODD += ["{}", '{"a": 1}', '{"a": null}', '{"a": NaN}', '{"a": "x"}', '{"a": [1]}', '{"a": {}}']
OF_NUMBERS = {"{}", '{"a": 1}', '{"a": null}'}
OF_TEXTS = {"{}", '{"a": null}', '{"a": "x"}'}
OF_ANY = OF_NUMBERS | {'{"a": "x"}', '{"a": [1]}', '{"a": {}}'}
ALLOWED = {
    int: {"0", "2"},
    float: {"-1", "0", "0.5", "2", "1e308", "-1e308", str(2**63)},
    str: {'"x"'},
    bool: {"true"},
    object: OF_ANY,
}
MADE = {record["kind"]: record for record in map(json.loads, GOOD)}


def is_allowed(kind, name, text):
    """Whether a field may have this value, given as JSON."""
    if name in ("kind", "time"):
        return (name, text) == ("kind", '"x"')  # of another version: it is ignored
    if text == "null":
        return name not in NEEDED.get(kind, [])
    field = FIELDS[kind][name]
    if field.is_share:
        return text in ("0", "0.5")
    objects = {float: OF_NUMBERS, str: OF_TEXTS, object: OF_ANY}
    return text in (objects if field.is_object else ALLOWED)[field.type]


def with_value(kind, name, text, step=13):
    """The line of a record in which a field has this value, given as JSON."""
    made = MADE[kind] | ({"step": step} if kind == "step" else {})
    own = json.dumps({key: value for key, value in made.items() if key != name})
    return f'{own[:-1]}, "{name}": {text}}}\n'.encode()


@pytest.mark.parametrize("kind", FIELDS)
def test_a_line_with_a_value_that_its_field_cannot_have_is_corrupt(tmp_path, kind):
    """For every field. Readers of other lines, and of other runs, go on."""
    odd = [(name, text) for name in ("kind", "time", *FIELDS[kind]) for text in ODD]
    wrong = [not is_allowed(kind, *each) for each in odd]
    file = tmp_path / FILE
    for each, is_wrong in zip(odd, wrong, strict=True):
        file.write_bytes(with_value(kind, *each))
        with pytest.raises(hp.UsageError, match="line 1 is no") if is_wrong else nullcontext():
            assert len([*read_records(tmp_path)]) == 1, each
    if kind == "step":  # steps must be in order
        odd = [each for each in odd if each[0] != "step"]
        wrong = [not is_allowed(kind, *each) for each in odd]
    lines = [with_value(kind, *each, 13 + number) for number, each in enumerate(odd)]
    make_run(tmp_path / "odd", *GOOD[:-1], *lines, GOOD[-1])
    accepted = [line for line, is_wrong in zip(lines, wrong, strict=True) if not is_wrong]
    read = make_run(tmp_path / "read", *GOOD[:-1], *accepted, GOOD[-1])
    make_run(tmp_path / "good", *GOOD)
    done = alone("watch", *(tmp_path / name for name in ("odd", "read", "good")), "--once")
    assert (done.code, done.err) == (0, "")
    of_odd, of_read, of_good = done.out.splitlines()
    assert f"{sum(wrong)} lines of the record cannot be read" in of_odd
    assert of_good.startswith("good  done") and "cannot be read" not in of_read
    with watched(tmp_path / "odd", read) as page:
        page.runs()
        page.curves(0)
        page.curves(1)
    assert len(hp.history(read).steps["step"]) >= 8
    done = alone("plot", tmp_path / "odd", read, "--output", tmp_path / "plot.png")
    assert (
        done.code == 0
        and f"left out: {tmp_path / 'odd' / FILE}, line {len(GOOD)} is no" in done.out
    )
