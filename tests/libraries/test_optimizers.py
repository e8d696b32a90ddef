"""Optimizers of torch.optim and timm.optim: all names are in the table, as they are judged."""

from __future__ import annotations

import pytest

from scripts.parts import optimizers
from tests.support.api import parts

FAST = {
    "torch:Adagrad": "",
    "torch:LBFGS": "closure",
    "torch:Rprop": "ignores the learning rate",
    "torch:SparseAdam": "sparse gradients",
    "timm:adahessian": "gradients of gradients",
    "timm:cadopt": "",
    "timm:fusedlamb": "apex",
    "timm:kron": "compiles code",
    "timm:nlars": "",
}


def test_every_name_is_accepted_or_refused():
    table = parts.read_table()
    names = {
        f"{library}:{name}"
        for library in ("torch", "timm")
        for kind in table["optimizer", library]
        for name in kind
    }
    assert names == optimizers.candidates().keys()
    assert len(names) == 101 + 15


@pytest.mark.parametrize("name", FAST)
def test_a_few_are_judged_as_the_table_says(name):
    refused = optimizers.judge(name).refused
    assert FAST[name] in refused and bool(FAST[name]) == bool(refused)
    library, _, bare = name.partition(":")
    assert parts.read_table()["optimizer", library].refused.get(bare, "") == refused
