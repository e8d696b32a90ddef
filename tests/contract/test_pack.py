"""What a pack holds, read by plain h5py, and that no damage to one passes in silence.

Other programs may rely on this: a group per split with `images` (N, H, W, C) uint8 and integer
`labels` (N,), or with the bytes of JPEG files and their `offsets` (N + 1,); contiguous data sets,
so that bytes may be read at their offsets; and the root attributes below. Tests say so where the
format is about to change: to one checksum per sample instead of one per block.
"""

import json
import os
import re
import shutil
import zlib
from itertools import pairwise

import h5py
import numpy as np
import pytest
from PIL import Image

import hpctrain as hp
from tests.support import ranks
from tests.support.api import command_line
from tests.support.external import write
from tests.support.pictures import class_folders, encode, picture, tar, zipped

COUNTS = {"ant": 11, "bee": 9, "cat": 7}
FILES = "bytes"  # changes to "files" with one checksum per sample
SPLIT = ["--split", "0.6,0.2,0.2"]
GRAY = {"width": 28, "height": 28, "channels": 1}  # what the smallest network trains on
by_sample = pytest.mark.xfail(strict=True, reason="a checksum covers a block, not one sample")


def pack(*words):
    assert command_line(["pack", *map(str, words)]) == 0


def read(path):
    """Ten lines that any program may write: by split, images or JPEG files, and class names."""
    found = {}
    with h5py.File(path) as file:
        names = [name.decode() for name in file.attrs["classes"]]
        for split, group in file.items():
            labels = [names[label] for label in group["labels"][:]]
            if FILES in group:
                data, ends = group[FILES][:].tobytes(), group["offsets"][:]
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
    path = tmp_path_factory.mktemp("pack") / "folder.h5"
    pack(folder, "--output", path, "--jobs", 1, *SPLIT)
    return path


def write_manifest(folder, path):
    files = sorted(folder.rglob("*.png"))
    lines = [f"{file.relative_to(folder)},{file.parent.name}" for file in files]
    path.write_text("\n".join(["path,label", *lines]))
    return [folder, "--manifest", path]


SOURCES = {
    "tar": lambda folder, tmp: [tar(tmp / "x.tar", folder, "top", "w")],
    "tgz": lambda folder, tmp: [tar(tmp / "x.tgz", folder, "top")],
    "zip": lambda folder, tmp: [zipped(tmp / "x.zip", folder)],
    "manifest": lambda folder, tmp: write_manifest(folder, tmp / "labels.csv"),
}


def test_every_picture_is_in_one_split_with_its_class(of_folder):
    found = read(of_folder)
    placed = {}
    for images, labels in found.values():
        placed |= dict(zip(numbers(images), labels, strict=True))
    assert placed == dict(enumerate(np.repeat(list(COUNTS), list(COUNTS.values())).tolist()))
    counts = {name: [labels.count(k) for k in COUNTS] for name, (_, labels) in found.items()}
    assert counts == {"train": [7, 5, 4], "validation": [2, 2, 2], "test": [2, 2, 1]}


def test_the_order_of_the_rows_follows_from_names_and_seed_alone(folder, of_folder, tmp_path):
    """Golden: the same on every machine and in every version."""
    order = {name: numbers(images) for name, (images, _) in read(of_folder).items()}
    assert order == {
        "train": [22, 7, 8, 9, 15, 26, 16, 18, 25, 21, 2, 14, 4, 5, 19, 3],
        "validation": [13, 10, 6, 23, 17, 20],
        "test": [0, 1, 24, 12, 11],
    }
    pack(folder, "--output", tmp_path / "a.h5", "--seed", 7, "--jobs", 1, *SPLIT)
    assert numbers(read(tmp_path / "a.h5")["test"][0]) == [16, 1, 26, 2, 12]


@pytest.mark.parametrize("kind", SOURCES)
def test_archives_and_manifests_give_the_rows_of_their_folder(kind, folder, of_folder, tmp_path):
    pack(*SOURCES[kind](folder, tmp_path), "--output", tmp_path / "a.h5", "--jobs", 1, *SPLIT)
    found, expected = read(tmp_path / "a.h5"), read(of_folder)
    assert found.keys() == expected.keys()
    for name, (images, labels) in expected.items():
        assert found[name][1] == labels and np.array_equal(found[name][0], images)
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]


