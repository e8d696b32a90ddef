"""What a pack holds, read by plain h5py, and that no damage to one passes in silence.

Other programs may rely on this: a group per split with `images` (N, H, W, C) uint8 and integer
`targets` (N,), or with the bytes of JPEG files and their `offsets` (N + 1,); contiguous data sets,
so that bytes may be read at their offsets; a checksum per sample; and the root attributes below.
How archives, manifests and arrays become packs is tested in tests/data, and other kinds of targets
in tests/data/test_targets.py.
"""

import json
import os
import re
import shlex
import shutil
import zlib
from itertools import pairwise

import h5py
import numpy as np
import pytest
from PIL import Image

import hpctrain as hp
from tests.support import packs, ranks
from tests.support.external import pixels, write
from tests.support.pictures import class_folders, encode, make_pack, picture

COUNTS = {"ant": 11, "bee": 9, "cat": 7}
SPLITS = {"train", "validation", "test"}
SPLIT = "0.6,0.2,0.2"


def read(path):
    """Ten lines that any program may write: by split, images or JPEG files, and class names."""
    found = {}
    with h5py.File(path) as file:
        names = [name.decode() for name in file.attrs["classes"]]
        for split in SPLITS & file.keys():
            group = file[split]
            labels = [names[label] for label in group["targets"][:]]
            if "bytes" in group:
                data, ends = group["bytes"][:].tobytes(), group["offsets"][:]
                images = [data[a:b] for a, b in pairwise(ends)]
            else:
                images = list(group["images"][:])
            found[split] = images, labels
    return found


def numbers(images):
    """Which picture each image is; -1 for none."""
    known = {picture(number).tobytes(): number for number in range(60)}
    return [known.get(image.tobytes(), -1) for image in images]


# What a pack holds


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """27 pictures, numbered through the classes."""
    return class_folders(tmp_path_factory.mktemp("source") / "images", COUNTS)


@pytest.fixture(scope="module")
def of_folder(folder, tmp_path_factory):
    return make_pack(folder, tmp_path_factory.mktemp("pack") / "folder.h5", split=SPLIT)


def test_every_picture_has_its_class_and_a_place_that_follows_from_names_and_seed(
    folder, of_folder, tmp_path
):
    """Golden: the same on every machine and in every version."""
    order, classes = {}, np.repeat(list(COUNTS), list(COUNTS.values()))
    for name, (images, labels) in read(of_folder).items():
        order[name] = numbers(images)
        assert labels == classes[order[name]].tolist()
    assert order == {
        "train": [22, 7, 8, 9, 15, 26, 16, 18, 25, 21, 2, 14, 4, 5, 19, 3],
        "validation": [13, 10, 6, 23, 17, 20],
        "test": [0, 1, 24, 12, 11],
    }
    other = make_pack(folder, tmp_path / "a.h5", split=SPLIT, seed=7)
    assert numbers(read(other)["test"][0]) == [16, 1, 26, 2, 12]


def test_equal_files_are_in_one_split(folder, tmp_path):
    """Else a network would be tested with images that it was trained on."""
    for file in shutil.copytree(folder, tmp_path / "images").rglob("*.png"):
        shutil.copy(file, file.with_name(f"again-{file.name}"))
    made = make_pack(tmp_path / "images", tmp_path / "a.h5", split=SPLIT)
    splits = {number: [] for number in range(sum(COUNTS.values()))}
    for name, (images, _) in read(made).items():
        for number in numbers(images):
            splits[number].append(name)
    assert all(len(found) == 2 and found[0] == found[1] for found in splits.values())


def test_attributes_that_other_programs_read(of_folder):
    with h5py.File(of_folder) as file:
        facts = dict(file.attrs)
        pixels = file["train/images"][:] / 255
    assert facts["format"] == b"hpctrain-pack"
    assert facts["version"] == 4
    assert [name.decode() for name in facts["classes"]] == list(COUNTS)
    assert np.allclose(facts["mean"], pixels.mean(axis=(0, 1, 2)), rtol=1e-12)
    assert np.allclose(facts["std"], pixels.std(axis=(0, 1, 2)), rtol=1e-12)
    assert json.loads(facts["targets"]) == {"kind": "class"}
    scale = json.loads(facts["scale"])
    assert (scale["dtype"], scale["max_value"], scale["nodata"]) == ("uint8", None, None)
    made = json.loads(facts["provenance"])
    assert made["source"] == "images" and made["seed"] == 0
    assert made["images"] == {"train": 16, "validation": 6, "test": 5}


