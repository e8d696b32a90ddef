"""Text from data cannot steer a terminal, and is no part of a page's program."""

from __future__ import annotations

import re
import sys
from io import BytesIO, TextIOWrapper

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.api import open_recorder
from tests.support.page import watched
from tests.support.ranks import alone
from tests.support.records import (
    append,
    end_line,
    evaluation_line,
    line,
    make_run,
    run_line,
    step_line,
    tell,
)
from tests.support.screen import without_escapes

STEERING = st.sampled_from(
    ["\x1b[2J", "\x1b]0;evil\x07", "\x9b31m", "\r", "\x07", "\u202e", "\x00"]
)
TEXT = st.lists(st.text(max_size=5) | STEERING, min_size=1, max_size=4).map("".join)
NAME = TEXT.map(lambda text: re.sub(r"[/\0\ud800-\udfff]", "", text).strip(".")[:40] or "x")


def can_steer(text):
    """The characters that a terminal or a reader's eye would obey, newlines excepted."""
    return [c for c in text if not c.isprintable() and c != "\n"]


@given(name=NAME, text=TEXT, split=TEXT)
@settings(max_examples=60)
def test_no_escape_of_a_name_or_a_field_reaches_a_terminal_or_the_page(
    name, text, split, tmp_path_factory
):
    folder = tmp_path_factory.mktemp("runs") / name
    facts = {"name": text, "model": text, "device": text, "precision": text, "pack": text}
    run = make_run(folder, run_line(**facts), step_line(1), line("note", text=text))
    append(run, evaluation_line(1, split, metrics={text: 0.5}))
    with watched(run) as page:
        told = page.ask("/data").text + page.ask("/curves?run=0").text
        append(run, end_line("failed", text))
    once = alone("watch", run, "--once")
    assert once.code == 0 and once.out.count("\n") == 1
    refused = alone("watch", "--runs-dir", run / text.replace("\0", ""), "--once")
    assert refused.code == 2 and refused.err.count("\n") == 1
    for shown in (told, once.out, refused.err):
        assert not can_steer(shown)


@given(text=TEXT)
@settings(max_examples=60)
def test_no_escape_of_a_field_reaches_the_terminal_of_the_training(text, tmp_path_factory):
    for progress in ("plain", "bar"):
        with pytest.MonkeyPatch.context() as patch:
            written = TextIOWrapper(BytesIO(), "utf-8", newline="\n")
            patch.setattr(sys, "stdout", written)
            with open_recorder(tmp_path_factory.mktemp("run"), progress) as recorder:
                facts = {"name": text, "model": text, "device": text, "mpi": text, "pack": text}
                tell(recorder, "run", ranks=2, epochs=1, steps_per_epoch=1, **facts)
                tell(recorder, "step", step=1)
                recorder.phase(text)
                tell(recorder, "evaluation", split=text.replace("\n", ""), metrics={text: 0.5})
                tell(recorder, "note", text=text)
                tell(recorder, "end", status="failed", reason=text)
            written.flush()
            shown = written.buffer.getvalue().decode()
        if progress == "bar":
            commands = set(re.findall(r"\x1b\[[?0-9;]*[A-Za-z]", shown))
            assert all(each[-1] in "mAKhl" for each in commands)
            assert "\x1b[2J" not in shown
            shown = without_escapes(shown).replace("\r\n", "\n").replace("\r", "")
        assert not can_steer(shown)


def test_what_an_output_cannot_encode_is_escaped(tmp_path, monkeypatch):
    written = TextIOWrapper(BytesIO(), "ascii")
    monkeypatch.setattr(sys, "stdout", written)
    with open_recorder(tmp_path, "plain") as recorder:
        tell(recorder, "note", text="caf\u00e9\n\x1b[31m\udcff.jpg")
    written.flush()
    assert written.buffer.getvalue() == b"caf\\xe9\n\\x1b[31m\\udcff.jpg\n"
