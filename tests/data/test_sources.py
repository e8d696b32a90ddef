"""Which images and classes a source has: folders, .tar, .tgz and .zip."""

import gzip
import io
import os
import tarfile
import zipfile

import pytest

from tests.support.pictures import (
    class_folders,
    counts,
    encode,
    facts,
    make_pack,
    picture,
    placed,
    tar,
    zipped,
)


def tree(root, names):
    """A folder with these files: the one at place i holds picture i."""
    for number, name in enumerate(names):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encode(picture(number)))
    return root


def classes_of(root, names, **settings):
    """The split and the class in which each file is packed; None for one that is not."""
    path = make_pack(root, root.with_suffix(".h5"), overwrite=True, **settings)
    found = placed(path)
    return {name: found.get(number) for number, name in enumerate(names)}


FOLDERS = {  # the files of a source, and the class of each; None = ignored
    "hidden files, files beside the classes, and subfolders": {
        **dict.fromkeys(["b/2.png", "b/10.png"], "b"),
        "a/x/1.png": "a",
        "a.b/1.png": "a.b",
        **dict.fromkeys(["README", "a/.hidden", ".git/config", "top.jpg", "b/Thumbs.db"]),
        "__MACOSX/b/1.png": None,
    },
    "a single top folder": {
        "photos/v1/a/1.png": "a",
        "photos/v1/b/1.png": "b",
        "photos/LICENSE.txt": None,
        "note.txt": None,
    },
    "names that are no UTF-8": {"\udcff/1.png": "\udcff", "é/\udcfe.png": "é"},
    "a single class": {"a/1.png": "a", "a/2.png": "a"},
    "subfolders that differ": {
        "cats/2019/1.png": "cats",
        "dogs/2019/1.png": "dogs",
        "dogs/2020/1.png": "dogs",
    },
    "a class of the name of a split": {
        "bus/1.png": "bus",
        "car/1.png": "car",
        "train/1.png": "train",
    },
}


@pytest.mark.parametrize("case", FOLDERS)
def test_every_folder_is_a_class_with_all_files_below_it(tmp_path, case):
    expected = FOLDERS[case]
    found = classes_of(tree(tmp_path / "images", expected), expected, split="1")
    assert {name: of and of[1] for name, of in found.items()} == expected


@pytest.mark.parametrize(
    "names",
    [
        ("Train", "val", "test"),
        ("training_data", "validation", "testing_data"),
        ("train-set", "dev", "TESTING"),
        ("train", "valid", "Test"),
    ],
)
def test_folders_of_the_names_of_splits_are_splits(tmp_path, refusal, names):
    train, validation, test = names
    files = {
        f"top/{train}/a/1.png": ("train", "a"),
        f"top/{train}/b/1.png": ("train", "b"),
        f"top/{validation}/a/2.png": ("validation", "a"),
        f"top/{test}/b/3.png": ("test", "b"),
        f"top/{test}/b/x/4.png": ("test", "b"),
    }
    root = tree(tmp_path / "images", files)
    assert classes_of(root, files) == files
    tree(root, [f"top/{test}/c/1.png"])  # no image of c to train on
    assert "c" in refusal(root)


@pytest.mark.parametrize(
    "files",
    [
        ["val/a/1.png", "test/b/1.png"],
        ["train/a/1.png", "cats/b/1.png"],
        ["train/a/1.png", "labels/1.txt"],
        ["x1/a/1.png", "x1/b/1.png", "x2/a/1.png", "x2/b/1.png"],
    ],
)
def test_folders_that_only_look_like_splits_are_no_classes(tmp_path, refusal, files):
    assert "--manifest" in refusal(tree(tmp_path / "images", files), split="1")


def test_sources_without_classes_are_refused(tmp_path, refusal):
    flat = tree(tmp_path / "flat", ["1.png"])
    assert str(flat) in refusal(flat)
    (tmp_path / "void").mkdir()
    assert "void" in refusal(tmp_path / "void")
    root = class_folders(tmp_path / "images", {"a": 2, "b": 1})
    (root / "empty").mkdir()
    assert "empty" in refusal(root)


def test_links_of_a_folder_are_followed_but_loops_are_not(tmp_path, capfd):
    names = ["a/0.png", "a/1.png", "b/2.png"]
    root = tree(tmp_path / "images", names)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "9.png").write_bytes(encode(picture(9)))
    (root / "c").symlink_to(tmp_path / "elsewhere")
    (root / "a" / "loop").symlink_to(root / "a")
    (root / "a" / "broken.png").symlink_to(root / "none")
    (root / "beside.png").write_bytes(encode(picture(8)))
    os.mkfifo(root / "a" / "pipe.png")  # nobody writes to it
    path = make_pack(root, tmp_path / "a.h5", split="1", skip_bad=True)
    assert {n: of[1] for n, of in placed(path).items()} == {0: "a", 1: "a", 2: "b", 9: "c"}
    assert skipped(path) == ["a/broken.png", "a/pipe.png"]
    assert "outside of class folders: 1 file\n" in capfd.readouterr().err