@pytest.mark.parametrize("encoding", ["raw", "jpeg"])
def test_a_pack_of_an_earlier_version_is_refused_with_the_command_that_makes_it_again(
    folder, tmp_path, encoding
):
    path = tmp_path / "a pack.h5"
    words = {"encoding": encoding, "split": SPLIT, "seed": 7, "size": "9x7", "crop": True}
    made = make_pack(folder, path, **words).read_bytes()
    change(path, "version", lambda _: 3)
    refused = READERS["pack --check"](path, None)
    assert refused.code == 2 and refused.err.count("\n") == 1
    said, _, again = refused.err.strip().partition(" make it again, python -m hpctrain ")
    assert f"{path}: its format version is 3, not 4:" in said
    done = ranks.command(1, *shlex.split(again), cwd=folder.parent)
    assert done.code == 0, done.err
    assert path.read_bytes() == made
    hp.write_pack(path, {"train": (np.zeros((1, 2, 2), "u1"), [0])}, "a", overwrite=True)
    change(path, "version", lambda _: 3)
    with pytest.raises(hp.UsageError, match=r"make it again, from its arrays, by hp\.write_pack"):
        hp.read_pack(path)
    change(path, "provenance", lambda _: np.bytes_('{"styles": [], "seed": 3}'))
    with pytest.raises(hp.UsageError, match="hpctrain pack digits --seed 3 --output"):
        hp.read_pack(path)


def test_bytes_may_be_read_at_their_offsets(of_folder):
    whole = of_folder.read_bytes()
    with h5py.File(of_folder) as file:
        for name in ("train/images", "train/targets", "test/images"):
            data = file[name]
            start = data.id.get_offset()
            assert data.chunks is None
            assert whole[start : start + data.nbytes] == data[:].tobytes()
        assert file["train/images"].dtype == np.uint8
        assert file["train/targets"].dtype == np.int32


def test_each_sample_has_a_checksum_of_its_bytes_and_its_label(of_folder):
    with h5py.File(of_folder) as file:
        images, labels = file["train/images"][:], file["train/targets"][:]
        assert file.attrs["image_shape"].tolist() == [11, 13, 3]
        sums = [zlib.crc32(a.tobytes(), int(b)) for a, b in zip(images, labels, strict=True)]
        assert file["train/crc32"][:].tolist() == sums


def test_pixels_are_those_of_pillow(folder, tmp_path):
    path = make_pack(folder, tmp_path / "a.h5", size="7x5", split="1")
    small = [
        np.asarray(Image.fromarray(picture(number)).resize((7, 5), Image.Resampling.BILINEAR))
        for number in range(27)
    ]
    found = read(path)["train"][0]
    assert sorted(image.tobytes() for image in found) == sorted(image.tobytes() for image in small)


@pytest.fixture(scope="module")
def jpeg(tmp_path_factory):
    """A pack of JPEG files, and the folder that it was made of."""
    root = tmp_path_factory.mktemp("jpeg")
    images = class_folders(
        root / "images", {"a": 20, "b": 20}, ".jpg", width=28, height=28, channels=1
    )
    path = make_pack(images, root / "jpeg.h5", encoding="jpeg", size="28x28", split=SPLIT)
    return path, images


def test_jpeg_files_are_stored_byte_for_byte(jpeg):
    path, images = jpeg
    stored = [file for files, _ in read(path).values() for file in files]
    assert sorted(stored) == sorted(file.read_bytes() for file in images.rglob("*.jpg"))
    with h5py.File(path) as file:
        assert file.attrs["fit"] == b"stretch"
        assert file.attrs["image_shape"].tolist() == [28, 28, 1]
        data, ends = file["train/bytes"], file["train/offsets"][:]
        assert data.dtype == np.uint8 and (ends[0], ends[-1]) == (0, len(data))
        assert file["train/offsets"].dtype == np.int64


@pytest.mark.parametrize("encoding", ["raw", "jpeg"])
def test_any_number_of_jobs_gives_equal_bytes(encoding, tmp_path):
    """Also with files that cannot be read and files that are equal."""
    images = class_folders(tmp_path / "images", {"a": 130, "b": 90}, width=61, height=59)
    (images / "a" / "twin.png").write_bytes((images / "b" / "003.png").read_bytes())
    (images / "b" / "broken.png").write_bytes(encode(picture(1))[:60])
    words = {"skip_bad": True, "size": "32x32", "encoding": encoding, "split": SPLIT}
    for jobs in (1, 3):
        make_pack(images, tmp_path / f"{jobs}.h5", jobs=jobs, **words)
    assert (tmp_path / "1.h5").read_bytes() == (tmp_path / "3.h5").read_bytes()
    assert sum(len(labels) for _, labels in read(tmp_path / "1.h5").values()) == 221


