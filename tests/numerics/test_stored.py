"""The same bits however images are stored, and what cannot be read is named with its row."""

from __future__ import annotations

import os
import re
import shutil

import h5py
import numpy as np
import pytest
import torch
from PIL import Image, features

import hpctrain as hp
from tests.support.api import IN_FLIGHT, command_line
from tests.support.launch import run_mpi
from tests.support.ranks import command
from tests.support.short import digest, images, records
from tests.support.spoil import overwrite

IMAGES, LABELS = images(101, (12, 12, 1), 10)
LABELS = np.sort(LABELS)  # as such files often are
FLOATS = IMAGES.astype(np.float32) * np.float32(1 / 255)  # as bytes are scaled
STORED = {  # images, how they are stored, settings
    "one piece": (IMAGES, {}, {}),
    "gray": (IMAGES[..., 0], {}, {}),
    "chunks": (IMAGES, {"chunks": (1, 12, 12, 1), "compression": "gzip"}, {}),
    "chunks, NCHW": (
        IMAGES.transpose(0, 3, 1, 2),
        {"chunks": (1, 1, 7, 5), "compression": "lzf", "fletcher32": True},
        {"layout": "NCHW"},
    ),
    "floats": (FLOATS, {}, {}),
    "doubles, chunks": (FLOATS.astype(np.float64), {"chunks": (1, 12, 12, 1)}, {}),
    "16 bits, chunks": (IMAGES.astype(np.uint16), {"chunks": (1, 12, 12, 1)}, {"max_value": 255.0}),
    "as in MATLAB": (IMAGES.transpose(0, 3, 2, 1), {}, {"layout": "NCWH"}),
}
NAN = "holds NaN or infinite values"
NOT_FINITE = 35  # a row that is not among those that are looked at before the first step
STILL = {"lr": 1e-30, "momentum": 0.0, "model": "tests.support.nets:frozen"}  # learns nothing


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A folder with a file of HDF5 for each case."""
    folder = tmp_path_factory.mktemp("files")
    for case, (stored, storage, _) in STORED.items():
        with h5py.File(folder / f"{case}.h5", "w") as file:
            file.create_dataset("g/x", data=stored, **storage)
            file["g/y"] = LABELS
    return folder


@pytest.fixture
def external(fixed, files, tmp_path):
    """Settings for copies of these files, which lie in the folder of the runs."""
    shutil.copytree(files, tmp_path / "runs")
    names = {"images": "g/x", "labels": "/g/y", "split": "0.6,0.2,0.2", "epochs": 1}
    return fixed | names | {"shuffle": "blocks", "flip": True, "shift": 2}


def stored(settings: dict, case: str) -> dict:
    return settings | {"data": f"{settings['runs_dir']}/{case}.h5", "run": case} | STORED[case][2]


@pytest.mark.ranks(2)
def test_the_same_bits_however_the_images_are_stored(comm, external):
    """Bytes or floats, in one piece or in compressed chunks, channels first or last."""
    found = {digest(comm, stored(external, case)) for case in STORED}
    assert len(found) == 1
    others = [{"shuffle": "partition"}, {"split": "0.8,0.2"}]
    one = stored(external, "one piece")
    for number, other in enumerate(others):
        found.add(digest(comm, one | other | {"run": f"other{number}"}))
    assert len(found) == 1 + len(others)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("shuffle", ["partition", "blocks"])
def test_a_network_knows_its_file_and_the_rows_it_was_trained_and_tested_on(
    comm, external, shuffle
):
    """The loss of an epoch in which nothing is learnt is that of all training images."""
    settings = (
        stored(external, "16 bits, chunks")
        | STILL
        | {"shuffle": shuffle, "flip": False, "shift": 0}
    )
    result = hp.train(**settings)
    trusted = {"trust_code": True}
    trained_on = hp.evaluate(result.folder, split="train", **trusted)
    if comm.rank == 0:
        (epoch,) = records(settings, "epoch")
        assert epoch["loss"] == pytest.approx(trained_on.loss, rel=1e-6)
        assert epoch["accuracy"] == trained_on.accuracy
    found = hp.evaluate(result.folder, batch_size=64, **trusted)
    assert found.accuracy == result.figures["test_accuracy"] and found.rows < 25
    answers = result.folder / "answers.csv"
    words = ["predict", str(result.folder), "--output", str(answers), "--trust-code"]
    assert command_line(words) == 0
    comm.Barrier()
    assert len(answers.read_text().splitlines()) == 1 + found.rows
    comm.Barrier()
    moved = f"{settings['runs_dir']}/moved.h5"
    if comm.rank == 0:
        os.rename(settings["data"], moved)
    comm.Barrier()
    with pytest.raises(hp.UsageError, match="is gone: give --data"):
        hp.evaluate(result.folder, **trusted)
    assert hp.evaluate(result.folder, data=moved, **trusted).loss == found.loss


@pytest.mark.ranks(1)  # a rank that fails alone ends the others
@pytest.mark.parametrize("case", ["one piece", "chunks"])
def test_a_file_that_is_cut_short_ends_the_run_in_one_line(comm, external, case):
    settings = stored(external, case) | {"shuffle": "global", "read_buffer": "1K"}
    settings |= {"validate_every": "1step"}
    with pytest.raises(hp.RunError, match="cut short while in use") as caught:
        hp.train(**settings, on_evaluation=lambda record: os.truncate(settings["data"], 3000))
    assert "\n" not in str(caught.value)


def with_value(comm, settings, split, value):
    """Settings for a file that has this value in one row of the split."""
    path = f"{settings['runs_dir']}/{split} {value}.h5"
    if comm.rank == 0:
        with h5py.File(path, "w") as file:
            for name in ("train", "validation", "test"):
                file[f"{name}/x"], file[f"{name}/y"] = FLOATS, LABELS
            file[f"{split}/x"][NOT_FINITE, 3, 5, 0] = float(value)
    comm.Barrier()
    names = {"images": "{split}/x", "labels": "{split}/y", "split": None}
    return settings | names | {"data": path, "run": f"{split} {value}"}


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("shuffle", "in_flight", "value"),
    [("partition", 0, "nan"), ("blocks", 1, "-inf"), ("global", 0, "nan")],
)
def test_a_training_image_that_is_not_finite_is_named_with_its_row(
    comm, external, shuffle, in_flight, value, monkeypatch
):
    monkeypatch.setitem(IN_FLIGHT, "cpu", in_flight)
    said = rf"sample .* of split 'train' \(/train/x\[{NOT_FINITE}\]\) {NAN}.*the weights of step"
    with pytest.raises(hp.RunError, match=said):
        hp.train(**with_value(comm, external, "train", value) | {"shuffle": shuffle})


@pytest.mark.ranks(3)
def test_no_image_is_named_where_all_are_finite(comm, external):
    with pytest.raises(hp.RunError, match="--lr or --clip-norm may help"):
        hp.train(**with_value(comm, external, "train", "0.5") | {"lr": 1e30, "epochs": 9})


@pytest.mark.ranks(3)
def test_an_image_that_is_not_finite_is_named_in_evaluations(comm, external, capsys):
    """predict answers the others."""
    with pytest.raises(hp.RunError, match=rf"/validation/x\[{NOT_FINITE}\]\) {NAN}"):
        hp.train(**with_value(comm, external, "validation", "nan"))
    result = hp.train(**with_value(comm, external, "train", "0.5"))
    data = with_value(comm, external, "test", "nan")["data"]
    with pytest.raises(hp.RunError, match=rf"/test/x\[{NOT_FINITE}\]\) {NAN}"):
        hp.evaluate(result.folder, data=data, batch_size=5)
    answers = result.folder / "answers.csv"
    words = ["predict", str(result.folder), "--data", data, "--output", str(answers)]
    assert command_line(words) == 1
    if comm.rank == 0:
        assert f"/test/x[{NOT_FINITE}]" in capsys.readouterr().err
        assert len(answers.read_text().splitlines()) == 1 + len(LABELS) - 1


@pytest.fixture(scope="module")
def packs(tmp_path_factory):
    """A folder with a pack of JPEG files, larger than the images of the network, and one of what
    they hold.
    """
    folder = tmp_path_factory.mktemp("packs")
    pictures, labels = images(101, (21, 25, 3), 2)
    for number, (picture, label) in enumerate(zip(pictures, labels, strict=True)):
        path = folder / "files" / "ab"[label] / f"{number:03}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(picture).save(path)
    for name, encoding in (("jpeg", "jpeg"), ("pixels", "raw")):
        words = ["--size", "17x13", "--split", "0.8,0.1,0.1", "--encoding", encoding, "--jobs", "1"]
        ended = command(1, "pack", folder / "files", "--output", folder / f"{name}.h5", *words)
        assert ended.code == 0, ended.err
    return folder


@pytest.fixture
def jpegs(fixed, packs, tmp_path):
    """Settings for a copy of the pack of JPEG files."""
    for name in ("jpeg", "pixels"):
        shutil.copy(packs / f"{name}.h5", tmp_path)
    return fixed | {"data": str(tmp_path / "jpeg.h5")}


@pytest.mark.ranks(2)
def test_files_that_are_decoded_in_training_are_the_pixels_of_a_pack(comm, jpegs):
    whole = jpegs | {"flip": True}
    pixels = whole | {"data": jpegs["data"].replace("jpeg.h5", "pixels.h5"), "run": "pixels"}
    parts = whole | {"random_crop": 0.3, "run": "parts"}
    assert digest(comm, whole) == digest(comm, pixels) != digest(comm, parts)


@pytest.mark.ranks(2)
def test_evaluation_never_crops(comm, jpegs):
    """A network that learns nothing has the same figures, in training others."""
    found = {"epoch": [], "evaluation": []}
    for crop in (0.0, 0.08):
        settings = jpegs | STILL | {"random_crop": crop, "run": str(crop)}
        hp.train(**settings)
        for kind in found:
            found[kind].append([record["loss"] for record in records(settings, kind)])
    trained, tested = found.values()
    assert trained[0] != trained[1] and tested[0] == tested[1] and len(tested[0]) == 3


DIFFER = {
    "what decodes JPEG files": (features, "version", lambda name: "0.1"),
    "the kind of hardware": (torch.backends.cpu, "get_cpu_capability", lambda: "old"),
    "torch": (torch, "__version__", "1.2.3"),
}


@pytest.mark.ranks(3)
@pytest.mark.parametrize("what", DIFFER)
def test_ranks_that_would_compute_otherwise_are_refused(comm, jpegs, monkeypatch, what):
    if comm.rank == comm.size - 1:
        monkeypatch.setattr(*DIFFER[what])
    with pytest.raises(hp.UsageError, match=f"{what} differs between ranks: .* on rank 2"):
        hp.train(**jpegs)


@pytest.fixture
def undecodable(jpegs):
    """The same, with sample 53 damaged."""
    with h5py.File(jpegs["data"], "r") as file:
        start = file["train/bytes"].id.get_offset() + int(file["train/offsets"][53])
    overwrite(jpegs["data"], start)
    return jpegs


@pytest.mark.ranks(1)  # a rank that fails alone ends the others
def test_a_file_that_cannot_be_decoded_ends_the_run_by_name(comm, undecodable):
    with pytest.raises(hp.RunError, match=r"sample 53 of split 'train' .*is corrupt: its bytes"):
        hp.train(**undecodable)
    with pytest.raises(hp.RunError, match=r"sample 53 of split 'train' .*cannot be decoded"):
        hp.train(**undecodable | {"verify": False})


@pytest.mark.slow  # a launch
def test_a_file_that_another_rank_cannot_decode_is_named_too(undecodable):
    words = ["--data", undecodable["data"], "--runs-dir", undecodable["runs_dir"], "--run", "a"]
    words += ["--shards", "4", "--no-verify", "--random-crop", "0.08", "--progress", "none"]
    done = run_mpi(2, ["-m", "hpctrain", "train", *words], timeout=100)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert re.search(r"sample 53 of split 'train' .*cannot be decoded", done.stderr)
