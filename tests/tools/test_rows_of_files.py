"""`predict RUN new.h5` and `hp.load(RUN).predict("new.h5")`: every row of HDF5 files, in order.

The answers are those of arrays and of splits. Files need no labels, and no splits.
"""

from __future__ import annotations

import csv
import re
from pathlib import Path

import h5py
import numpy as np
import pytest
from PIL import Image

import hpctrain as hp
from tests.support.api import command_line
from tests.support.external import write
from tests.support.ranks import command
from tests.support.spoil import overwrite
from tests.tools.test_one_answer import SIDE, train

NODATA = -9999
SETTINGS = {"images": "x", "labels": "y", "layout": "NCHW", "nodata": NODATA}
SETTINGS |= {"normalize": "pack", "split": "0.5,0.5", "batch_size": 8, "lr": 1e-3}


def scenes(count, seed, dtype="i2"):
    """Images (N, C, H, W) of five bands, each with some values that are no data."""
    images = np.random.default_rng(seed).integers(-100, 4000, (count, 5, SIDE, SIDE))
    images[:, :, 0, : 1 + seed % 3] = NODATA
    return images.astype(dtype)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A network of a set of two files."""
    folder = tmp_path_factory.mktemp("rows")
    for number in range(2):
        write(folder / f"scene{number}.h5", scenes(12, number), np.arange(12) % 2)
    return train(folder, folder / "scene*.h5", **SETTINGS)


def predict(run, *words, output="answers.csv"):
    """The exit code of `predict`, and its table."""
    path = Path(run).parent / output
    given = ["predict", str(run), *map(str, words), "--trust-code", "--threads=1"]
    code = command_line([*given, f"--output={path}"])
    with open(path, newline="") as file:
        return code, list(csv.DictReader(file))


def probabilities(answers):
    return np.array([[row["0"], row["1"]] for row in answers], float)


def expected(run, images):
    """The answers to images (N, C, H, W) as arrays."""
    network = hp.load(run, trust_code=True)
    return network.predict(images.transpose(0, 2, 3, 1)).probabilities


def write_new(path, images, name="x", **storage):
    """A file without labels."""
    with h5py.File(path, "w") as file:
        file.create_dataset(name, data=images, **storage)
    return path


def test_all_rows_have_the_answers_of_arrays_and_of_splits(trained, tmp_path, capfd):
    images = [scenes(9, 2), scenes(4, 3, ">i2"), scenes(7, 4)]
    plain = write_new(tmp_path / "b.h5", images[0])
    big_endian = write_new(tmp_path / "a.nc", images[1])
    chunked = write_new(tmp_path / "c.h5", images[2], chunks=(3, 5, SIDE, 4), compression="gzip")
    code, answers = predict(trained, plain, "--figure", "3")
    assert code == 0 and [row["row"] for row in answers] == [str(n) for n in range(9)]
    assert {row["file"] for row in answers} == {str(plain)}
    assert np.allclose(probabilities(answers), expected(trained, images[0]), rtol=0, atol=1e-6)
    assert (trained.parent / "answers.png").stat().st_size > 0

    of_two = expected(trained, np.concatenate([images[0], images[2]]))
    code, answers = predict(trained, plain, chunked)
    assert code == 0 and np.allclose(probabilities(answers), of_two, rtol=0, atol=1e-6)
    assert [(row["file"], row["row"]) for row in answers][8:11] == [
        (str(plain), "8"),
        (str(chunked), "0"),
        (str(chunked), "1"),
    ]
    _, by_pattern = predict(trained, tmp_path / "[bc].h5")
    assert by_pattern == answers
    capfd.readouterr()
    with h5py.File(big_endian, "r+") as file:
        file["x"].attrs["_FillValue"] = np.int16(-1)
    _, of_others = predict(trained, big_endian)
    assert f"{big_endian}: _FillValue of /x is not applied: train with --nodata=-1" in (
        capfd.readouterr().err
    )
    assert np.allclose(probabilities(of_others), expected(trained, images[1]), rtol=0, atol=1e-6)

    columns = hp.load(trained, trust_code=True).predict([plain, chunked])
    assert columns["row"].dtype == np.int64 and [*columns["row"][8:11]] == [8, 0, 1]
    assert [*columns["file"]] == [row["file"] for row in answers]
    assert np.allclose(columns.probabilities, of_two, rtol=0, atol=1e-6)

    _, all_rows = predict(trained, trained.parent / "scene*.h5")
    answer_of = {f"{Path(row['file']).name}:/x[{row['row']}]": row for row in all_rows}
    _, of_split = predict(trained)
    assert len(all_rows) == 24 and 0 < len(of_split) < 24
    for row in of_split:
        same = answer_of[re.search("[^/]*:/x.*", row["source"])[0]]
        assert [same[name] for name in "01"] == [row[name] for name in "01"]


def test_the_table_has_the_same_bytes_on_any_number_of_ranks(trained, tmp_path):
    images = scenes(23, 5)
    images[[4, 20]] = NODATA
    new = write_new(tmp_path / "new.h5", images, chunks=(4, 5, SIDE, SIDE))
    other = write_new(tmp_path / "other.h5", scenes(8, 6))
    tables = []
    for ranks in (1, 3):
        output = tmp_path / f"{ranks}.csv"
        words = [trained, new, other, "--trust-code", "--skip-bad", "--batch-size=3"]
        ended = command(ranks, "predict", *words, "--threads=1", f"--output={output}")
        assert ended.code == 0 and "2 of 31 images" in ended.err
        tables.append(output.read_bytes())
    assert tables[0] == tables[1] and len(tables[0].splitlines()) == 1 + 31 - 2


def test_rows_that_cannot_be_used_are_named(trained, tmp_path, capfd):
    images = scenes(40, 7, "f4")
    images[1] = NODATA
    images[3, 2, 5, 5] = np.nan
    images[5, 1, 4, 4] = np.inf  # among those by which the range is known
    images[8, :, 2] = 40_000
    images[9, :, 2] = 0.5
    images[11] = images[11] > 0  # as of a night, which is no other scale
    images[11, 1] = NODATA
    images[14, :, 2] = 32_000
    new = write_new(tmp_path / "new.h5", images, "/deep/x")
    code, answers = predict(trained, new, "--images", "deep/x")
    lines = capfd.readouterr().err
    reasons = {
        1: " holds no data, only -9999",
        3: " holds NaN or infinite values",
        5: " holds NaN or infinite values",
        8: r": values from -\d+ to 40000: give int16 values",
        9: ": values that are not whole: give int16 values",
    }
    assert code == 1 and "5 of 40 images" in lines
    assert [int(row["row"]) for row in answers] == [n for n in range(40) if n not in reasons]
    for row, why in reasons.items():
        assert re.search(re.escape(f"{new}:/deep/x[{row}]") + why, lines)
    assert "40 images with values from -100 to 32000; the training was on" in lines
    code, skipped = predict(trained, new, "--images", "deep/x", "--skip-bad")
    assert code == 0 and skipped == answers


def test_a_chunk_that_cannot_be_read_leaves_out_its_rows(trained, tmp_path, capfd):
    new = write_new(tmp_path / "new.h5", scenes(6, 8), chunks=(2, 5, SIDE, SIDE), fletcher32=True)
    with h5py.File(new) as file:
        place = file["x"].id.get_chunk_info(1).byte_offset
    data = bytearray(new.read_bytes())
    data[place] ^= 1
    new.write_bytes(data)
    code, answers = predict(trained, new)
    assert code == 1 and [row["row"] for row in answers] == ["0", "1", "4", "5"]
    assert "row 2 of /x cannot be read" in capfd.readouterr().err


REFUSED = {
    "bands": (
        scenes(3, 1)[:, :4],
        [],
        r"\(8, 8, 4\) \(H, W, C\), read as NCHW, and .* \(8, 8, 5\)",
    ),
    "size": (scenes(3, 1)[..., :7], [], r"\(8, 7, 5\) .* takes \(8, 8, 5\)"),
    "layout": (scenes(3, 1), ["--layout=NHWC"], r"\(5, 8, 8\) \(H, W, C\), read as NHWC"),
    "axes": (scenes(3, 1)[:, 0], [], "which is not NCHW: layouts of 3 axes are NHW, NWH, HWC"),
    "type": (scenes(3, 1).astype("u1"), [], "new.h5: .*uint8"),
    "name": (scenes(3, 1), ["--images=z"], "there is no dataset 'z'; it holds x"),
    "scale": (
        np.float32(scenes(3, 1)) / np.float32(1e4),
        [],
        "new.h5: values from -0.9999 to 0.39",
    ),
    "units": (
        scenes(3, 1),
        [],
        "new.h5 is stored with scale_factor 0.5, the images of the training",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_file_unlike_the_training_is_refused_in_one_line(trained, tmp_path, capfd, name):
    images, words, text = REFUSED[name]
    with h5py.File(write_new(tmp_path / "new.h5", images), "r+") as file:
        if name == "units":
            file["x"].attrs["scale_factor"] = 0.5
    output = tmp_path / "answers.csv"
    given = ["predict", str(trained), str(tmp_path / "new.h5"), *words, "--trust-code"]
    assert command_line([*given, f"--output={output}"]) == 2
    (line,) = [x for x in capfd.readouterr().err.splitlines() if x.startswith("hpctrain: ")]
    assert re.search(text, line)
    assert not output.exists()


@pytest.mark.parametrize(
    ("images", "text"),
    [
        (scenes(9, 1)[:, 0], "which is not NCHW: .*; it is read as in the training: images x"),
        (scenes(9, 1)[..., 0, 0], r"shape \(9, 5\).*; it is read as .* labels y, layout NCHW"),
        (scenes(9, 1)[..., 1:], r"nor like it: images of shape \(8, 7, 5\), not \(8, 8, 5\)$"),
    ],
)
def test_evaluate_says_how_a_file_of_another_shape_is_read(trained, tmp_path, images, text):
    """It has no --layout, and --data was given."""
    new = write(tmp_path / "new.h5", images, np.arange(9) % 2)
    with pytest.raises(hp.UsageError, match=text):
        hp.evaluate(trained, data=str(new), threads=1, trust_code=True)


def spoiled(folder):
    """HDF5 files that cannot be used beside others, by what is wrong with them."""
    images = scenes(4, 3)
    files = {
        "truncated file": write_new(folder / "cut.h5", images),
        "there is no dataset 'x'; it holds z": write_new(folder / "other.h5", images, "z"),
        r"holds images \(9, 8, 5\) .* this network takes \(8, 8, 5\)": write_new(
            folder / "high.h5", np.pad(images, ((0, 0), (0, 0), (0, 1), (0, 0)))
        ),
        "holds images of >i2 .* in NCHW, but": write_new(folder / "big.h5", images.astype(">i2")),
        "is not an HDF5 file": folder / "empty.h5",
    }
    (folder / "cut.h5").write_bytes((folder / "cut.h5").read_bytes()[:-1000])
    (folder / "empty.h5").write_bytes(b"")
    return files


def test_files_that_cannot_be_used_are_refused_or_left_out_and_named(trained, tmp_path):
    images = scenes(11, 5)
    good = [write_new(tmp_path / f"{n}.h5", images[part]) for n, part in enumerate(PARTS)]
    bad = spoiled(tmp_path)
    splits = {"train": (scenes(4, 3)[:, 0], [0, 1, 0, 1])}
    bad["holds images .* and this network takes"] = tmp_path / "pack.h5"
    hp.write_pack(tmp_path / "pack.h5", splits, "ab", nodata=NODATA, max_value=4000)
    paths = [*bad.values()]
    given = [*paths[:3], good[0], *paths[3:], good[1]]
    output = tmp_path / "answers.csv"
    words = ["predict", trained, *given, "--trust-code", "--threads=1", f"--output={output}"]
    refused = command(3, *words)
    assert refused.code == 2 and not output.exists()
    tables = []
    for ranks in (1, 3):
        ended = command(ranks, *words, "--skip-bad", "--batch-size=3")
        (line,) = [x for x in ended.err.splitlines() if x.startswith("left out, 6 files: ")]
        for reason, path in bad.items():
            assert re.search(f"{path.name}.*{reason}|{reason}.*{path.name}", line), (path, line)
        assert ended.code == 0 and "files differ" not in line
        tables.append(output.read_bytes())
    assert tables[0] == tables[1] and len(tables[0].splitlines()) == 1 + 11

    network = hp.load(trained, trust_code=True)
    answers = network.predict(given, skip_bad=True)
    assert {*answers.unusable} == {*map(str, paths)}
    assert np.allclose(answers.probabilities, expected(trained, images), rtol=0, atol=1e-6)
    with pytest.raises(hp.UsageError, match="truncated file"):
        network.predict(given[:4])
    with pytest.raises(hp.UsageError, match=r"truncated file.* \(2 of 2 files\)"):
        network.predict(given[:2], skip_bad=True)


PARTS = (slice(0, 4), slice(4, 11))


def test_a_pack_is_read_with_all_its_splits(tmp_path, capfd):
    images = np.random.default_rng(0).integers(0, 256, (30, SIDE, SIDE, 3)).astype("u1")
    labels = np.arange(30) % 2
    splits = {"train": (images[:12], labels[:12]), "autumn": (images[12:], labels[12:])}
    hp.write_pack(tmp_path / "seasons.h5", splits, ["0", "1"])
    run = train(tmp_path, tmp_path / "seasons.h5", batch_size=4)
    new = tmp_path / "new.h5"
    hp.write_pack(new, {"train": (images[5:9], labels[:4]), "odd": (images[:3], labels[:3])}, "ab")
    code, answers = predict(run, tmp_path / "seasons.h5", new)
    assert code == 0 and [*answers[0]][:3] == ["file", "split", "row"]
    places = [(Path(row["file"]).name, row["split"], int(row["row"])) for row in answers]
    assert places[:13] == [("seasons.h5", "train", n) for n in range(12)] + [
        ("seasons.h5", "autumn", 0)
    ]
    assert places[-7:] == [("new.h5", "train", n) for n in range(4)] + [
        ("new.h5", "odd", n) for n in range(3)
    ]
    given = np.concatenate([images, images[5:9], images[:3]])
    of_arrays = hp.load(run, trust_code=True).predict(given).probabilities
    assert np.allclose(probabilities(answers), of_arrays, rtol=0, atol=1e-6)
    _, of_split = predict(run, "--split", "autumn")
    assert np.array_equal(probabilities(of_split), probabilities(answers)[12:30])

    other = write_new(tmp_path / "other.h5", images[:4], "z")
    floats = write_new(tmp_path / "floats.h5", images[:4].astype("f4") / 255, "z")
    for words, text in (
        (
            [other],
            "other.h5: the training was on a pack: name the dataset to predict, as in --images",
        ),
        ([new, "--images=z"], "are not of packs, as .*new.h5: leave them out"),
        ([new, floats, "--images=z"], "floats.h5 holds float32 images, and .*new.h5 uint8"),
    ):
        assert command_line(["predict", str(run), *map(str, words), "--trust-code"]) == 2
        assert re.search(text, capfd.readouterr().err)
    _, of_floats = predict(run, floats, "--images", "z")
    assert np.allclose(probabilities(of_floats), of_arrays[:4], rtol=0, atol=1e-6)
    code, answers = predict(run, new, other, "--images", "z")
    assert code == 0 and np.array_equal(
        probabilities(answers)[-4:], probabilities(predict(run, tmp_path / "seasons.h5")[1])[:4]
    )
    assert [row["split"] for row in answers[-5:]] == ["odd", "", "", "", ""]
    matlab = write_as_matlab(tmp_path / "new.mat", images[:4].transpose(0, 3, 2, 1))
    _, of_matlab = predict(run, matlab, "--images", "z", "--layout", "NCWH")
    assert np.array_equal(probabilities(of_matlab), probabilities(answers)[-4:])


def write_as_matlab(path, images):
    """A file as MATLAB 7.3 writes it: HDF5 after a header of 512 bytes."""
    with h5py.File(path, "w", userblock_size=512) as file:
        file["z"] = images
    with open(path, "r+b") as file:
        file.write(b"MATLAB 7.3 MAT-file".ljust(512))
    return path


def test_files_that_are_one_image_each_and_rows_of_other_files(trained, tmp_path):
    images = scenes(6, 9)
    of_rows = expected(trained, images)
    paths = [write_new(tmp_path / f"{n}.h5", image) for n, image in enumerate(images)]
    code, answers = predict(trained, *paths[::-1], "--layout", "CHW")
    assert code == 0 and [row["file"] for row in answers] == [str(path) for path in paths[::-1]]
    assert np.allclose(probabilities(answers), of_rows[::-1], rtol=0, atol=1e-6)
    layout = h5py.VirtualLayout((6, *images.shape[1:]), images.dtype)
    for number, path in enumerate(paths):
        layout[number] = h5py.VirtualSource(path, "x", images.shape[1:])
    with h5py.File(tmp_path / "all.h5", "w") as file:
        file.create_virtual_dataset("x", layout)
    _, answers = predict(trained, tmp_path / "all.h5")
    assert np.allclose(probabilities(answers), of_rows, rtol=0, atol=1e-6)


def test_what_is_no_file_of_rows_is_said(trained, tmp_path, capfd):
    np.save(tmp_path / "image.npy", scenes(1, 1)[0].transpose(1, 2, 0))
    new = write_new(tmp_path / "new.h5", scenes(3, 1))
    for words, text in (
        ([new, tmp_path / "image.npy"], "new.h5 is an HDF5 file, and .*image.npy is not"),
        ([tmp_path / "image.npy", "--images=x"], "--images and --layout are of HDF5 files"),
        ([tmp_path / "*.hdf"], "no file matches"),
        (["--images=x"], "--images x needs files"),
        ([new, "--split=train"], "--split train beside files: leave it out"),
    ):
        assert command_line(["predict", str(trained), *map(str, words), "--trust-code"]) == 2
        assert re.search(text, capfd.readouterr().err)
    network = hp.load(trained, trust_code=True)
    with pytest.raises(hp.UsageError, match=r"image.npy is not: name files of one kind"):
        network.predict([tmp_path / "image.npy", new])
    _, answers = predict(trained, tmp_path / "*.npy")
    assert [row["file"] for row in answers] == [str(tmp_path / "image.npy")]


def test_a_pack_of_jpeg_files_says_of_which_each_row_is(tmp_path):
    """A damaged one is left out by name."""
    rng = np.random.default_rng(0)
    for number in range(12):
        path = tmp_path / f"photos/{number % 2}/{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = rng.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(path)
    words = ["pack", str(tmp_path / "photos"), "--encoding=jpeg", "--split=0.5,0.5", "--jobs=1"]
    pack = tmp_path / "photos.h5"
    assert command_line([*words, f"--output={pack}"]) == 0
    run = train(tmp_path, pack, batch_size=4)
    network = hp.load(run, trust_code=True)
    answers = network.predict(pack)
    assert [*answers][:4] == ["file", "split", "row", "source"]
    names = [tmp_path / "photos" / name for name in answers["source"]]
    assert len({*names}) == 12 and [*answers["split"]] == ["train"] * 6 + ["test"] * 6
    of_files = network.predict(names)
    assert np.allclose(answers.probabilities, of_files.probabilities, rtol=0, atol=1e-6)
    with h5py.File(pack) as file:
        place = file["test/bytes"].id.get_offset() + int(file["test/offsets"][2])
    overwrite(pack, place)
    left = network.predict(pack, skip_bad=True)
    (name,) = left.unusable
    assert name == f"{pack}:/test[2]" and "is corrupt" in left.unusable[name]
    assert [*left["source"]] == [text for n, text in enumerate(answers["source"]) if n != 8]
