"""Training on external HDF5 files: the same bits however they are stored, on any ranks."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

from hpctrain.config import Config, EvaluateConfig, PredictConfig, check_settings
from hpctrain.data.external import read_external
from hpctrain.data.split import Split
from hpctrain.errors import RunError, UsageError
from hpctrain.inference import evaluate, predict
from hpctrain.models import read_model
from hpctrain.plan_text import describe_plan
from hpctrain.report.record import read_records
from hpctrain.streams import IN_FLIGHT
from hpctrain.training import loop as inner
from hpctrain.training import train as loop
from hpctrain.training.setup import set_up
from hpctrain.training.steps import NonFinite
from tests.support.external import pixels, write
from tests.support.launch import run_mpi
from tests.support.packs import make_pack
from tests.training.runs import short_run

IMAGES, LABELS = pixels(211, (28, 28, 1), 10)
FLOATS = IMAGES.astype(np.float32) * np.float32(1 / 255)  # as bytes are scaled
NCHW = {"layout": "NCHW"}
STORED = {  # images, how they are stored, settings
    "one piece": (IMAGES, {}, {}),
    "NCHW": (IMAGES.transpose(0, 3, 1, 2), {}, NCHW),
    "gray": (IMAGES[..., 0], {}, {}),
    "chunks": (IMAGES, {"chunks": (1, 28, 28, 1), "compression": "gzip"}, {}),
    "chunks, NCHW": (
        IMAGES.transpose(0, 3, 1, 2),
        {"chunks": (1, 1, 14, 9), "compression": "lzf", "fletcher32": True},
        NCHW,
    ),
    "floats": (FLOATS, {}, {}),
    "doubles, chunks": (FLOATS.astype(np.float64), {"chunks": (1, 28, 28, 1)}, {}),
    "floats of bytes": (IMAGES.astype(np.float32), {}, {"max_value": 255.0}),
    "16 bits, chunks": (IMAGES.astype(np.uint16), {"chunks": (1, 28, 28, 1)}, {"max_value": 255.0}),
    "as in MATLAB": (IMAGES.transpose(0, 3, 2, 1), {}, {"layout": "NCWH"}),
}


@pytest.fixture
def settings(comm, shared_tmp):
    """A file ordered by class, in one piece, and how to train on it."""
    if comm.rank == 0:
        write(shared_tmp / "a.h5", IMAGES, LABELS, ("g/x", "g/y"))
    comm.Barrier()
    return short_run(
        shared_tmp,
        "a.h5",
        images="g/x",
        labels="/g/y",
        run="a",
        epochs=2,
        batch_size=16,
        threads=1,
        deterministic=True,
        shards=8,
        shuffle="blocks",
    )


def digest(config, comm, **changes):
    """The digest at the end of a run with these changes. Collective."""
    name = "-".join(map(str, changes.values()))
    config = dataclasses.replace(config, **{"run": name, **changes})
    assert loop.train(config, comm) == 0
    end = list(read_records(Path(config.runs_dir) / config.run))[-1] if comm.rank == 0 else None
    return comm.bcast(end)["digest"]


def stored(settings, comm, case):
    """The settings for the same images stored otherwise. Collective."""
    images, storage, changes = STORED[case]
    path = Path(settings.data).with_name(f"{case}.h5")
    if comm.rank == 0:
        write(path, images, LABELS, ("g/x", "g/y"), **storage)
    comm.Barrier()
    return dataclasses.replace(settings, data=str(path), **changes)


@pytest.mark.mpi
def test_the_same_bits_however_the_images_are_stored(comm, settings):
    """Bytes or floats, in one piece or in compressed chunks, channels first or last."""
    augmented = dataclasses.replace(settings, flip=True, shift=2)
    found = {case: digest(stored(augmented, comm, case), comm, run=case) for case in STORED}
    assert len(set(found.values())) == 1
    others = [{"shuffle": "partition"}, {"seed": 1}, {"split": "0.8,0.2"}, {"flip": False}]
    assert len({found["gray"], *(digest(augmented, comm, **other) for other in others)}) == 5


@pytest.mark.mpi
@pytest.mark.parametrize("shuffle", [None, "partition", "global", "blocks"])
@pytest.mark.parametrize("case", ["one piece", "chunks"])
def test_the_same_bits_as_on_one_rank(comm, settings, case, shuffle):
    alone = comm.Split(comm.rank)
    small = {"shuffle": shuffle, "read_buffer": "30K"}
    config = dataclasses.replace(stored(settings, comm, case), **small)
    together = digest(config, comm, run="together")
    assert together == (digest(config, alone, run="alone") if comm.rank == 0 else together)
    kept = digest(config, comm, run="kept", read_buffer="1G")
    by_window = shuffle == "blocks" or (case == "chunks" and shuffle is None)
    assert (kept == together) == (not by_window)  # there the memory decides what is mixed
    alone.Free()


@pytest.mark.mpi
@pytest.mark.parametrize("shuffle", ["partition", "global", "blocks"])
@pytest.mark.parametrize("case", ["one piece", "chunks", "floats"])
def test_every_training_row_once_and_every_batch_mixed(comm, settings, case, shuffle):
    config = dataclasses.replace(stored(settings, comm, case), shuffle=shuffle, batch_size=64)
    job = set_up(config, comm)
    assert job.plan.shuffle == shuffle
    own = {shard: set() for shard in job.loader.shards}  # classes that a shard meets
    steps = []
    for batches in job.loader.epoch(0):
        steps.append([b.targets for b in batches])
        for batch in batches:
            own[batch.shard] |= set(batch.targets.tolist())
    assert all(len(classes) >= 6 for classes in own.values())  # 3 where runs are not dealt
    mine = [torch.cat([*targets, torch.empty(0, dtype=torch.int64)]).numpy() for targets in steps]
    parts = comm.allgather(mine)
    labels = [np.concatenate(ranks) for ranks in zip(*parts, strict=True)]
    assert np.array_equal(np.sort(np.concatenate(labels)), np.sort(job.loader.split.labels))
    assert len(np.concatenate(labels)) == job.plan.rows == 211 - job.pack.splits["test"].samples
    full = [np.bincount(one, minlength=10) for one in labels[:-1]]
    assert all((counts > 0).sum() >= 8 and counts.max() < 20 for counts in full)


@pytest.mark.mpi
def test_a_run_goes_on_only_with_the_same_file(comm, settings):
    assert loop.train(settings, comm) == 0
    longer = dataclasses.replace(settings, epochs=3)
    with pytest.raises(UsageError, match="begun without --split, not with --split 0.8,0.2"):
        loop.train(dataclasses.replace(longer, split="0.8,0.2"), comm)
    if comm.rank == 0:
        changed = IMAGES.copy()
        changed[0, 0, 0, 0] ^= 1
        write(settings.data, changed, LABELS, ("g/x", "g/y"))
    comm.Barrier()
    with pytest.raises(UsageError, match="the run was begun with pack .*, not .*: it cannot go on"):
        loop.train(longer, comm)
    if comm.rank == 0:
        write(Path(settings.data).with_name("moved.h5"), IMAGES, LABELS, ("g/x", "g/y"))
    comm.Barrier()
    moved = dataclasses.replace(longer, data=str(Path(settings.data).with_name("moved.h5")))
    assert loop.train(moved, comm) == 0


@pytest.mark.mpi
@pytest.mark.parametrize("case", ["NCHW", "chunks"])
@pytest.mark.parametrize("shuffle", ["partition", "blocks"])
def test_a_network_knows_its_file_and_the_rows_it_was_tested_on(comm, settings, case, shuffle):
    config = dataclasses.replace(stored(settings, comm, case), shuffle=shuffle, split="0.7,0.3")
    loop.train(config, comm)
    folder, written = Path(settings.runs_dir), Path(settings.data).with_name("figures.json")
    asked = {"run": "a", "runs_dir": str(folder), "threads": 1, "batch_size": 64}
    assert evaluate.main(EvaluateConfig(output=str(written), **asked)) == 0
    answers = Path(settings.data).with_name("answers.csv")
    assert predict.main(PredictConfig(output=str(answers), **asked)) == 0
    moved = Path(settings.data).with_name("moved.h5")
    if comm.rank == 0:
        figures = json.loads(written.read_text())
        end = list(read_records(folder / "a"))[-1]
        assert (figures["accuracy"], figures["pack"]) == (end["test_accuracy"], config.data)
        assert len(answers.read_text().splitlines()) == 1 + figures["rows"] < 80
        known = read_model(folder / "a/model.safetensors")[1]["external"]
        assert (known["images"], known["split"], known["seed"]) == ("g/x", "0.7,0.3", 0)
        os.rename(config.data, moved)
    comm.Barrier()
    with pytest.raises(UsageError, match="is gone: give --data"):
        evaluate.main(EvaluateConfig(**asked))
    again = EvaluateConfig(output=str(written), data=str(moved), **asked)
    assert evaluate.main(again) == 0
    if comm.rank == 0:
        assert json.loads(written.read_text()) == {**figures, "pack": str(moved)}


@pytest.mark.mpi
def test_splits_and_classes_of_the_file_are_found_again(comm, settings):
    """train/x and test/x, labels 1 ... K one-hot: evaluate finds them by what the network says."""
    path, written = (Path(settings.data).with_name(name) for name in ("s.h5", "figures.json"))
    if comm.rank == 0:
        with h5py.File(path, "w") as file:
            for name, rows in (("train", slice(0, None, 2)), ("test", slice(1, None, 2))):
                file[f"{name}/x"] = IMAGES[rows].astype(np.float32)
                file[f"{name}/y"] = LABELS[rows].reshape(-1, 1) + 1.0
    comm.Barrier()
    names = {"images": "{split}/x", "labels": "{split}/y", "max_value": 255.0}
    config = dataclasses.replace(settings, data=str(path), epochs=1, **names)
    assert loop.train(config, comm) == 0
    assert loop.train(dataclasses.replace(config, epochs=2), comm) == 0
    asked = {"run": "a", "runs_dir": settings.runs_dir, "threads": 1, "batch_size": 64}
    assert evaluate.main(EvaluateConfig(output=str(written), **asked)) == 0
    if comm.rank == 0:
        figures = json.loads(written.read_text())
        end = list(read_records(Path(settings.runs_dir) / "a"))[-1]
        assert figures["accuracy"] == end["test_accuracy"] and figures["rows"] == 105
        assert figures["classes"] == [str(k) for k in range(1, 11)]
        notes = [
            r["text"] for r in read_records(Path(settings.runs_dir) / "a") if r["kind"] == "note"
        ]
        assert any("has 10 classes, with the labels 1, 2, 3, " in text for text in notes)


@pytest.mark.mpi
@pytest.mark.parametrize("case", ["one piece", "chunks"])
def test_a_file_cut_short_in_training_ends_the_run_in_one_line(comm, settings, case, monkeypatch):
    config = dataclasses.replace(stored(settings, comm, case), shuffle="global", read_buffer="1K")
    if comm.size > 1:
        return  # a rank that fails alone ends the others
    step = inner.train_step

    def cutting(*arguments):
        os.truncate(config.data, 3000)
        return step(*arguments)

    monkeypatch.setattr(inner, "train_step", cutting)
    with pytest.raises(RunError, match="it was cut short while in use") as caught:
        loop.train(config, comm)
    assert "\n" not in str(caught.value)


@pytest.mark.mpi
def test_the_order_of_chunks_is_told(comm, settings):
    config = dataclasses.replace(stored(settings, comm, "chunks"), shuffle=None, epochs=1)
    assert set_up(config, comm).plan.shuffle == "blocks"
    assert set_up(dataclasses.replace(settings, shuffle=None), comm).plan.shuffle == "partition"
    order = next(s for s in describe_plan(set_up(config, comm).plan) if s.startswith("order"))
    assert order.endswith("the file has chunks of 1 images") and "blocks of 1 images" in order
    notes = {}
    for shuffle in (None, "partition", "global"):
        digest(config, comm, shuffle=shuffle)
        records = read_records(Path(settings.runs_dir) / str(shuffle)) if comm.rank == 0 else []
        notes[shuffle] = [r["text"] for r in records if r["kind"] == "note"]
    if comm.rank == 0:
        assert [len(found) for found in notes.values()] == [0, 1, 1]
        assert "--shuffle global reads a whole chunk for nearly every" in notes["global"][0]


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"labels": None}, "--images goes with --labels"),
        ({"images": None}, "--labels goes with --images"),
        ({"normalize": "pack"}, "--normalize pack takes the mean and std that a pack holds"),
        ({"images": None, "labels": None, "layout": "NHWC"}, "--layout goes with --images"),
        ({"images": None, "labels": None, "split": "1"}, "--split goes with --images"),
        ({"images": None, "labels": None, "max_value": 2.0}, "--max-value goes with --images"),
        ({"max_value": 0.0}, "--max-value 0"),
        ({"images": None, "labels": None}, "not a pack .* --images and --labels"),
        ({"normalize": "imagenet"}, "imagenet is for images of 3 channels; these have 1"),
        ({"final": "best"}, "has none: train with --split 0.8,0.1,0.1"),
        ({"split": "2"}, "--split 2: give shares that sum to 1"),
        ({"images": "g/z"}, "there is no dataset g/z; /g holds x, y"),
    ],
)
def test_settings_that_do_not_fit_are_refused(comm, settings, changes, said):
    check_settings(settings)
    with pytest.raises(UsageError, match=said) as caught:
        loop.train(dataclasses.replace(settings, **changes), comm)
    assert "\n" not in str(caught.value)
    assert not Path(settings.runs_dir).exists()


@pytest.mark.mpi
def test_imagenet_scaling_and_validation_on_colour(comm, settings):
    images, labels = pixels(41, (16, 16, 3), 5)
    if comm.rank == 0:
        write(settings.data, images.astype(np.float16) / 255, labels)
    comm.Barrier()
    own = {"images": "x", "labels": "y", "normalize": "imagenet", "split": "0.6,0.2,0.2"}
    config = dataclasses.replace(settings, **own, epochs=1, model="resnet18", shards=4)
    assert digest(config, comm, final="best") != digest(config, comm, normalize="unit")
    if comm.rank == 0:
        records = read_records(Path(settings.runs_dir) / "best")
        seen = {r["split"]: r["rows"] for r in records if r["kind"] == "evaluation"}
        assert set(seen) == {"validation", "test"}


def test_packs_are_as_they_were(comm, shared_tmp):
    pack = make_pack(shared_tmp / "p.h5", {"train": 31, "test": 7})
    job = set_up(Config(data=str(pack), threads=1), comm)
    assert (job.pack.external, job.plan.scattered, job.plan.chunk_rows) == (None, False, 0)
    assert job.plan.shuffle == "partition"


def test_from_the_command_line_on_one_and_two_ranks(tmp_path):
    write(tmp_path / "a.h5", IMAGES, LABELS, chunks=(3, 28, 28, 1), compression="gzip")
    flags = ["--data", "a.h5", "--images", "x", "--labels", "y", "--epochs", "3"]
    own = ["--deterministic", "--shards", "2", "--batch-size", "16"]
    ends = []
    for ranks in (1, 2):
        words = ["-m", "hpctrain", *flags, *own, "--run", f"on{ranks}"]
        done = run_mpi(ranks, words, cwd=tmp_path, timeout=100)
        assert done.returncode == 0, done.stderr
        ends.append(list(read_records(tmp_path / f"runs/on{ranks}"))[-1])
    assert ends[0]["digest"] == ends[1]["digest"]
    assert ends[0]["test_accuracy"] > 0.3
    wrong = run_mpi(2, ["-m", "hpctrain", *flags[:3], "z", *flags[4:]], cwd=tmp_path)
    assert wrong.returncode == 2
    assert "hpctrain: " in wrong.stderr and "there is no dataset z; / holds x, y" in wrong.stderr
    assert "Traceback" not in wrong.stderr


NAN = "holds NaN or infinite values"


def with_nan(config, comm, rows, value=np.nan):
    """The settings for a file of floats in which these rows have one such value. Collective."""
    path = Path(config.data).with_name("nan.h5")
    comm.Barrier()  # nobody reads the file that was written before
    if comm.rank == 0:
        images = FLOATS.copy()
        images[rows, 3, 5, 0] = value
        write(path, images, LABELS, ("g/x", "g/y"))
    comm.Barrier()
    return dataclasses.replace(config, data=str(path), split="0.6,0.2,0.2")


def rows_of(config, split):
    """The file's rows of a split, in its order."""
    runs = None if config.shuffle == "blocks" else 0
    pack = read_external(config.data, "g/x", "g/y", None, config.split, 0, runs)
    with Split(pack, split) as source:
        return source._index


