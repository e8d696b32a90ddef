"""What a source says is compared with the limits before memory is taken: bombs are one line."""

from __future__ import annotations

import io
import re
import sys
import tarfile
import tracemalloc
import zipfile

import numpy as np
import pytest
from PIL import Image

from hpctrain.config import PackConfig
from hpctrain.data import images
from hpctrain.data.images import BadImage, Fit, decode, probe, read_image
from hpctrain.data.pack import make_pack
from hpctrain.data.packing import decode as decoding
from hpctrain.data.packing import scratch
from hpctrain.data.packing.sources import open_source
from hpctrain.errors import UsageError
from tests.launch import run

MB = 1 << 20


def opened(path, folder):
    """What is listed of a source, and the bytes of memory that it took at most."""
    tracemalloc.start()
    try:
        with open_source(path, folder) as source:
            return source, tracemalloc.get_traced_memory()[1]
    except UsageError as error:
        return str(error), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def read_image_bytes(source, row):
    with decoding.ImageReader(source) as reader:
        return reader.read(row)


def archive_of(path, count, size=0):
    """A .tar or .zip of so many members; the first image holds `size` zeros."""
    names = [f"set/class{i % 7}/image{i:07}.png" for i in range(count)]
    if path.suffix == ".tar":
        with open(path, "wb") as file:
            for name in names:
                file.write(tarfile.TarInfo(name).tobuf(tarfile.USTAR_FORMAT))
            file.write(bytes(1024))
        return path
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for number, name in enumerate(names):
            archive.writestr(name, b"" if number else bytes(size))
    return path


@pytest.mark.parametrize("suffix", [".tar", ".zip"])
def test_members_of_archives_are_few_enough_and_take_little_memory(tmp_path, suffix, monkeypatch):
    path = archive_of(tmp_path / f"a{suffix}", 10_007)
    source, peak = opened(path, tmp_path)
    assert len(source.images) == 10_007
    assert peak < 10_007 * (200 if suffix == ".tar" else 750)
    assert source.images.nbytes + len(source.names) < 10_007 * 90  # no object an image is kept
    monkeypatch.setattr(scratch, "MAX_IMAGES", 10_006)
    refused, peak = opened(path, tmp_path)
    assert refused.endswith("holds 10,007 images or members; the limit is 10,006: cut it")
    if suffix == ".zip":
        assert peak < 2 * MB  # before its directory is parsed
        monkeypatch.setattr(scratch, "DIRECTORY_LIMIT", 1009)
        refused, _ = opened(path, tmp_path)
        assert "bytes; the limit is 1,009" in refused


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
    assert peak < 200 * count


def test_a_member_that_grows_too_much_is_left_out_with_its_size(tmp_path):
    source, _ = opened(archive_of(tmp_path / "a.zip", 11, 48 * MB), tmp_path)
    assert len(source.images) == 10
    assert re.fullmatch(r"50,331,648 bytes; the limit is [\d,]+", source.bad[0][1])
    source, _ = opened(archive_of(tmp_path / "b.zip", 11, 8 * MB), tmp_path)
    assert (len(source.images), source.bad) == (11, [])


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
            assert read_image_bytes(source, row) == contents[source.name_of(row)]
    for column, by, why in (("offset", 1, "not where"), ("crc32", 1, "size or CRC-32 differs")):
        for row in range(2):
            changed = source.take(np.array([row]))
            changed.images[column] += by
            with pytest.raises(BadImage, match=why):
                read_image_bytes(changed, 0)
    for row, why in ((0, "size or CRC-32 differs"), (1, "the archive is damaged: Error -3 while")):
        data = bytearray(path.read_bytes())
        start = source.images["offset"][row] + 30 + len(source.name_of(row))
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
    assert [source.name_of(row) for row in range(len(source.images))] == ["a/good", "b/good"]
    why = "encrypted, or not compressed by deflate"
    assert source.bad == [("a/locked", why), ("b/other", why)]


PEAK = """
import sys
from hpctrain.data.images import BadImage, Fit, as_jpeg, decode, probe
from tests.launch import peak_memory
data = open(sys.argv[1], "rb").read()
before = peak_memory()
for action in (lambda: decode(data, Fit(31, 37, 3)), lambda: as_jpeg(data), lambda: probe(data)):
    try:
        action()
    except BadImage as error:
        print(error)
print((peak_memory() - before) // 1024)
"""


def test_an_image_bomb_is_refused_before_its_pixels_take_memory(tmp_path):
    picture = Image.new("P", (9001, 9007))
    picture.putpalette(bytes(range(256)) * 3)
    picture.save(tmp_path / "a.png", transparency=0)
    assert (tmp_path / "a.png").stat().st_size < MB
    done = run([sys.executable, "-W", "ignore", "-c", PEAK, str(tmp_path / "a.png")])
    *messages, peak = done.stdout.splitlines()
    assert messages == ["9,001 x 9,007 pixels; the limit is 67,108,864"] * 3, done.stderr
    assert int(peak) < 20


def test_the_limit_is_of_the_pixels_that_are_decoded(tmp_path, monkeypatch):
    file = io.BytesIO()
    Image.fromarray(np.zeros((301, 401, 3), np.uint8)).save(file, "JPEG")
    monkeypatch.setattr(images, "MAX_PIXELS", 401 * 301)
    decode(file.getvalue(), Fit(401, 301, 3, exact=True))
    monkeypatch.setattr(images, "MAX_PIXELS", 401 * 301 - 1)
    with pytest.raises(BadImage, match="401 x 301 pixels; the limit is 120,700"):
        decode(file.getvalue(), Fit(401, 301, 3, exact=True))
    decode(file.getvalue(), Fit(11, 13, 3))  # at 1/8 scale
    assert probe(file.getvalue()).width == 401
    (tmp_path / "a.jpg").write_bytes(file.getvalue())
    monkeypatch.setattr(images, "FILE_LIMIT", 1009)
    with pytest.raises(BadImage, match="more than 1,009 bytes"):
        read_image(str(tmp_path / "a.jpg"), (11, 13, 3))
