import gzip
import io
import os
import struct
import tarfile
import zipfile

import numpy as np
import pytest

from hpctrain.data.packing import scratch
from hpctrain.data.packing.layout import arrange
from hpctrain.data.packing.sources import open_source
from hpctrain.errors import UsageError
from tests.data.pictures import class_folders, encode, idx, picture, tar, zipped


def listed(path, scratch):
    with open_source(path, scratch) as source:
        return source


def refusal(path, scratch):
    with pytest.raises(UsageError) as caught:
        listed(path, scratch)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_folders_become_classes():
    files = ["b/2.png", "b/10.png", "a/x/1.png", "README", "a/.hidden", ".git/config", "top.jpg"]
    layout = arrange([*files, "b/Thumbs.db", "__MACOSX/b/1.png"], ["a", "a/x", "b"], "here")
    assert layout.classes == ("a", "b")
    assert layout.places == [("a/x/1.png", 0, ""), ("b/10.png", 1, ""), ("b/2.png", 1, "")]
    assert layout.ignored == 1  # top.jpg


def test_a_single_top_folder_is_seen_through():
    files = ["photos/v1/a/1.png", "photos/v1/b/1.png", "photos/LICENSE.txt", "note.txt"]
    layout = arrange(files, [], "here")
    assert layout.classes == ("a", "b")
    assert [place.name for place in layout.places] == files[:2]
    assert arrange(["a/1.png", "a/2.png"], [], "here").classes == ("a",)


def test_split_folders():
    files = ["Train/a/1.png", "Train/b/1.png", "val/a/2.png", "test/b/3.png", "test/b/x/4.png"]
    places = arrange([f"top/{file}" for file in files], [], "here").places
    assert [(place.split, place.label) for place in sorted(places, key=lambda p: p.name)] == [
        ("train", 0),
        ("train", 1),
        ("test", 1),
        ("test", 1),
        ("validation", 0),
    ]
    # without train, or with another folder beside them, they are classes like any other
    assert arrange(["val/a/1.png", "test/a/1.png"], [], "here").classes == ("test", "val")
    assert arrange(["train/a/1.png", "cats/a/1.png"], [], "here").classes == ("cats", "train")
    with pytest.raises(UsageError, match="1 of 2 class folders of here hold no file.* c;"):
        arrange(["train/a/1.png", "test/c/1.png"], [], "here")


def test_sources_without_classes_are_refused(tmp_path):
    (tmp_path / "flat").mkdir()
    (tmp_path / "flat" / "1.png").write_bytes(b"")
    assert "flat holds 1 files but no class folders" in refusal(tmp_path / "flat", tmp_path)
    (tmp_path / "void").mkdir()
    assert "void holds 0 files" in refusal(tmp_path / "void", tmp_path)
    root = class_folders(tmp_path / "images", {"a": 2, "b": 1})
    (root / "empty").mkdir()
    assert "1 of 3 class folders" in refusal(root, tmp_path)
    assert "does not exist" in refusal(tmp_path / "none", tmp_path)
    (tmp_path / "a.txt").write_text("hello")
    assert "is no .tgz, .tar, .zip, idx or .npz file" in refusal(tmp_path / "a.txt", tmp_path)


def test_links_are_followed_and_loops_and_pipes_are_not(tmp_path):
    root = class_folders(tmp_path / "images", {"a": 2, "b": 1})
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "9.png").write_bytes(encode(picture(9)))
    (root / "c").symlink_to(tmp_path / "elsewhere")
    (root / "a" / "loop").symlink_to(root / "a")
    (root / "a" / "broken.png").symlink_to(root / "none")
    os.mkfifo(root / "a" / "pipe.png")
    source = listed(root, tmp_path)
    assert source.classes == ("a", "b", "c")
    assert [item.name for item in source.items] == [
        "a/000.png",
        "a/001.png",
        "b/000.png",
        "c/9.png",
    ]
    assert sorted(source.bad) == [
        ("a/broken.png", "a link to nothing"),
        ("a/pipe.png", "no regular file"),
    ]