@pytest.mark.mpi
@pytest.mark.parametrize("shuffle", ["partition", "blocks", "global"])
@pytest.mark.parametrize("late", [0, 1])
def test_a_training_image_that_is_not_finite_is_named_with_its_row(
    comm, settings, shuffle, late, monkeypatch
):
    monkeypatch.setitem(IN_FLIGHT, "cpu", late)
    config = with_nan(dataclasses.replace(settings, shuffle=shuffle), comm, [], 0)
    row = int(rows_of(config, "train")[97])
    for value in (np.nan, -np.inf):
        config = with_nan(config, comm, [row], value)
        said = (
            rf"step \d+ \(epoch 1\).*nan.h5: row {row} of /g/x \(sample 97 of train\) {NAN}: write"
        )
        with pytest.raises(NonFinite, match=said) as caught:
            loop.train(dataclasses.replace(config, run=f"a{value}"), comm)
        assert caught.value.agreed and "--lr" not in str(caught.value)
    with pytest.raises(NonFinite, match="--lr or --clip-norm may help"):  # the images are sound
        loop.train(dataclasses.replace(settings, shuffle=shuffle, lr=1e30, run="b"), comm)


@pytest.mark.mpi
def test_an_image_that_is_not_finite_is_named_wherever_it_is_read(comm, settings, monkeypatch):
    """Among the first rows, in validation, in evaluation; predict answers the others."""
    config = with_nan(dataclasses.replace(settings, shuffle="partition"), comm, [], 0)
    rows = {split: rows_of(config, split) for split in ("train", "validation", "test")}
    sound = dataclasses.replace(config, run="sound", epochs=1)
    assert loop.train(sound, comm) == 0
    sampled = np.arange(64) * 210 // 63  # of all rows, to tell the file from others
    where = {split: np.flatnonzero(~np.isin(rows[split], sampled)) for split in rows}
    first, middle = rows["train"][where["train"][0]], rows["validation"][where["validation"][:2]]
    assert where["train"][0] < 32
    said = rf"row {first} of /g/x \(sample {where['train'][0]} of train\) {NAN}: write"
    with pytest.raises(UsageError, match=said):
        loop.train(with_nan(config, comm, [first]), comm)
    place = where["validation"][0]
    said = rf"row {middle[0]} of /g/x \(sample {place} of validation\) {NAN}: .* \(2 such images\)"
    with pytest.raises(RunError, match=said):
        loop.train(with_nan(config, comm, middle), comm)
    last = where["test"][[1, 4]]
    again = with_nan(config, comm, rows["test"][last])
    asked = {"run": str(Path(config.runs_dir) / "sound"), "data": again.data, "batch_size": 5}
    with pytest.raises(RunError, match=rf"nan.h5: row \d+ .*\(sample {last[0]} of test\) {NAN}"):
        evaluate.main(EvaluateConfig(threads=1, **asked))
    written = Path(config.data).with_name("answers.csv")
    said = rf"^2 of \d+ images cannot .*answers.csv holds.*\n.*\(sample {last[0]} of test\) {NAN}"
    with pytest.raises(RunError, match=said):
        predict.main(PredictConfig(threads=1, output=str(written), **asked))
    answered = [line.partition(",")[0] for line in written.read_text().splitlines()[1:]]
    assert answered == [str(row) for row in range(len(rows["test"])) if row not in last]
