"""Records with lost lines: each is named, and no reader of others ends by it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