def test_equal_files_are_in_one_split(folder, tmp_path):
    """Else a network would be tested with images that it was trained on."""
    for file in shutil.copytree(folder, tmp_path / "images").rglob("*.png"):
        shutil.copy(file, file.with_name(f"again-{file.name}"))
    pack(tmp_path / "images", "--output", tmp_path / "a.h5", "--jobs", 1, *SPLIT)
    splits = {number: [] for number in range(sum(COUNTS.values()))}
    for name, (images, _) in read(tmp_path / "a.h5").items():
        for number in numbers(images):
            splits[number].append(name)
    assert all(len(found) == 2 and found[0] == found[1] for found in splits.values())


def test_arrays_are_rows_in_the_order_given(tmp_path):
    images = np.random.default_rng(0).integers(0, 256, (23, 5, 4), np.uint8)
    labels = np.arange(23) % 2
    splits = {"train": (images[:20], labels[:20]), "other": (images[20:], labels[20:])}
    hp.write_pack(tmp_path / "a.h5", splits, ("no", "yes"), {"made": "here"})
    found = read(tmp_path / "a.h5")
    assert np.array_equal(found["train"][0], images[:20, ..., None])
    assert np.array_equal(found["other"][0], images[20:, ..., None])
    assert found["train"][1] == ["no", "yes"] * 10
    with h5py.File(tmp_path / "a.h5") as file:
        assert json.loads(file.attrs["provenance"])["made"] == "here"


def test_attributes_that_other_programs_read(of_folder):
    with h5py.File(of_folder) as file:
        facts = dict(file.attrs)
        pixels = file["train/images"][:] / 255
    assert facts["format"] == b"hpctrain-pack"
    assert facts["version"] == 1  # changes with one checksum per sample: one version for all packs
    assert [name.decode() for name in facts["classes"]] == list(COUNTS)
    assert np.allclose(facts["mean"], pixels.mean(axis=(0, 1, 2)), rtol=1e-12)
    assert np.allclose(facts["std"], pixels.std(axis=(0, 1, 2)), rtol=1e-12)
    made = json.loads(facts["provenance"])
    assert made["source"] == "images" and made["seed"] == 0
    assert made["images"] == {"train": 16, "validation": 6, "test": 5}


def test_bytes_may_be_read_at_their_offsets(of_folder):
    whole = of_folder.read_bytes()
    with h5py.File(of_folder) as file:
        for name in ("train/images", "train/labels", "test/images"):
            data = file[name]
            start = data.id.get_offset()
            assert data.chunks is None
            assert whole[start : start + data.nbytes] == data[:].tobytes()
        assert file["train/images"].dtype == np.uint8
        assert file["train/labels"].dtype == np.int64  # changes with one checksum per sample: int32


@by_sample
def test_each_sample_has_a_checksum_of_its_bytes_and_its_label(of_folder):
    with h5py.File(of_folder) as file:
        images, labels = file["train/images"][:], file["train/labels"][:]
        assert file.attrs["image_shape"].tolist() == [11, 13, 3]
        sums = [zlib.crc32(a.tobytes() + b.tobytes()) for a, b in zip(images, labels, strict=True)]
        assert file["train/crc32"][:].tolist() == sums


def test_pixels_are_those_of_pillow(folder, tmp_path):
    pack(folder, "--output", tmp_path / "a.h5", "--size", "7x5", "--jobs", 1, "--split", "1")
    small = [
        np.asarray(Image.fromarray(picture(number)).resize((7, 5), Image.Resampling.BILINEAR))
        for number in range(27)
    ]
    found = read(tmp_path / "a.h5")["train"][0]
    assert sorted(image.tobytes() for image in found) == sorted(image.tobytes() for image in small)