# Damage


NUMBER = 5  # of the damaged sample


def change(path, name, make):
    """Change a data set or an attribute by HDF5, which keeps its own checksums right."""
    with h5py.File(path, "r+", locking=False) as file:
        if name in file.attrs:
            file.attrs[name] = make(file.attrs[name])
        else:
            file[name][...] = make(file[name][...])


def flip(path, name, byte, value=1):
    """Flip a bit of a data set."""

    def flipped(rows):
        rows.view(np.uint8).reshape(-1)[byte] ^= value
        return rows

    change(path, name, flipped)


def swap(rows):
    rows[[NUMBER, NUMBER + 1]] = rows[[NUMBER + 1, NUMBER]]
    return rows


def zeros(rows):
    rows[NUMBER] = 0  # what a copy with holes reads
    return rows


#: What is damaged, in a pack of pixels (the labels of samples 5 and 6 are 1 and 2) and in
#: one of JPEG files.
DAMAGE = {
    "pixels: a bit": lambda p: flip(p, "train/images", NUMBER * 784 + 300),
    "pixels: last byte": lambda p: flip(p, "train/images", -1),
    "pixels: two samples swapped": lambda p: change(p, "train/images", swap),
    "pixels: zeros": lambda p: change(p, "train/images", zeros),
    "pixels: label of another class": lambda p: flip(p, "train/targets", NUMBER * 4),
    "pixels: label of no class": lambda p: flip(p, "train/targets", NUMBER * 4, 64),
    "pixels: two labels swapped": lambda p: change(p, "train/targets", swap),
    "pixels: classes": lambda p: change(p, "classes", lambda names: names[::-1]),
    "pixels: mean": lambda p: change(p, "mean", lambda mean: mean / 2),
    "pixels: scale": lambda p: change(p, "scale", lambda scale: scale.replace(b"null", b"2.0", 1)),
    "pixels: targets": lambda p: change(p, "targets", lambda _: np.bytes_('{"kind": "mask"}')),
    "pixels: provenance": lambda p: change(p, "provenance", lambda _: np.bytes_('{"a": 1}')),
    "pixels: a later version": lambda p: change(p, "version", lambda version: version + 98),
    "pixels: signature": lambda p: p.write_bytes(b"\0" + p.read_bytes()[1:]),
    "pixels: the last byte is gone": lambda p: os.truncate(p, p.stat().st_size - 1),
    "pixels: a page is left": lambda p: os.truncate(p, 4096),
    "pixels: empty": lambda p: os.truncate(p, 0),
    "pixels: another file": lambda p: p.write_bytes(encode(picture(1))),
    "pixels: missing": lambda p: p.unlink(),
    "jpeg: a bit": lambda p: flip(p, "train/bytes", 300),
    "jpeg: last byte": lambda p: flip(p, "train/bytes", -1),
    "jpeg: offsets, a bit": lambda p: flip(p, "train/offsets", NUMBER * 8),
    "jpeg: offsets descend": lambda p: flip(p, "train/offsets", NUMBER * 8 + 2, 64),
    "jpeg: two offsets swapped": lambda p: change(p, "train/offsets", swap),
    "jpeg: offsets, zeros": lambda p: change(p, "train/offsets", zeros),
    "jpeg: image shape": lambda p: change(p, "image_shape", lambda shape: shape - [4, 0, 0]),
    "jpeg: fit": lambda p: change(p, "fit", lambda _: np.bytes_("crop")),
}


def train(path, *words):
    model = ["--model", "digits", "--device", "cpu", "--progress", "none"]
    runs = ["--runs-dir", path.parent / "runs", "--run", "a"]
    return ranks.command(1, "--data", path, *model, *runs, "--epochs", 1, "--batch-size", 8, *words)


@pytest.fixture(scope="module")
def whole(tmp_path_factory, jpeg):
    """A pack of pixels for the smallest network, one of JPEG files, and a run beside each."""
    folder = tmp_path_factory.mktemp("whole")
    rows = {"train": 40, "validation": 5, "test": 5}
    paths = {"jpeg": jpeg[0]}
    paths["pixels"] = packs.make_pack(folder / "pixels.h5", rows, classes=3, seed=9)
    for path in paths.values():
        ended = train(path)
        assert (ended.code, ended.err) == (0, "")
    return paths