def test_archives_list_as_their_folder(tmp_path):
    root = class_folders(tmp_path / "images", {"a": 3, "b": 2})
    (root / "README").write_text("ignored")
    (root / "a" / ".DS_Store").write_text("ignored")
    expected = [(item.name, item.label) for item in listed(root, tmp_path).items]
    archives = [
        tar(tmp_path / "1.tgz", root),
        tar(tmp_path / "2.tar.gz", root, "top"),
        tar(tmp_path / "3.tar", root, "top", "w"),
        zipped(tmp_path / "4.zip", root),
        zipped(tmp_path / "5.zip", root, "top/"),
    ]
    for path in archives:
        source = listed(path, tmp_path)
        names = [(item.name.removeprefix("top/"), item.label) for item in source.items]
        assert names == expected, path
        assert source.classes == ("a", "b") and not source.bad


def tar_of(path, *members):
    """A tar of (name, kind, link) with a picture in every regular file, two good ones first."""
    with tarfile.open(path, "w:gz") as archive:
        for name, kind, link in [("a/1.png", "file", ""), ("b/1.png", "file", ""), *members]:
            info = tarfile.TarInfo(name)
            info.linkname = link
            info.type = {
                "file": tarfile.REGTYPE,
                "soft": tarfile.SYMTYPE,
                "hard": tarfile.LNKTYPE,
                "device": tarfile.CHRTYPE,
            }[kind]
            data = encode(picture(len(name))) if kind == "file" else b""
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


@pytest.mark.parametrize("name", ["/etc/passwd", "../../x/1.png", "a/../../1.png"])
def test_archives_that_lead_outside_are_refused(tmp_path, name):
    text = refusal(tar_of(tmp_path / "x.tgz", (name, "file", "")), tmp_path)
    assert "names a file outside of itself" in text and name in text
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        archive.writestr("a/1.png", b"")
        archive.writestr(name, b"")
    assert "names a file outside of itself" in refusal(tmp_path / "x.zip", tmp_path)


def test_links_and_devices_in_archives(tmp_path):
    path = tar_of(
        tmp_path / "x.tgz",
        ("a/2.png", "hard", "b/1.png"),
        ("a/3.png", "soft", "../b/1.png"),
        ("a/4.png", "soft", "/etc/passwd"),
        ("a/5.png", "soft", "../../../etc/passwd"),
        ("a/6.png", "device", ""),
        ("a/7.png", "soft", "7.png"),
    )
    source = listed(path, tmp_path)
    where = {item.name: item.offset for item in source.items}
    assert where["a/2.png"] == where["a/3.png"] == where["b/1.png"] != where["a/1.png"]
    assert dict(source.bad) == {
        "a/4.png": "a link out of the archive",
        "a/5.png": "a link out of the archive",
        "a/6.png": "no regular file",
        "a/7.png": "a link out of the archive",
    }
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        archive.writestr("a/1.png", b"")
        link = zipfile.ZipInfo("a/2.png")
        link.external_attr = 0o120777 << 16
        archive.writestr(link, "/etc/passwd")
    assert listed(tmp_path / "x.zip", tmp_path).bad == [("a/2.png", "no regular file")]


def test_a_later_member_replaces_an_earlier_one(tmp_path):
    path = tar_of(tmp_path / "x.tgz", ("./a/1.png", "file", ""))
    items = {item.name: item.offset for item in listed(path, tmp_path).items}
    assert items["a/1.png"] > items["b/1.png"]


