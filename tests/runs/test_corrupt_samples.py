"""A corrupt sample ends a run by name and costs no step: mended, the run goes on from there."""

from __future__ import annotations

from pathlib import Path

import h5py
import pytest

import hpctrain as hp
from tests.support.launches import checkpoint_steps, run_of
from tests.support.short import records, short_run

pytestmark = pytest.mark.ranks(2)
ROW = {"train": 60, "validation": 11, "test": 17}


@pytest.fixture
def settings(tmp_path):
    return short_run(tmp_path) | {"deterministic": True, "shards": 4, "read_buffer": "1K"}


def flip(settings, split, column="images"):
    """Flip a bit of the image, or one that makes the label greater than any class."""
    with h5py.File(settings["data"]) as file:
        stored = file[f"{split}/{column}"]
        row_bytes = stored.id.get_storage_size() // len(stored)
        place = stored.id.get_offset() + ROW[split] * row_bytes + row_bytes // 2
    content = bytearray(Path(settings["data"]).read_bytes())
    content[place] ^= 1
    Path(settings["data"]).write_bytes(content)


CASES = [  # split, what is flipped, --verify, --validate-every, steps that are done (0: some)
    *[("train", "images", True, "1epoch", 0), ("test", "images", True, "1epoch", 14)],
    *[("validation", "images", True, n, e) for n, e in (("5steps", 5), ("1epoch", 7), ("0", 14))],
    *[("train", "targets", verify, "1epoch", 0) for verify in (True, False)],
    ("validation", "targets", False, "1epoch", 7),
]


@pytest.mark.parametrize(("split", "column", "verify", "every", "reached"), CASES)
def test_a_corrupt_sample_is_named_and_no_step_is_lost(
    comm, settings, split, column, verify, every, reached
):
    settings |= {"verify": verify, "validate_every": every}
    whole = hp.train(**settings | {"run": "whole"})
    comm.Barrier()
    if comm.rank == 0:
        flip(settings, split, column)
    comm.Barrier()
    with pytest.raises(hp.RunError, match=rf"sample {ROW[split]} of split '{split}'") as caught:
        hp.train(**settings)
    assert caught.value.exit_code == 1 and "\n" not in str(caught.value)
    comm.Barrier()
    if comm.rank == 0:
        kept = [record["step"] for record in records(settings, "step")]
        assert kept == list(range(1, len(kept) + 1))
        assert len(kept) == (reached or len(kept)) > 0
        assert checkpoint_steps(settings) == [len(kept)]
        assert records(settings, "end")[-1]["status"] == "failed"
        assert hp.load(run_of(settings)).metadata["step"] == len(kept)
        flip(settings, split, column)
    comm.Barrier()
    assert hp.train(**settings).figures == whole.figures
    if comm.rank == 0:
        runs = [records(settings | {"run": run})[-1]["digest"] for run in ("a", "whole")]
        assert runs[0] == runs[1]
        steps = [record["step"] for record in records(settings, "step")]
        assert steps == list(range(1, 15))  # none was trained twice


@pytest.mark.parametrize("shuffle", ["partition", "global"])
def test_a_label_that_is_not_a_class_is_named_before_classes_are_drawn(comm, settings, shuffle):
    if comm.rank == 0:
        flip(settings, "train", "targets")
    comm.Barrier()
    with pytest.raises(hp.RunError, match="sample 60 of split 'train'.*its label is") as caught:
        hp.train(**settings, balanced_sampling=True, shuffle=shuffle)
    assert caught.value.exit_code == 1 and "\n" not in str(caught.value)
    comm.Barrier()