@pytest.fixture(scope="module")
def jpeg(tmp_path_factory):
    """A pack of JPEG files, the pack of their pixels, and the files by their bytes."""
    root = tmp_path_factory.mktemp("jpeg")
    images = class_folders(root / "images", {"a": 20, "b": 20}, ".jpg", **GRAY)
    (images / "b" / "other.png").write_bytes(encode(picture(50, **GRAY)))
    for encoding in ("jpeg", "raw"):
        words = ["--encoding", encoding, "--size", "28x28", "--jobs", 1, *SPLIT]
        pack(images, "--output", root / f"{encoding}.h5", *words)
    return root, {file.read_bytes(): file for file in images.rglob("*.*")}


def test_jpeg_files_are_stored_byte_for_byte(jpeg):
    root, files = jpeg
    stored = [file for images, _ in read(root / "jpeg.h5").values() for file in images]
    other = [file for file in stored if file not in files]
    assert len(stored) == 41 and len(set(stored)) == 41
    assert len(other) == 1 and other[0][:2] == b"\xff\xd8"  # the PNG file, as JPEG
    with h5py.File(root / "jpeg.h5") as file:
        assert (file.attrs["encoding"], file.attrs["fit"]) == (b"jpeg", b"stretch")
        assert file.attrs["image_shape"].tolist() == [28, 28, 1]
        data, ends = file[f"train/{FILES}"], file["train/offsets"][:]
        assert data.dtype == np.uint8 and (ends[0], ends[-1]) == (0, len(data))
        assert file["train/offsets"].dtype == np.int64


def test_decoded_jpeg_files_are_the_rows_of_a_pack_of_pixels(jpeg):
    root, files = jpeg
    pixels = read(root / "raw.h5")
    for name, (stored, labels) in read(root / "jpeg.h5").items():
        same = [row for row, file in enumerate(stored) if file in files]
        with hp.Split(hp.read_pack(root / "jpeg.h5"), name, threads=1) as split:
            decoded = split.gather(np.array(same), np.empty((len(same), 28, 28, 1), np.uint8))
        assert labels == pixels[name][1]
        for row, image in zip(same, decoded, strict=True):
            assert np.array_equal(image[..., 0], np.asarray(Image.open(files[stored[row]])))
            assert np.array_equal(image, pixels[name][0][row])


@pytest.mark.parametrize("encoding", ["raw", "jpeg"])
def test_any_number_of_jobs_gives_equal_bytes(encoding, tmp_path):
    """Also with files that cannot be read and files that are equal."""
    images = class_folders(tmp_path / "images", {"a": 130, "b": 90}, width=61, height=59)
    (images / "a" / "twin.png").write_bytes((images / "b" / "003.png").read_bytes())
    (images / "b" / "broken.png").write_bytes(encode(picture(1))[:60])
    words = ["--skip-bad", "--size", "32x32", "--encoding", encoding, *SPLIT]
    for jobs in (1, 3):
        pack(images, "--output", tmp_path / f"{jobs}.h5", "--jobs", jobs, *words)
    assert (tmp_path / "1.h5").read_bytes() == (tmp_path / "3.h5").read_bytes()
    assert sum(len(labels) for _, labels in read(tmp_path / "1.h5").values()) == 221


def test_what_is_read_in_python_is_what_h5py_reads(of_folder):
    opened = hp.read_pack(of_folder)
    assert opened.classes == tuple(COUNTS) and opened.image_shape == (11, 13, 3)
    for name, (images, labels) in read(of_folder).items():
        with hp.Split(opened, name) as split:
            rows = np.arange(len(split))[::-1]
            out = split.gather(rows, np.empty((len(split), 11, 13, 3), np.uint8))
            assert [opened.classes[label] for label in split.labels] == labels
        assert np.array_equal(out[::-1], images)


# Damage


NUMBER = 5  # of the damaged sample


def flip(path, name, byte, value=1):
    with h5py.File(path) as file:
        place = file[name].id.get_offset() + byte
    with open(path, "r+b") as file:
        file.seek(place)
        old = file.read(1)[0]
        file.seek(place)
        file.write(bytes([old ^ value]))


def change(path, name, make):
    """Change a data set or an attribute by HDF5, which keeps its own checksums right."""
    with h5py.File(path, "r+", locking=False) as file:
        if name in file.attrs:
            file.attrs[name] = make(file.attrs[name])
        else:
            file[name][...] = make(file[name][...])


