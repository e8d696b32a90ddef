"""Packing JPEG files: whose bytes are kept, what becomes of the others, what the pack says."""

import io
import json
import os
import uuid
from contextlib import contextmanager
from itertools import pairwise

import h5py
import numpy as np
import pytest
from PIL import Image

from hpctrain.cli import main as command
from hpctrain.data.images import BadImage, as_jpeg
from hpctrain.data.pack_format import content_uuid
from hpctrain.data.packed import read_pack, verify
from hpctrain.data.packing import make
from hpctrain.data.split import Split
from hpctrain.errors import RunError, UsageError
from tests.data.pictures import class_folders, contents, encode, pack, picture, zipped

SIZE = "17x13"


def rotated(data, orientation):
    """The JPEG file with an EXIF orientation."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    file = io.BytesIO()
    Image.open(io.BytesIO(data)).save(file, "JPEG", exif=exif, quality=95)
    return file.getvalue()


def saved(image, kind="JPEG", **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def files_of(packed, split):
    """The bytes of every file of a split, in its order, as plain HDF5 gives them."""
    with h5py.File(packed.path) as file:
        data, offsets = file[f"{split}/bytes"][:], file[f"{split}/offsets"][:]
        return [data[a:b].tobytes() for a, b in pairwise(offsets)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("source") / "images"
    return class_folders(root, {"a": 43, "b": 29}, ".jpg", width=41, height=37)


def test_upright_jpeg_files_keep_their_very_bytes():
    colour, gray = Image.fromarray(picture(1, 41, 37)), Image.fromarray(picture(1, 41, 37)[..., 0])
    plain = saved(colour, quality=61)
    for data in (
        plain,
        saved(gray),
        saved(colour, progressive=True),
        saved(colour, subsampling=2, comment=b"kept"),
        rotated(plain, 1),
        plain + b"after the end",
    ):
        assert as_jpeg(data) is data


def test_all_others_are_encoded_once_upright_at_their_own_size():
    colour = Image.fromarray(picture(1, 41, 37))
    rgba = colour.convert("RGBA")
    rgba.putalpha(128)
    for data, mode, upright in (
        (saved(colour, "PNG"), "RGB", colour),
        (saved(colour.convert("CMYK")), "RGB", colour),
        (saved(colour.quantize(250), "PNG"), "RGB", colour),
        (saved(colour.convert("L"), "PNG"), "L", colour.convert("L")),
        (
            rotated(saved(colour, quality=95), 6),
            "RGB",
            colour.transpose(Image.Transpose.ROTATE_270),
        ),
        (saved(rgba, "PNG"), "RGB", colour.point(lambda v: v // 2)),
    ):
        image = Image.open(io.BytesIO(as_jpeg(data)))
        assert (image.format, image.mode, image.size) == ("JPEG", mode, upright.size)
        assert image.getexif().get(0x0112, 1) == 1
        assert mode == "L" or {layer[1:3] for layer in image.layer} == {(1, 1)}  # 4:4:4
        assert np.abs(np.int16(image) - np.int16(upright)).mean() < 4
    tables = Image.open(io.BytesIO(as_jpeg(saved(colour, "PNG")))).quantization
    assert tables == Image.open(io.BytesIO(saved(colour, quality=95))).quantization
    with pytest.raises(BadImage, match="not an image"):
        as_jpeg(b"no picture")


def test_a_folder_becomes_a_pack_of_its_files(folder, tmp_path):
    made = pack(folder, tmp_path / "a.h5", size=SIZE, split="0.6,0.2,0.2", encoding="jpeg")
    raw = pack(folder, tmp_path / "b.h5", size=SIZE, split="0.6,0.2,0.2")
    assert made.encoded and made.fit == "stretch" and not raw.encoded
    assert (made.image_shape, made.classes) == ((13, 17, 3), ("a", "b"))
    given = {path.read_bytes(): path.parent.name for path in folder.glob("*/*.jpg")}
    found = []
    for split in made.splits:
        with Split(made, split) as rows:
            names = [made.classes[label] for label in rows.labels]
        found += zip(files_of(made, split), names, strict=True)
    assert dict(found) == given and len(found) == len(given) == 72
    assert made.provenance["encoding"] == {"name": "jpeg", "kept": 72, "encoded_anew": 0}
    assert {k: v for k, v in made.provenance.items() if k != "encoding"} == raw.provenance
    assert (made.mean, made.std) == (raw.mean, raw.std)
    assert verify(made) == [] and list(made.splits) == ["train", "validation", "test"]
    with h5py.File(made.path) as file:
        assert int(file.attrs["version"]) == 2 and file.attrs["encoding"] == b"jpeg"
        assert file.attrs["fit"] == b"stretch" and file.attrs["image_shape"].tolist() == [13, 17, 3]
        assert file["train/bytes"].id.get_offset() % 4096 == 0
    with h5py.File(raw.path) as file:
        assert int(file.attrs["version"]) == 1 and "encoding" not in file.attrs


@pytest.mark.parametrize("crop", [False, True])
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("size", ["17x13", "5x3", "97x101"])
def test_it_decodes_to_the_pixels_of_a_raw_pack(folder, tmp_path, size, crop, channels):
    settings = {"size": size, "crop": crop, "channels": channels}
    made = pack(folder, tmp_path / "a.h5", encoding="jpeg", **settings)
    raw = pack(folder, tmp_path / "b.h5", **settings)
    for split in raw.splits:
        images, labels = contents(raw, split)
        assert images.std() > 10
        with Split(made, split) as rows:
            found = rows.gather(np.arange(len(labels)), np.empty_like(images))
            assert (found == images).all() and (rows.labels == labels).all()
    assert (made.mean, made.std) == (raw.mean, raw.std)
    assert made.fit == ("crop" if crop else "stretch")
    assert made.uuid != raw.uuid


def test_the_size_of_all_images_where_none_is_asked(folder, tmp_path):
    made = pack(folder, tmp_path / "a.h5", encoding="jpeg")
    assert made.image_shape == (37, 41, 3)
    with Split(made, "test") as rows:
        out = rows.gather(np.array([3]), np.empty((1, 37, 41, 3), np.uint8))[0]
    assert (out == np.asarray(Image.open(io.BytesIO(files_of(made, "test")[3])))).all()
    (folder.parent / "odd/a").mkdir(parents=True)
    for number, width in enumerate((13, 11)):
        data = encode(picture(number, width), "JPEG")
        (folder.parent / f"odd/a/{number}.jpg").write_bytes(data)
    with pytest.raises(UsageError, match="images differ in size"):
        pack(folder.parent / "odd", tmp_path / "b.h5", encoding="jpeg")


def test_equal_asks_give_equal_bytes_whatever_the_processes(folder, tmp_path):
    (tmp_path / "zip").mkdir()
    source = zipped(tmp_path / "zip/images", folder, "top/")
    settings = {"size": SIZE, "encoding": "jpeg"}
    made = [
        pack(folder, tmp_path / "1.h5", jobs=1, **settings),
        pack(folder, tmp_path / "2.h5", jobs=3, **settings),
        pack(source, tmp_path / "3.h5", jobs=2, **settings),
    ]
    assert (tmp_path / "1.h5").read_bytes() == (tmp_path / "2.h5").read_bytes()
    other = pack(folder, tmp_path / "4.h5", **{**settings, "size": "13x17"})
    assert made[0].uuid == made[1].uuid == made[2].uuid != other.uuid
    assert sorted(p.name for p in tmp_path.iterdir()) == [*(f"{i}.h5" for i in "1234"), "zip"]


def test_a_mixture_is_counted_bad_files_listed_and_duplicates_kept_together(tmp_path, capsys):
    for name in "ab":
        (tmp_path / "images" / name).mkdir(parents=True)
    for i in range(23):
        image = Image.fromarray(picture(i, 31, 29))
        data, suffix = (saved(image), "jpg") if i < 14 else (saved(image, "PNG"), "png")
        (tmp_path / f"images/{'ab'[i % 2]}/{i:02}.{suffix}").write_bytes(data)
        if i == 5:
            (tmp_path / "images/b/twin.jpg").write_bytes(data)
    (tmp_path / "images/a/cut.jpg").write_bytes(saved(Image.fromarray(picture(99)))[:-100])
    (tmp_path / "images/a/none.png").write_bytes(b"nothing")
    settings = {"size": "11x7", "encoding": "jpeg", "split": "0.7,0.3"}
    with pytest.raises(UsageError, match=r"^2 of 26 files cannot be read"):
        pack(tmp_path / "images", tmp_path / "a.h5", **settings)
    assert not (tmp_path / "a.h5").exists()
    made = pack(tmp_path / "images", tmp_path / "a.h5", skip_bad=True, **settings)
    assert made.provenance["encoding"] == {"name": "jpeg", "kept": 15, "encoded_anew": 9}
    assert made.provenance["skipped"] == {"files": 2, "names": ["a/cut.jpg", "a/none.png"]}
    assert made.provenance["duplicates"]["groups"] == 1
    twin = (tmp_path / "images/b/twin.jpg").read_bytes()
    assert sorted(files_of(made, split).count(twin) for split in made.splits) == [0, 2]
    assert "unreadable: a/cut.jpg" in capsys.readouterr().err
    with Split(made, "train") as rows:
        shape = (len(rows.labels), *made.image_shape)
        values = rows.gather(np.arange(shape[0]), np.empty(shape, np.uint8)) / 255
    assert np.allclose(made.mean, values.mean((0, 1, 2)), rtol=1e-12)
    assert np.allclose(made.std, values.std((0, 1, 2)), rtol=1e-12)


def test_gray_files_stay_gray_in_a_colour_pack(tmp_path):
    root = class_folders(tmp_path / "images", {"a": 5, "b": 5}, ".jpg", channels=1)
    made = pack(root, tmp_path / "a.h5", channels=3, encoding="jpeg", split="0.8,0.2")
    assert made.image_shape == (11, 13, 3)
    with Split(made, "train") as rows:
        images = rows.gather(np.arange(8), np.empty((8, 11, 13, 3), np.uint8))
    assert (images[..., 0] == images[..., 1]).all() and (images[..., 0] == images[..., 2]).all()
    assert {Image.open(io.BytesIO(data)).mode for data in files_of(made, "train")} == {"L"}


def test_digits_are_refused_in_one_line(tmp_path, capsys):
    output = str(tmp_path / "a.h5")
    with pytest.raises(UsageError, match="--encoding does not apply to digits"):
        pack("digits", output, encoding="jpeg")
    assert command(["pack", "digits", "--encoding", "jpeg", "--output", output]) == 2
    assert len(capsys.readouterr().err.strip().split("\n")) == 1
    assert not os.path.exists(output)


def test_progress_counts_every_image_once(folder, tmp_path, monkeypatch):
    told = {}

    @contextmanager
    def progress(what, total):
        yield told.setdefault((what, total), []).append

    monkeypatch.setattr("hpctrain.data.packing.make.report.progress", progress)
    monkeypatch.setattr("hpctrain.data.packing.write.rows_per_block", lambda row_bytes: 997)
    monkeypatch.setattr(make, "FIRST_IMAGES", 19)
    made = pack(folder, tmp_path / "a.h5", size=SIZE, encoding="jpeg")
    assert {key: sum(counts) for key, counts in told.items()} == {
        ("reading", 19): 19,  # the first ones have colour
        ("decoding", 72): 72,
        ("writing", 72): 72,
    }
    assert len(told["writing", 72]) > 20
    assert verify(made) == []  # in blocks of another size
    monkeypatch.undo()
    assert files_of(made, "test") == files_of(
        pack(folder, tmp_path / "b.h5", size=SIZE, encoding="jpeg"), "test"
    )


def test_a_file_that_changes_meanwhile_is_named(tmp_path, monkeypatch):
    root = class_folders(tmp_path / "images", {"a": 20, "b": 20}, ".jpg")
    written = make.write_files

    def changed(*arguments):
        (root / "b" / "003.jpg").write_bytes(encode(picture(99), "JPEG"))
        return written(*arguments)

    monkeypatch.setattr(make, "write_files", changed)
    with pytest.raises(RunError, match="b/003.jpg was changed while it was packed"):
        pack(root, tmp_path / "a.h5", size=SIZE, encoding="jpeg")
    assert os.listdir(tmp_path) == ["images"]


def test_check_prints_the_table_and_finds_flipped_bits(folder, tmp_path, capsys):
    path = tmp_path / "a.h5"
    made = pack(folder, path, size=SIZE, encoding="jpeg")
    assert command(["pack", "--check", str(path)]) == 0
    out = capsys.readouterr().out
    assert "17 x 13 pixels, 3 channels, stretched from JPEG files of" in out
    assert "all checksums agree" in out and made.uuid in out and "72" in out
    whole = path.read_bytes()
    for split in made.splits:
        for kind, column in made.columns(split).items():
            if kind == "offsets":
                continue  # refused before checksums are compared; see below
            place = column.offset + column.row_bytes * (column.rows // 2)
            path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
            assert command(["pack", "--check", str(path)]) == 1
            assert f"{split}/{kind}: {'bytes' if kind == 'bytes' else 'rows'} 0 to" in (
                capsys.readouterr().err
            )
    column = made.columns("train")["offsets"]
    place = column.offset + 8 * 31
    path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
    assert len(verify(read_pack(path))) == 1  # one byte more or less is still in order
    path.write_bytes(whole)
    assert verify(read_pack(path)) == []


def test_the_uuid_covers_all_that_is_stored():
    sums = [np.array([1, 2]), np.array([3]), np.array([4])]
    given = ((5, 4, 3), ("a", "b"), {"train": (7, sums)}, "stretch")
    changed = [
        ((4, 5, 3), *given[1:]),
        (given[0], ("b", "a"), *given[2:]),
        (*given[:3], "crop"),
        (*given[:3], ""),
        (*given[:2], {"train": (8, sums)}, "stretch"),
    ]
    for i in range(3):
        other = [s + (j == i) for j, s in enumerate(sums)]
        changed.append((*given[:2], {"train": (7, other)}, "stretch"))
    identities = {content_uuid(*arguments) for arguments in (given, *changed)}
    assert len(identities) == 1 + len(changed)


@pytest.mark.parametrize("hashed", [1, 3, 7, 1 << 16])
def test_the_uuid_does_not_depend_on_the_pieces_that_are_hashed(monkeypatch, hashed):
    monkeypatch.setattr("hpctrain.data.pack_format.HASHED", hashed)
    sums = [np.arange(7, dtype="<u4") * 99, np.array([3], "<u4")]
    splits = {"test": (1, sums[1:] * 2), "train": (7, sums)}
    text = json.dumps(
        [
            *("hpctrain-pack", 1, [5, 4, 3], ["a", "\u00e9"]),
            ["train", 7, *(each.tolist() for each in sums)],
            ["test", 1, [3], [3]],
        ]
    )
    found = content_uuid((5, 4, 3), ("a", "\u00e9"), splits)
    assert found == str(uuid.uuid5(uuid.NAMESPACE_OID, text))