ARCHIVES = {
    "x.tar": lambda path, root: tar(path, root, mode="w"),
    "x.tgz": lambda path, root: tar(path, root),
    "x.tar.gz": lambda path, root: tar(path, root, "top"),
    "x": lambda path, root: zipped(path, root, "top/"),
}


@pytest.mark.parametrize("name", ARCHIVES)
def test_an_archive_is_packed_as_its_folder(tmp_path, name):
    """With several jobs as with one; nothing is unpacked beside it."""
    root = class_folders(tmp_path / "images", {"a": 30, "b": 20})
    (root / "README").write_text("ignored")
    (root / "a" / ".DS_Store").write_text("ignored")
    (root / "a" / "broken.png").write_bytes(b"")
    archive = ARCHIVES[name](tmp_path / name, root)
    found = placed(make_pack(archive, tmp_path / "a.h5", skip_bad=True, jobs=3))
    assert found == placed(make_pack(root, tmp_path / "b.h5", skip_bad=True)) and len(found) == 50
    assert sorted(os.listdir(tmp_path)) == sorted([name, "a.h5", "b.h5", "images"])


def tar_of(path, *members):
    """A tar of (name, type, link), with picture i in the regular file at place i."""
    with tarfile.open(path, "w:gz") as archive:
        for number, (name, kind, link) in enumerate(members):
            info = tarfile.TarInfo(name)
            info.linkname, info.type = link, kind
            data = encode(picture(number)) if kind == tarfile.REGTYPE else b""
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


def skipped(path):
    return facts(path)["provenance"]["skipped"]["names"]


def test_members_that_cannot_be_read_are_listed(tmp_path):
    file = tarfile.REGTYPE
    links = [("a/3.png", tarfile.LNKTYPE, "b/2.png"), ("a/4.png", tarfile.SYMTYPE, "../b/2.png")]
    source = tar_of(tmp_path / "x.tgz", ("a/1.png", file, ""), ("b/2.png", file, ""), *links)
    path = make_pack(source, tmp_path / "a.h5", split="1", skip_bad=True)
    assert placed(path).keys() == {0, 1} and skipped(path) == ["a/3.png", "a/4.png"]
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        for number, name in enumerate(["a/good", "a/locked", "b/good", "b/other"]):
            archive.writestr(name, encode(picture(number)))
        link = zipfile.ZipInfo("b/link")
        link.external_attr = 0o120777 << 16
        archive.writestr(link, "/etc/passwd")
    data = bytearray((tmp_path / "x.zip").read_bytes())
    for name, place, value in ((b"a/locked", 8, 1), (b"b/other", 10, zipfile.ZIP_LZMA)):
        data[data.rindex(name) - 46 + place] = value  # of its entry in the directory
    (tmp_path / "x.zip").write_bytes(data)
    path = make_pack(tmp_path / "x.zip", tmp_path / "b.h5", split="1", skip_bad=True)
    assert placed(path).keys() == {0, 2} and set(skipped(path)) == {"a/locked", "b/link", "b/other"}


def test_a_later_member_of_a_tar_replaces_an_earlier_one(tmp_path):
    names = ["a/1.png", "b/1.png", "./a/1.png"]
    source = tar_of(tmp_path / "x.tgz", *((name, tarfile.REGTYPE, "") for name in names))
    found = placed(make_pack(source, tmp_path / "a.h5", split="1"))
    assert found == {1: ("train", "b"), 2: ("train", "a")}


@pytest.mark.parametrize("kind", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_a_damaged_member_of_a_zip_is_listed(tmp_path, kind):
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        for number in range(5):
            archive.writestr(f"a/{number}.bmp", encode(picture(number), "BMP"), kind)
        start = archive.getinfo("a/3.bmp").header_offset
    data = bytearray((tmp_path / "x.zip").read_bytes())
    data[start + 100] ^= 1  # a pixel: the image could be decoded
    (tmp_path / "x.zip").write_bytes(data)
    path = make_pack(tmp_path / "x.zip", tmp_path / "a.h5", split="1", skip_bad=True)
    assert skipped(path) == ["a/3.bmp"] and counts(path) == {"train": [4]}


def test_damaged_archives_are_refused_by_name(tmp_path, refusal):
    root = class_folders(tmp_path / "images", {"a": 3, "b": 2}, width=97)
    whole = tar(tmp_path / "x.tgz", root).read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 255
    plain = tar(tmp_path / "x.tar", root, mode="w").read_bytes()
    packed = zipped(tmp_path / "x.zip", root).read_bytes()
    with tarfile.open(tmp_path / "x.tar") as archive:
        header = archive.getmembers()[3].offset
    damaged = {
        "three.tar": plain[:header],
        "header.tar": plain[: header + 100],
        "bit.tar": plain[:header] + b"\1" + plain[header + 1 :],
        "half.tgz": whole[: len(whole) // 2],
        "flip.tgz": flipped,
        "half.tar": plain[: plain.rindex(b"IEND") - 100],
        "half.zip": packed[: len(packed) // 2],
        "text.gz": gzip.compress(b"no tar at all"),
    }
    for name, data in damaged.items():
        (tmp_path / name).write_bytes(data)
        assert name in refusal(tmp_path / name, split="1")
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]