def swap(rows):
    rows[[NUMBER, NUMBER + 1]] = rows[[NUMBER + 1, NUMBER]]
    return rows


def zeros(rows):
    rows[NUMBER] = 0  # what a copy with holes reads
    return rows


def swap_files(path):
    """Two JPEG files exchanged, with their offsets."""
    with h5py.File(path, "r+", locking=False) as file:
        ends, data = file["train/offsets"], file[f"train/{FILES}"]
        a, b, c = ends[NUMBER : NUMBER + 3]
        data[a:c] = np.concatenate([data[b:c], data[a:b]])
        ends[NUMBER + 1] = a + c - b


def ends(path):
    with h5py.File(path) as file:
        return file["train/offsets"][:].tolist()


#: What is damaged, in a pack of pixels; the label of sample 5 is "bee", of sample 6 "cat".
PIXELS = {
    "pixels: a bit": lambda p: flip(p, "train/images", NUMBER * 784 + 300),
    "pixels: last byte": lambda p: flip(p, "train/images", 40 * 784 - 1),
    "pixels: two samples swapped": lambda p: change(p, "train/images", swap),
    "pixels: zeros": lambda p: change(p, "train/images", zeros),
    "labels: a bit": lambda p: flip(p, "train/labels", NUMBER * 8),
    "labels: no class": lambda p: flip(p, "train/labels", NUMBER * 8, 64),
    "labels: two swapped": lambda p: change(p, "train/labels", swap),
    "metadata: classes": lambda p: change(p, "classes", lambda names: names[::-1]),
    "metadata: mean": lambda p: change(p, "mean", lambda mean: mean / 2),
    "metadata: provenance": lambda p: change(p, "provenance", lambda _: np.bytes_('{"a": 1}')),
    "metadata: signature": lambda p: p.write_bytes(b"\0" + p.read_bytes()[1:]),
    "file: the last byte": lambda p: os.truncate(p, p.stat().st_size - 1),
    "file: half": lambda p: os.truncate(p, p.stat().st_size // 2),
    "file: a page": lambda p: os.truncate(p, 4096),
    "file: empty": lambda p: os.truncate(p, 0),
    "file: another": lambda p: p.write_bytes(encode(picture(1))),
    "file: missing": lambda p: p.unlink(),
}
#: In a pack of JPEG files.
ENCODED = {
    "files: a bit": lambda p: flip(p, f"train/{FILES}", ends(p)[NUMBER] + 300),
    "files: last byte": lambda p: flip(p, f"train/{FILES}", ends(p)[-1] - 1),
    "files: two swapped": swap_files,
    "offsets: a bit": lambda p: flip(p, "train/offsets", NUMBER * 8),
    "offsets: descending": lambda p: flip(p, "train/offsets", NUMBER * 8 + 2, 64),
    "offsets: two swapped": lambda p: change(p, "train/offsets", swap),
    "offsets: zeros": lambda p: change(p, "train/offsets", zeros),
    "metadata: image shape": lambda p: change(p, "image_shape", lambda shape: shape - [4, 0, 0]),
    "metadata: fit": lambda p: change(p, "fit", lambda _: np.bytes_("crop")),
}
TABLE = [("pixels", what) for what in PIXELS] + [("jpeg", what) for what in ENCODED]
damaged = pytest.mark.parametrize(("kind", "what"), TABLE, ids=[f"{k} {w}" for k, w in TABLE])


@pytest.fixture(scope="module")
def whole(tmp_path_factory, jpeg):
    """A pack of pixels for the smallest network, one of JPEG files, and a run beside each."""
    folder = tmp_path_factory.mktemp("whole")
    images = np.stack([picture(number, **GRAY) for number in range(50)])
    labels = np.arange(50) % 3
    cuts = {"train": slice(40), "validation": slice(40, 45), "test": slice(45, 50)}
    splits = {name: (images[rows], labels[rows]) for name, rows in cuts.items()}
    hp.write_pack(folder / "pixels.h5", splits, ("ant", "bee", "cat"), {"source": "here"})
    paths = {"pixels": folder / "pixels.h5", "jpeg": jpeg[0] / "jpeg.h5"}
    for path in paths.values():
        ended = train(path)
        assert (ended.code, ended.err) == (0, "")
    return paths


def damage(whole, kind, what, tmp_path):
    path = tmp_path / "damaged.h5"
    path.write_bytes(whole[kind].read_bytes())
    if what is not None:
        {"pixels": PIXELS, "jpeg": ENCODED}[kind][what](path)
    return path


def check(path):
    return ranks.command(1, "pack", "--check", path)


def train(path, *words, run="a"):
    model = ["--model", "digits", "--device", "cpu", "--progress", "none"]
    runs = ["--runs-dir", path.parent / "runs", "--run", run]
    return ranks.command(1, "--data", path, *model, *runs, "--epochs", 1, "--batch-size", 8, *words)


def train_at_first_touch(path):
    """Changes with one checksum per sample: every run compares a sample when it is first read."""
    return train(path, "--verify", "first-touch")


def evaluate(path, run):
    return ranks.command(1, "evaluate", run, "--data", path, "--split", "train")


READERS = {
    "pack --check": lambda path, run: check(path),
    "train": lambda path, run: train(path),
    "train, first touch": lambda path, run: train_at_first_touch(path),
    "evaluate": evaluate,
}
readers = pytest.mark.parametrize("reader", READERS)


@readers
@pytest.mark.parametrize("kind", ["pixels", "jpeg"])
def test_a_whole_pack_passes(whole, kind, reader, tmp_path):
    path = damage(whole, kind, None, tmp_path)
    assert READERS[reader](path, whole[kind].parent / "runs" / "a").code == 0


@readers
@damaged
def test_no_damage_passes_in_silence(whole, kind, what, reader, tmp_path):
    """Exit code 1 or 2, and one line that names the file."""
    path = damage(whole, kind, what, tmp_path)
    ended = READERS[reader](path, whole[kind].parent / "runs" / "a")
    assert ended.code in (1, 2)
    lines = [line for line in ended.err.splitlines() if "starting on" not in line]
    assert str(path) in lines[0] and "Traceback" not in ended.err
    assert len(lines) == 1 or reader == "pack --check"  # which lists all that is damaged
    assert not list(tmp_path.glob("runs/*/model.safetensors"))


@by_sample
@pytest.mark.parametrize("kind", ["pixels", "jpeg"])
def test_the_damaged_sample_is_named(whole, kind, tmp_path):
    what = "pixels: a bit" if kind == "pixels" else "files: a bit"
    path = damage(whole, kind, what, tmp_path)
    for said in (check(path).err, train(path).err):
        line = next(line for line in said.splitlines() if str(path) in line)
        assert "train" in line and NUMBER in map(
            int, re.findall(r"\d+", line.replace(str(path), ""))
        )


def test_a_pack_with_a_flipped_byte_of_metadata_is_refused_or_unharmed(whole, tmp_path):
    path = tmp_path / "damaged.h5"
    original, expected = whole["pixels"].read_bytes(), read(whole["pixels"])
    with h5py.File(whole["pixels"]) as file:
        data = [file[f"{name}/{kind}"] for name in file for kind in ("images", "labels")]
        places = [range(d.id.get_offset(), d.id.get_offset() + d.nbytes) for d in data]
    used = [i for i, byte in enumerate(original) if byte and not any(i in p for p in places)]
    refused = 0
    for place in used[:: len(used) // 50]:
        path.write_bytes(original[:place] + bytes([original[place] ^ 0x55]) + original[place + 1 :])
        ended = check(path)
        assert ended.code in (0, 1, 2) and "Traceback" not in ended.err
        if ended.code:
            refused += 1
            assert str(path) in ended.err
        else:
            found = read(path)
            assert all(np.array_equal(found[name][0], expected[name][0]) for name in expected)
            assert all(found[name][1] == expected[name][1] for name in expected)
    assert refused > 40


def write_negative(path, output):
    """Write a pack of the same samples whose pixels are inverted; its path."""
    with h5py.File(path) as file:
        splits = {name: (255 - file[name]["images"][:], file[name]["labels"][:]) for name in file}
    hp.write_pack(output, splits, ("ant", "bee", "cat"), {"source": "here"}, overwrite=True)
    return output


@pytest.mark.parametrize("how", ["cut short", "overwritten", "replaced", "removed"])
def test_a_pack_that_changes_during_a_run_ends_it(whole, how, tmp_path):
    """Its test images are read at the end."""
    path = damage(whole, "pixels", None, tmp_path)
    other = write_negative(path, tmp_path / "other.h5")
    assert other.stat().st_size == path.stat().st_size

    def spoil(record):
        if how == "cut short":
            os.truncate(path, 4096)
        elif how == "overwritten":
            path.write_bytes(other.read_bytes())
        elif how == "replaced":
            os.replace(other, path)
        else:
            path.unlink()

    def run(comm):
        settings = {"model": "digits", "device": "cpu", "progress": "none", "batch_size": 8}
        folder = {"run": "a", "runs_dir": str(tmp_path / "runs")}
        with pytest.raises((hp.RunError, hp.UsageError)) as caught:
            hp.train(data=str(path), epochs=1, on_evaluation=spoil, **settings, **folder)
        return str(caught.value)

    before = path.read_bytes()
    (said,) = ranks.on_ranks(1, run)
    assert str(path) in said and "\n" not in said
    assert not path.exists() or path.read_bytes() != before


def test_a_run_resumes_on_the_pack_it_was_trained_on_only(whole, tmp_path):
    path = damage(whole, "pixels", None, tmp_path)
    assert train(path).code == 0
    write_negative(path, path)
    ended = train(path, "--epochs", 2)
    assert ended.code == 2 and len(ended.err.splitlines()) == 1
    assert "begun with pack" in ended.err


# HDF5 files of other programs, which are read where they lie


EXTERNAL = ["--images", "x", "--labels", "y", "--split", "0.8,0.2"]


@pytest.fixture
def external(tmp_path):
    """60 images, sorted by class, with labels 1 and 5."""
    images = np.stack([picture(number, **GRAY) for number in range(60)])
    return write(tmp_path / "theirs.h5", images, np.repeat([1, 5], 30))


def test_an_external_file_is_read_in_place_and_stays_as_it_is(external, tmp_path):
    before, at = external.read_bytes(), external.stat().st_mtime_ns
    assert train(external, *EXTERNAL).code == 0
    ended = ranks.command(1, "evaluate", tmp_path / "runs" / "a", "--split", "test")
    assert ended.code == 0 and "test: 12 images" in ended.out
    assert (external.read_bytes(), external.stat().st_mtime_ns) == (before, at)
    assert sorted(os.listdir(tmp_path)) == ["runs", "theirs.h5"]


@pytest.mark.parametrize("chunks", [None, (7, 28, 28, 1)])
def test_floats_divided_by_255_train_to_the_bits_of_bytes(external, tmp_path, chunks):
    words = [*EXTERNAL, "--shuffle", "blocks"]
    with h5py.File(external) as file:
        images, labels = file["x"][:], file["y"][:]
    packed = {"chunks": chunks, "compression": "gzip" if chunks else None}
    write(tmp_path / "floats.h5", images.astype(np.float32), labels, **packed)
    write(tmp_path / "bytes.h5", images, labels, chunks=chunks)
    assert train(tmp_path / "bytes.h5", *words).code == 0
    assert train(tmp_path / "floats.h5", *words, "--max-value", 255, run="b").code == 0
    weights = [tmp_path / "runs" / run / "model.safetensors" for run in "ab"]
    assert ranks.command(1, "compare", *(path.parent for path in weights)).code == 0


def test_a_run_does_not_resume_on_an_external_file_with_other_labels(external):
    assert train(external, *EXTERNAL).code == 0
    change(external, "y", lambda labels: labels[::-1])
    ended = train(external, *EXTERNAL, "--epochs", 2)
    assert ended.code == 2 and len(ended.err.splitlines()) == 1
    assert "begun with pack" in ended.err
