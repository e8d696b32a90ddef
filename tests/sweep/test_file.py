"""sweep.toml: what it expands to, and what it refuses."""

import re

import pytest

from hpctrain.errors import UsageError
from hpctrain.sweep.file import read_sweep


def networks(tmp_path, text):
    path = tmp_path / "sweep.toml"
    path.write_text(text)
    return read_sweep(path)


def test_a_grid_and_variants_make_networks_with_names_by_what_differs(tmp_path):
    found = networks(
        tmp_path,
        """
        [base]
        epochs = 3
        lr = 1
        [grid]
        optimizer = ["sgdm", "adam"]
        flip = [true, false]
        [[variant]]
        name = "very wide/one"
        model = "mynets:wide"
        [[variant]]
        data = "sets/b.h5"
        lr = 0.003
        """,
    )
    assert [network.name for network in found.networks] == [
        "01-optimizer=sgdm,flip=yes",
        "02-optimizer=sgdm,flip=no",
        "03-optimizer=adam,flip=yes",
        "04-optimizer=adam,flip=no",
        "05-very_wide_one",
        "06-data=b.h5,lr=0.003",
    ]
    assert found.differing == ("optimizer", "flip", "model", "data", "lr")
    first, last = found.networks[0].config, found.networks[-1].config
    assert (first.epochs, first.lr, first.optimizer, first.flip) == (3, 1.0, "sgdm", True)
    assert isinstance(first.lr, float)
    assert (last.epochs, last.lr, last.optimizer) == (3, 0.003, None)


def test_names_of_many_networks_sort_by_number(tmp_path):
    names = [n.name for n in networks(tmp_path, f"[grid]\nseed = {list(range(120))}").networks]
    assert names == sorted(names)
    assert names[0] == "001-seed=0"


GRID = "[grid]\nlr = [0.1]\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "there is no network"),
        ("[base]\nepochs = 3", "there is no network"),
        ("[grid]", "the [grid] is empty"),
        ("[grid]\nlr = []", "lr must be a list of values, not []"),
        ("[grid]\nlr = 0.1", "lr must be a list of values, not 0.1"),
        ("[grid]\nlr = [0.1, 0.1]", "have the same settings"),
        ("[grids]\nlr = [1]", "no table 'grids', did you mean 'grid'?"),
        ("grid = 3", "grid must be a table, [grid]"),
        ("[variant]\nlr = 0.1", "variant must be a table, [[variant]]"),
        (GRID + "[base]\nepoch = 1", "[base]: unknown setting 'epoch', did you mean 'epochs'?"),
        ("[grid]\nlearning = [1]", "[grid]: unknown setting 'learning'"),
        ("[grid]\nlr = ['much']", "[grid]: --lr much: expected a number"),
        ("[grid]\nlr = [[1, 2]]", "lr must be one value"),
        ("[grid]\noptimizer = ['lion']", "lion"),
        ("[grid]\nlr = [-1.0]", "network 01-lr=-1: --lr -1.0"),
        (GRID + "[base]\nepochs = 0", "--epochs 0: give 1 or more"),
        (GRID + "[base]\ncheckpoint_every = 'often'", "--checkpoint-every"),
        (GRID + "[base]\nhang_timeout = 'soon'", "--hang-timeout soon"),
        (GRID + "[base]\ntime_limit = 'soon'", "--time-limit soon"),
        (GRID + "[base]\nrun = 'a'", "[base]: run is set by the sweep itself"),
        ("[grid]\nruns_dir = ['a']", "[grid]: runs_dir is set by the sweep itself"),
        ("[[variant]]\nresume = 'must'", "[[variant]] 1: resume is set by the sweep itself"),
        (GRID + "[[variant]]\nname = 3", "name of a variant must be a text"),
        (
            "[[variant]]\nname='a'\nlr=1\n[[variant]]\nname='a'\nlr=2",
            "two variants have the name 'a'",
        ),
        (f"[grid]\nseed = {list(range(101))}\nlr = {[n + 1 for n in range(100)]}", "10,100"),
        ("[grid", "is no TOML"),
    ],
)
def test_what_is_refused(tmp_path, text, message):
    with pytest.raises(UsageError, match=re.escape(message)) as caught:
        networks(tmp_path, text)
    assert "\n" not in str(caught.value)
    assert "sweep.toml" in str(caught.value)
