"""The training loop: one Allreduce a step, and what ends it in one line."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

import hpctrain as hp
from tests.support.api import open_recorder, train

pytestmark = pytest.mark.ranks
STEPS = 7  # of an epoch


class CountingComm:
    """A communicator that counts the calls made through it."""

    def __init__(self, comm):
        self._comm, self.calls = comm, Counter()

    def __getattr__(self, name):
        value = getattr(self._comm, name)
        if not callable(value):
            return value

        def counted(*args, **kwargs):
            self.calls[name] += 1
            return value(*args, **kwargs)

        return counted


@pytest.mark.parametrize(
    ("model", "per_rank"), [("digits", 1), ("digits", 3), ("tests.support.nets:with_dropout", 1)]
)
def test_exactly_one_mpi_call_a_step(comm, settings, monkeypatch, model, per_rank):
    """Whatever the network, and however many shards a rank accumulates."""
    counting, seen = CountingComm(comm), []
    recorder = type(open_recorder(None))
    write = recorder.write

    def count(self, kind, **fields):
        if kind == "step":
            seen.append(counting.calls.copy())
        return write(self, kind, **fields)

    monkeypatch.setattr(recorder, "write", count)
    once = {"epochs": 1, "validate_every": "0", "checkpoint_every": "0", "test": False}
    config = hp.Config(**{**settings, **once, "model": model, "shards": per_rank * comm.size})
    assert train(config, counting).exit_code == 0
    between = [after - before for before, after in itertools.pairwise(seen)]
    assert between == [Counter({"Allreduce": 1})] * (STEPS - 1)


def test_all_ranks_start_from_the_weights_of_rank_0(comm, settings):
    """Otherwise their digests would differ, which ends a run."""
    model = "tests.support.nets:DifferentOnEveryRank"
    assert hp.train(**{**settings, "model": model, "epochs": 1}).status == "done"


@pytest.mark.parametrize("name", ["Skipping", "Overflowing"])
def test_a_batch_norm_layer_that_is_skipped_or_overflows_is_an_error(comm, settings, name):
    said = {"Skipping": "did not run exactly once in step", "Overflowing": "step 1 .*not finite"}
    with pytest.raises(hp.RunError, match=said[name]):
        hp.train(**{**settings, "model": f"tests.support.nets:{name}"})


@pytest.mark.ranks(1)
@pytest.mark.parametrize("memory", ["host", "gpu", "cublas", "python"])
def test_out_of_memory_is_one_line_that_names_shards(comm, settings, memory):
    model = f"tests.support.nets:out_of_{memory}_memory"
    with pytest.raises(hp.RunError, match=r"^out of memory .* --shards .*") as caught:
        hp.train(**{**settings, "model": model})
    text = str(caught.value)
    assert "\n" not in text and "Management" not in text