def test_damaged_archives(tmp_path):
    root = class_folders(tmp_path / "images", {"a": 3, "b": 2}, width=97)
    whole = tar(tmp_path / "x.tgz", root).read_bytes()
    (tmp_path / "half.tgz").write_bytes(whole[: len(whole) // 2])
    assert "cut short or damaged" in refusal(tmp_path / "half.tgz", tmp_path)
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 255
    (tmp_path / "flip.tgz").write_bytes(flipped)
    assert "cut short or damaged" in refusal(tmp_path / "flip.tgz", tmp_path)
    plain = tar(tmp_path / "x.tar", root, mode="w").read_bytes()
    end = plain.rindex(b"IEND")
    (tmp_path / "half.tar").write_bytes(plain[: end - 100])
    assert "half.tar" in refusal(tmp_path / "half.tar", tmp_path)
    data = zipped(tmp_path / "x.zip", root).read_bytes()
    (tmp_path / "half.zip").write_bytes(data[: len(data) // 2])
    assert "no whole zip" in refusal(tmp_path / "half.zip", tmp_path)
    (tmp_path / "x.gz").write_bytes(gzip.compress(b"no tar at all"))
    assert "no whole tar" in refusal(tmp_path / "x.gz", tmp_path)


def test_a_gzip_bomb_is_refused(tmp_path, monkeypatch):
    (tmp_path / "bomb.tgz").write_bytes(gzip.compress(bytes(10**7)))
    monkeypatch.setattr(scratch, "SPARE", 0)
    assert "200 times its size: 2,097,152 are refused" in refusal(tmp_path / "bomb.tgz", tmp_path)


def mnist(folder, count=7, zipped_too=""):
    folder.mkdir()
    for part, first in (("train", 0), ("t10k", 100)):
        images = np.stack([picture(first + i, 5, 3, 1)[..., 0] for i in range(count)])
        idx(folder / f"{part}-images-idx3-ubyte{zipped_too}", images)
        idx(folder / f"{part}-labels-idx1-ubyte{zipped_too}", np.arange(count) % 3)
    return folder


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_idx_folders_and_files(tmp_path, suffix):
    folder = mnist(tmp_path / "mnist", 7, suffix)
    source = listed(folder, tmp_path)
    assert (source.kind, source.shape, source.classes) == ("pixels", (3, 5, 1), ("0", "1", "2"))
    assert [item.split for item in source.items] == ["train"] * 7 + ["test"] * 7
    assert [item.label for item in source.items] == [0, 1, 2, 0, 1, 2, 0] * 2
    one = listed(folder / f"t10k-images-idx3-ubyte{suffix}", tmp_path)
    assert [item.split for item in one.items] == ["test"] * 7


def test_idx_mistakes(tmp_path):
    folder = mnist(tmp_path / "mnist")
    images = folder / "train-images-idx3-ubyte"
    data = images.read_bytes()
    images.write_bytes(data[:-1])
    assert "says 105 bytes of pixels but has 104" in refusal(folder, tmp_path)
    (folder / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(data + b"x"))
    images.unlink()
    assert "105 bytes of pixels but has more" in refusal(folder, tmp_path)
    (folder / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(data)[:-9])
    assert "cut short or damaged" in refusal(folder, tmp_path)
    (folder / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(data))
    idx(folder / "train-labels-idx1-ubyte", np.arange(6))
    assert "has 7 images but 6 labels" in refusal(folder, tmp_path)
    (folder / "train-labels-idx1-ubyte").write_bytes(struct.pack(">HBBI", 0, 8, 1, 2**32 - 1))
    assert "has 7 images but 4,294,967,295 labels" in refusal(folder, tmp_path)  # and reads none
    (folder / "train-labels-idx1-ubyte").write_bytes(bytes([0, 0, 8, 0, 1]))
    assert "labels-idx1-ubyte has 0 dimensions, not 1" in refusal(folder, tmp_path)
    (folder / "train-labels-idx1-ubyte").unlink()
    assert "has no labels beside it" in refusal(folder, tmp_path)
    idx(folder / "train-labels-idx1-ubyte", np.arange(7))
    idx(folder / "letters-train-images-idx3-ubyte", np.zeros((2, 3, 5)))
    idx(folder / "letters-train-labels-idx1-ubyte", np.arange(2))
    assert "several idx sets" in refusal(folder, tmp_path)


def pixels_of(path, scratch):
    with open_source(path, scratch) as source:
        rows = [
            os.pread(source.files[item.slot].fileno(), item.size, item.offset)
            for item in source.items
        ]
        shape = (len(rows), *source.shape)
        return source, np.frombuffer(b"".join(rows), np.uint8).reshape(shape)


def test_npz(tmp_path):
    images = np.stack([picture(i, 5, 3) for i in range(7)])
    labels = np.array([5, 9, 5, 9, 9, 5, 9])
    path = tmp_path / "x.npz"
    np.savez_compressed(path, images=images, labels=labels)
    source, pixels = pixels_of(path, tmp_path)
    assert (pixels == images).all() and source.classes == ("5", "9")
    assert [item.label for item in source.items] == [0, 1, 0, 1, 1, 0, 1]
    np.savez(path, images=np.asfortranarray(images), labels=labels[:, None])
    assert (pixels_of(path, tmp_path)[1] == images).all()
    np.savez(path, images=images, labels=np.array(["cat", "dog"])[labels // 9])
    assert listed(path, tmp_path).classes == ("cat", "dog")
    np.savez(path, images=images, labels=labels // 9, classes=np.array(["x", "y", "z"]))
    assert listed(path, tmp_path).classes == ("x", "y", "z")
    np.savez(path, x_train=images, y_train=labels, x_test=images[:2], y_test=labels[:2])
    splits = [item.split for item in listed(path, tmp_path).items]
    assert splits == ["train"] * 7 + ["test"] * 2


def test_npz_mistakes(tmp_path):
    path = tmp_path / "x.npz"
    images, labels = np.zeros((7, 3, 5), np.uint8), np.arange(7)
    np.savez(path, pictures=images)
    assert "holds pictures; known are images and labels" in refusal(path, tmp_path)
    np.savez(path, images=images / 255, labels=labels)
    assert "is float64, not uint8" in refusal(path, tmp_path)
    np.savez(path, images=images, labels=labels[:6])
    assert "has 7 images but 6 labels" in refusal(path, tmp_path)
    np.savez(path, images=np.zeros((7, 3, 5, 4), np.uint8), labels=labels)
    assert "has shape (7, 3, 5, 4): expected" in refusal(path, tmp_path)
    np.savez(path, images=images, labels=np.eye(7))
    assert "labels is float64 of shape (7, 7)" in refusal(path, tmp_path)
    np.savez(path, images=images, labels=labels, classes=np.array(["a", "b"]))
    assert "labels are not numbers 0 to 1" in refusal(path, tmp_path)
    np.savez(path, images=images, labels=labels, classes=np.array(["a", "b", *"cdefgha"]))
    assert "two classes have the name 'a'" in refusal(path, tmp_path)
    np.savez(path, images=np.array([{}], object), labels=labels[:1])  # would be unpickled
    assert "is object, not uint8" in refusal(path, tmp_path)
    np.savez(path, x_train=images, y_train=labels, x_test=images[:, :2], y_test=labels)
    assert "images of several shapes" in refusal(path, tmp_path)
    np.savez(path, images=images, labels=labels)
    data = bytearray(path.read_bytes())
    data[data.index(b"NUMPY") + 140] ^= 1  # in the pixels
    path.write_bytes(data)
    assert "no whole .npz file" in refusal(path, tmp_path)
    renamed = bytearray(data)
    renamed[26:28] = b"\xff\x00"  # 255 bytes of header and pixels are the member's name
    path.write_bytes(renamed)
    said = refusal(path, tmp_path)
    assert "no whole .npz file: File name in directory" in said and len(said) < 400
    path.write_bytes(data[:-60])
    assert "no whole .npz file" in refusal(path, tmp_path)


@pytest.mark.parametrize("value", [0, 64, 255])
def test_every_byte_of_the_directory_of_an_npz(tmp_path, value):
    """Offsets in it may lead before the beginning of the file, where nothing can seek."""
    path = tmp_path / "x.npz"
    np.savez(path, images=np.zeros((7, 3, 5), np.uint8), labels=np.arange(7))
    whole = path.read_bytes()
    for place in range(whole.index(b"PK\1\2"), len(whole)):
        path.write_bytes(whole[:place] + bytes([value]) + whole[place + 1 :])
        try:
            listed(path, tmp_path)
        except UsageError as error:
            assert "x.npz" in str(error)
