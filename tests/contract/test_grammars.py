"""Settings that are texts: what the grammar allows is accepted, all else is one line with the flag.

The data are missing, so that an accepted setting leads to the refusal of these, and nothing runs.
"""

from __future__ import annotations

import datetime as dt
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

import hpctrain as hp
from tests.support.ranks import alone

NUMBER = st.floats(1e-3, 1e3).map(repr)
COUNT = st.integers(1, 10**6)
TIME = st.one_of(
    st.tuples(NUMBER, st.sampled_from("smhd")).map("".join),
    st.tuples(st.integers(1, 30), st.times()).map("{0[0]}-{0[1]:%H:%M:%S}".format),
    st.times(dt.time(0, 0, 1)).map(lambda time: f"{time:%H:%M:%S}"),
)


def numbered(*nouns):
    """Numbers with one of these nouns, and 0."""
    return st.tuples(COUNT.map(str), st.sampled_from(nouns)).map("".join) | st.just("0")


def joined(parts):
    """One to five of these parts."""
    return st.lists(parts, min_size=1, max_size=5).map(",".join)


def shares(numbers):
    """Shares of up to three splits, as decimals."""
    first, second = sorted(numbers)
    found = [first + 1, second - first, 1000 - second - 1]
    return ",".join(f"0.{share:03}" for share in found)


NAMES = st.text(string.ascii_lowercase + "0123456789._*", min_size=1)
GRAMMARS = {
    "--checkpoint-every": numbered("step", "steps", "epoch", "epochs") | TIME,
    "--validate-every": numbered("step", "steps", "epoch", "epochs"),
    "--time-limit": TIME,
    "--read-buffer": st.tuples(COUNT.map(str), st.sampled_from(["", "K", "MiB", "GB"])).map(
        "".join
    ),
    "--worker-load": joined(NUMBER),
    "--class-weights": joined(NUMBER) | st.just("balanced"),
    "--freeze": joined(NAMES),
    "--lr-factors": joined(st.tuples(NAMES, NUMBER).map("=".join)),
    "--split": st.tuples(*[st.integers(0, 998)] * 2).map(shares),
    "--fold": st.tuples(COUNT, COUNT).map(lambda pair: f"{min(pair)}/{max(pair) + 1}"),
    "--size": st.tuples(*[st.integers(1, 16384)] * 2).map(lambda pair: "{}x{}".format(*pair)),
}
PACKS = {"--split", "--fold", "--size"}
ODD = ["", " ", "-", ",", "0", "-1", "nan", "inf", "1e9999", "1e99999999", "9" * 5000, "1/0", "²s"]
ODD += ["9" * 5000 + ":00:00", "9" * 5000 + "/" + "9" * 5000, "\x1b[2J", "٣m", "\ud800"]


def message(flag, text):
    """What is told of a setting with this text: one line."""
    words = ["pack", "nowhere"] if flag in PACKS else ["--data", "nowhere"]
    ended = alone(*words, f"{flag}={text}")
    assert ended.code == 2
    (line,) = (line for line in ended.err.splitlines() if "starting on" not in line)
    return line


@given(flag=st.sampled_from([*GRAMMARS]), data=st.data())
def test_what_the_grammar_allows_is_accepted(flag, data):
    text = data.draw(GRAMMARS[flag])
    assert "nowhere" in message(flag, text) and flag not in message(flag, text)


@given(flag=st.sampled_from([*GRAMMARS]), data=st.data())
def test_any_text_is_accepted_or_refused_by_name(flag, data):
    whole = data.draw(GRAMMARS[flag])
    place = data.draw(st.integers(0, len(whole)))
    other = data.draw(st.text(st.characters(exclude_categories=["Cc", "Zl", "Zp"]), max_size=3))
    line = message(flag, whole[:place] + other + whole[place + 1 :])
    assert flag in line or "nowhere" in line


@pytest.mark.parametrize("flag", GRAMMARS)
def test_odd_texts_are_accepted_or_refused_by_name(flag):
    for text in ODD:
        line = message(flag, text)
        assert flag in line or "nowhere" in line, text[:20]


def test_options_may_stand_between_arguments(tmp_path):
    """`predict RUN --trust-code IMAGES` means the same as with the option at the end."""
    words = [["a", "b"], ["--runs-dir", tmp_path]]
    orders = [[*words[0], *words[1]], [*words[1], *words[0]], ["a", *words[1], "b"]]
    for order in orders:
        ended = alone("compare", *order)
        assert ended.code == 2
        assert f"no run or sweep 'a' in {tmp_path}" in ended.err
    assert "unexpected argument 'c'" in alone("compare", "a", *words[1], "b", "c").err


def test_texts_that_mean_the_same_are_equal_and_are_kept_as_they_were_given():
    for name, first, second, other in (
        ("time_limit", "600s", "10m", "11m"),
        ("read_buffer", "1024K", "1M", "2M"),
        ("checkpoint_every", "0:01:00", "60s", "60steps"),
        ("validate_every", "1epoch", "1epochs", "2epochs"),
        ("lr_factors", "fc=0.1", "fc = 1e-1", "fc=1"),
    ):
        one, two, three = (hp.Config(**{name: text}) for text in (first, second, other))
        assert one == two != three
        assert [str(getattr(each, name)) for each in (one, two)] == [first, second]


TIMES = {  # as Slurm reads them (sbatch(1), --time), and with a unit -> seconds
    **{"90": 5400, "30:00": 1800, "1:05": 65, "2:30:00": 9000, "100:00:00": 360000},
    **{"1-0": 86400, "1-12": 129600, "1-12:30": 131400, "1-00:00:00": 86400, "2-03:04:05": 183845},
    **{"1d": 86400, "1.5h": 5400, "90s": 90, "0.5": 30},
}
WRONG = [
    "1-",
    "-1",
    "1-2-3",
    "1:2",
    "1:2:3",
    "1:02:3",
    "1-00:0",
    "1d12h",
    "::",
    "1:",
    "1-:00",
    "0-0",
]


def test_times_are_those_of_slurm():
    assert {text: float(hp.Config(time_limit=text).time_limit) for text in TIMES} == TIMES
    for text in WRONG:
        with pytest.raises(hp.UsageError, match="--time-limit .*give a time, such as 30m"):
            hp.Config(time_limit=text)
    every = [hp.Config(checkpoint_every=text).checkpoint_every for text in ("1-12", "2d", "30:00")]
    assert [each.seconds for each in every] == [129600, 172800, 1800]
    with pytest.raises(hp.UsageError, match="as in 2epochs, 500steps or 10m"):
        hp.Config(checkpoint_every="30.5")