READERS = {
    "pack --check": lambda path, run: ranks.command(1, "pack", "--check", path),
    "train": lambda path, run: train(path),
    "evaluate": lambda path, run: ranks.command(
        1, "evaluate", run, "--data", path, "--split", "train"
    ),
}
readers = pytest.mark.parametrize("reader", READERS)


@readers
@pytest.mark.parametrize("kind", ["pixels", "jpeg"])
def test_a_whole_pack_passes(whole, kind, reader, tmp_path):
    path = shutil.copy(whole[kind], tmp_path / "copy.h5")
    assert READERS[reader](path, whole[kind].parent / "runs/a").code == 0


@readers
@pytest.mark.parametrize("what", DAMAGE)
def test_no_damage_passes_in_silence(whole, what, reader, tmp_path):
    """Exit code 1 or 2, and one line that names the file."""
    original = whole[what.partition(":")[0]]
    path = shutil.copy(original, tmp_path / "damaged.h5")
    DAMAGE[what](path)
    ended = READERS[reader](path, original.parent / "runs/a")
    assert ended.code in (1, 2)
    lines = [line for line in ended.err.splitlines() if "starting on" not in line]
    assert str(path) in lines[0] and "Traceback" not in ended.err
    assert len(lines) == 1 or reader == "pack --check"  # which lists all that is damaged
    for record in tmp_path.glob("runs/*/progress.jsonl"):
        assert json.loads(record.read_text().splitlines()[-1])["status"] == "failed"


def test_a_column_of_another_type_or_length_is_refused(whole, tmp_path):
    path = shutil.copy(whole["pixels"], tmp_path / "odd.h5")
    for change_of in (lambda labels: labels.astype("<i8"), lambda labels: labels[1:]):
        with h5py.File(path, "r+") as file:
            odd = change_of(file["train/targets"][...])
            del file["train/targets"]
            file["train/targets"] = odd
        with pytest.raises(hp.UsageError, match=r"train/(targets|crc32) is .*, not"):
            hp.read_pack(path)


@pytest.mark.parametrize("kind", ["pixels", "jpeg"])
def test_the_damaged_sample_is_named(whole, kind, tmp_path):
    path = shutil.copy(whole[kind], tmp_path / "damaged.h5")
    with h5py.File(path) as file:
        first = 0 if kind == "pixels" else int(file["train/offsets"][NUMBER])
    name, byte = ("images", NUMBER * 784) if kind == "pixels" else ("bytes", first)
    flip(path, f"train/{name}", byte + 300)
    for reader in READERS.values():
        said = reader(path, whole[kind].parent / "runs/a").err
        line = next(line for line in said.splitlines() if str(path) in line)
        assert re.search(rf"sample {NUMBER} of split 'train'", line)


def test_a_pack_with_a_flipped_byte_of_metadata_is_refused_or_unharmed(tmp_path):
    """The images of this pack have one pixel each: nearly all else is metadata."""
    path, refused = tmp_path / "a.h5", 0
    hp.write_pack(path, {"train": (np.arange(3, dtype=np.uint8)[:, None, None], [0, 1, 0])}, "ab")
    original, expected = path.read_bytes(), read(path)
    used = [place for place, byte in enumerate(original) if byte]
    for place in used[:: len(used) // 50]:
        path.write_bytes(original[:place] + bytes([original[place] ^ 0x55]) + original[place + 1 :])
        ended = READERS["pack --check"](path, None)
        assert ended.code in (0, 1, 2) and "Traceback" not in ended.err
        if ended.code:
            refused += 1
            assert str(path) in ended.err
        else:
            np.testing.assert_equal(read(path), expected)
    assert refused > 40


# HDF5 files of other programs, which are read where they lie


def test_an_external_file_is_read_in_place_and_stays_as_it_is(tmp_path):
    path = write(tmp_path / "theirs.h5", *pixels(60, (28, 28, 1), 2))
    before, at = path.read_bytes(), path.stat().st_mtime_ns
    assert train(path, "--images", "x", "--labels", "y", "--split", "0.8,0.2").code == 0
    ended = ranks.command(1, "evaluate", tmp_path / "runs" / "a", "--split", "test")
    assert ended.code == 0 and "test: 12 images" in ended.out
    assert (path.read_bytes(), path.stat().st_mtime_ns) == (before, at)
    assert sorted(os.listdir(tmp_path)) == ["runs", "theirs.h5"]
