"""The memory that archives take, and members of a .zip, also damaged ones."""

from __future__ import annotations

import contextlib
import io
import tarfile
import tracemalloc
import zipfile

import numpy as np
import pytest
from PIL import Image

from hpctrain.config import PackConfig
from hpctrain.data.images import BadImage, Fit, as_jpeg, decode, probe
from hpctrain.data.pack import make_pack
from hpctrain.data.packing import decode as decoding
from hpctrain.data.packing.sources import open_source
from hpctrain.errors import UsageError
from tests.data.pictures import class_folders, encode, picture, zipped


def opened(path, folder):
    """What is listed of a source, and the bytes of memory that it took at most."""
    tracemalloc.start()
    try:
        with open_source(path, folder) as source:
            return source, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def read_image_bytes(source, row):
    with decoding.ImageReader(source) as reader:
        return reader.read(row)


def archive_of(path, count):
    """A .tar or .zip of so many empty members."""
    names = [f"set/class{i % 7}/image{i:07}.png" for i in range(count)]
    if path.suffix == ".tar":
        with open(path, "wb") as file:
            for name in names:
                file.write(tarfile.TarInfo(name).tobuf(tarfile.USTAR_FORMAT))
            file.write(bytes(1024))
        return path
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in names:
            archive.writestr(name, b"")
    return path


@pytest.mark.parametrize("suffix", [".tar", ".zip"])
def test_members_of_archives_take_little_memory(tmp_path, suffix):
    source, peak = opened(archive_of(tmp_path / f"a{suffix}", 10_007), tmp_path)
    assert len(source.images) == 10_007
    assert peak < 10_007 * (300 if suffix == ".tar" else 850)


def test_a_pack_takes_little_memory_per_image(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "hpctrain.data.packing.write.rows_per_block", lambda size: 16
    )  # small tasks
    monkeypatch.setattr(decoding, "decode", lambda data, fit: data)
    for count in (101, 20_011):  # the first time, modules are imported
        path = tmp_path / f"{count}.tar"
        with tarfile.open(path, "w") as archive:
            for number in range(count):
                member = tarfile.TarInfo(f"n{number % 7:08}/n{number % 7:08}_{number:06}.png")
                member.size = 16
                archive.addfile(member, io.BytesIO(number.to_bytes(16, "little")))
        config = PackConfig(source=str(path), output=f"{path}.h5", size="4x4", channels=1, jobs=1)
        tracemalloc.start()
        try:
            make_pack(config)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert peak < 350 * count


def test_members_of_a_zip_are_read_without_its_directory(tmp_path, monkeypatch):
    path = tmp_path / "a.zip"
    contents = {name: name.encode() * 101 for name in ("a/stored", "b/deflated")}
    with zipfile.ZipFile(path, "w") as archive:
        for name, kind in zip(contents, (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED), strict=True):
            archive.writestr(name, contents[name], kind)
    source, _ = opened(path, tmp_path)
    with monkeypatch.context() as patch:
        patch.delattr(decoding.zipfile, "ZipFile")
        for row in range(2):
            assert read_image_bytes(source, row) == contents[source.names[row]]
    for column, by, why in (("offset", 1, "not where"), ("crc32", 1, "size or CRC-32 differs")):
        for row in range(2):
            changed = source.take(np.array([row]))
            changed.images[column] += by
            with pytest.raises(BadImage, match=why):
                read_image_bytes(changed, 0)
    for row, why in ((0, "size or CRC-32 differs"), (1, "the archive is damaged: Error -3 while")):
        data = bytearray(path.read_bytes())
        start = source.images["offset"][row] + 30 + len(source.names[row])
        data[start : start + 9] = b"\xff" * 9
        (tmp_path / "damaged.zip").write_bytes(data)
        damaged, _ = opened(tmp_path / "damaged.zip", tmp_path)
        with pytest.raises(BadImage, match=why):
            read_image_bytes(damaged, row)


def test_members_of_a_zip_that_cannot_be_read_are_listed(tmp_path):
    path = tmp_path / "a.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/good", b"")
        archive.writestr("a/locked", b"")
        archive.writestr("b/good", b"")
        archive.writestr("b/other", b"")
    data = bytearray(path.read_bytes())
    for name, place, value in ((b"a/locked", 8, 1), (b"b/other", 10, zipfile.ZIP_LZMA)):
        data[data.rindex(name) - 46 + place] = value  # of its entry in the directory
    path.write_bytes(data)
    source, _ = opened(path, tmp_path)
    assert source.names == ["a/good", "b/good"]
    why = "encrypted, or not compressed by deflate"
    assert source.bad == [("a/locked", why), ("b/other", why)]


@pytest.mark.parametrize("value", [0, 64, 255])
def test_every_byte_of_the_directory_of_a_zip(tmp_path, value):
    """Sizes and offsets in it may be anything: an archive is refused, or its images are bad."""
    path = zipped(tmp_path / "x.zip", class_folders(tmp_path / "x", {"a": 2, "b": 1}))
    whole = path.read_bytes()
    source, _ = opened(path, tmp_path)
    images = {source.names[row]: read_image_bytes(source, row) for row in range(3)}
    for place in range(whole.index(b"PK\1\2"), len(whole)):
        path.write_bytes(whole[:place] + bytes([value]) + whole[place + 1 :])
        try:
            source, _ = opened(path, tmp_path)
        except UsageError as error:
            assert "x.zip" in str(error) and "\n" not in str(error)
            continue
        for row in range(len(source.images)):
            with contextlib.suppress(BadImage):
                assert read_image_bytes(source, row) in images.values()


def test_an_image_with_too_many_pixels_for_pillow_is_bad(monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 13 * 11 // 2 - 1)
    data = encode(picture(1))
    for read in (lambda: decode(data, Fit(5, 7, 3)), lambda: as_jpeg(data), lambda: probe(data)):
        with pytest.raises(
            BadImage, match=r"Image size \(143 pixels\) exceeds limit of 140 pixels"
        ):
            read()
