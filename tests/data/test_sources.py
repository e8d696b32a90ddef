"""Which images and classes a source has: folders, .tar, .tgz and .zip."""

import gzip
import io
import os
import socket
import struct
import tarfile
import unicodedata
import warnings
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
    "a folder of images in each class": {"train/a/images/1.png": "a", "train/b/images/1.png": "b"},
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
        ("train2017", "val2017", "test-2017"),
        ("seg_train", "seg_val", "seg_test"),
        ("training_set/training_set", "Dev/dev", "test_set"),
        ("train/images", "val/images", "test/images"),
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
        ["train/1.png", "val/2.png"],
        ["trainset/1.png", "testset/2.png"],
        ["train/a/1.png", "test/2.png"],
        ["train/train/1.png", "test/test/2.png"],
        ["pets/train/a/1.png", "pets/test/a/2.png", "docs/1.png"],
        ["a/train/1.png", "a/test/2.png", "b/train/x/3.png"],
        ["images/1.png", "labels/1.txt"],
        ["JPEGImages/1.png", "SegmentationClass/1.png"],
        ["train2017/1.png", "annotations/1.json", "val2017/2.png"],
        ["train/images/1.png", "train/labels/1.txt", "test/images/1.png"],
        ["1_train/a/1.png", "2_val/b/1.png"],
    ],
)
def test_folders_that_are_no_classes_are_refused_by_name(tmp_path, refusal, files):
    said = refusal(tree(tmp_path / "images", files), split="1")
    assert "--manifest" in said and all(name.split("/")[0] in said for name in files[:2])


def test_what_has_no_label_stands_beside_splits(tmp_path, capfd):
    files = {
        "seg_train/seg_train/sea/1.png": ("train", "sea"),
        "seg_test/seg_test/sea/2.png": ("test", "sea"),
        "seg_pred/seg_pred/3.png": None,
    }
    assert classes_of(tree(tmp_path / "images", files), files) == files
    assert "class folders: 1 file (seg_pred/seg_pred/3.png)" in capfd.readouterr().err
    files |= {"seg_training/lake/4.png": ("train", "lake")}
    assert classes_of(tree(tmp_path / "images", files), files) == files
    said = capfd.readouterr().err
    assert "joined as one split: 2 folders (seg_train/seg_train, seg_training)" in said


def test_a_source_of_one_class_is_said(tmp_path, capfd):
    make_pack(tree(tmp_path / "images", ["train/cat.1.png"]), tmp_path / "a.h5", split="1")
    said = capfd.readouterr().err
    assert "all images are of one class, train" in said
    assert "named like splits, but taken as classes: train\n" in said


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
    assert "outside of class folders: 1 file (beside.png)\n" in capfd.readouterr().err


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
    assert placed(path).keys() == {0, 1} and skipped(path) == ["a/4.png"]
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


# Names: of systems, in any encoding, of numbers


SYSTEM = [
    *("__MACOSX/b/._1.png", ".DS_Store", "a/.ipynb_checkpoints/1-checkpoint.png", "a/@eaDir/1.png"),
    *("$Recycle.Bin/a/1.png", "System Volume Information/1.png", "b/THUMBS.DB", "a/Desktop.ini"),
    *("#RECYCLE/x", "lost+found/1.png", ".Trash-1000/a/1.png", "@Recycle/1.png"),
    *("b/__pycache__/x.pyc", "b/1.png:Zone.Identifier"),
    *("b/Thumbs.db:encryptable", "b/1.png@SynoEAStream", "LOST.DIR/1"),
]
ANY_ARCHIVE = {
    "folder": lambda path, root: root,
    "tar": lambda path, root: tar(path, root, mode="w"),
    "zip": zipped,
}


@pytest.mark.parametrize("kind", ANY_ARCHIVE)
def test_what_systems_leave_behind_is_counted_and_left_out(tmp_path, capfd, kind):
    files = [
        "a/1.png",
        "b/2.png",
        *(name.replace("_V", " V").replace("_I", " I") for name in SYSTEM),
    ]
    source = ANY_ARCHIVE[kind](tmp_path / "x", tree(tmp_path / "images", files))
    found = placed(make_pack(source, tmp_path / "a.h5", split="1"))
    assert found == {0: ("train", "a"), 1: ("train", "b")}
    note = f"left out, hidden or of the system: {len(SYSTEM)} names (#RECYCLE, $Recycle.Bin, "
    assert note in (said := capfd.readouterr().err) and "and 7 more" in said


def test_folders_of_numbers_are_classes_in_the_order_of_numbers(tmp_path):
    names = {"1": 0, "2": 1, "10": 2, "-3": 3}
    root = tree(tmp_path / "images", [f"{name}/x.png" for name in names])
    assert facts(make_pack(root, tmp_path / "a.h5", split="1"))["classes"] == ["-3", "1", "2", "10"]
    tree(root, ["b/x.png"])
    found = facts(make_pack(root, tmp_path / "b.h5", split="1"))["classes"]
    assert found == ["-3", "1", "10", "2", "b"]
    rows = [f"{name}/x.png,{number % 3 * 5}.0\n" for name, number in names.items()]
    (root / "x.csv").write_text("path,label\n" + "".join(rows))
    found = facts(make_pack(root / "x.csv", tmp_path / "c.h5", split="1"))["classes"]
    assert found == ["0.0", "5.0", "10.0"]


def both_forms(text):
    return [unicodedata.normalize(form, text) for form in ("NFC", "NFD")]


@pytest.mark.parametrize("kind", ANY_ARCHIVE)
def test_equal_names_in_two_normalizations_are_one_class(tmp_path, capfd, kind):
    classes = [*both_forms("é"), "Cat", "cat", "7", "07"]
    names = [f"{name}/{number}.png" for number, name in enumerate(classes)]
    source = ANY_ARCHIVE[kind](tmp_path / "x", tree(tmp_path / "images", names))
    path = make_pack(source, tmp_path / "a.h5", split="1")
    expected = dict(enumerate(["é", "é", *classes[2:]]))
    assert {n: of[1] for n, of in placed(path).items()} == expected
    said = capfd.readouterr().err
    assert "one class: é\n" in said and "of their own: '07', '7', 'Cat', 'cat'\n" in said


def rename_members(path, names):
    """Replace names of a .zip by bytes of equal lengths, without a flag that says what they are."""
    data = path.read_bytes()
    for before, after in names.items():
        assert len(before) == len(after) and data.count(before.encode()) == 2
        data = data.replace(before.encode(), after)
    path.write_bytes(data)
    return path


def test_names_in_a_zip_are_utf8_if_they_can_be_and_back_slashes_separate(tmp_path, capfd):
    names = {
        "top/a/1234.png": "top\\é\\234.png".encode(),
        "top/a/123.png": b"top/\x82/x23.png",  # é of code page 437
        "top/b/1.png": b"C:\\top\\b\\12",
    }
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        for number, name in enumerate([*names, "top/b/2.png", "top/b/5.png"]):
            member = zipfile.ZipInfo(name)
            if number == 4:  # as of WinZip: the name in UTF-8 is an extra field
                more = "top/猫/5.png".encode()
                member.extra = struct.pack("<HHBI", 0x7075, 5 + len(more), 1, 0) + more
            archive.writestr(member, encode(picture(number)))
    path = rename_members(tmp_path / "x.zip", names)
    found = placed(make_pack(path, tmp_path / "a.h5", split="1"))
    assert {n: of[1] for n, of in found.items()} == {
        **dict.fromkeys((0, 1), "é"),
        **dict.fromkeys((2, 3), "b"),
        4: "猫",
    }
    said = capfd.readouterr().err
    assert "code page 437: 1 file (top/é/x23.png)" in said
    assert r"are read as UTF-8: 1 file (top\é\234.png)" in said


def test_what_a_listing_merges_or_leaves_out_is_said(tmp_path, capfd):
    files = [f"{n:02}.png" for n in range(12)] + ["a/old/x.png", "a/1.png", "b/1.png"]
    root = tree(tmp_path / "images", files)
    archive = tmp_path / "x.zip"
    with zipfile.ZipFile(archive, "w") as file, warnings.catch_warnings(action="ignore"):
        for name in [*files, "b/1.png"]:
            file.write(root / name, name)
    make_pack(archive, tmp_path / "a.h5", split="1")
    said = capfd.readouterr().err
    assert "outside of class folders: 12 files (00.png, " in said and "09.png and 2 more)" in said
    assert "in a class folder belong to that class: 1 folder (a/old)" in said
    assert "the last is taken: 1 file (b/1.png)" in said


# Archives of other kinds, and files that are none


@pytest.mark.parametrize("kind", ["bz2", "xz"])
def test_a_tar_compressed_otherwise_is_packed(tmp_path, kind):
    root = class_folders(tmp_path / "images", {"a": 3, "b": 2})
    path = make_pack(tar(tmp_path / "x", root, mode=f"w:{kind}"), tmp_path / "a.h5", split="1")
    assert counts(path) == {"train": [3, 2]}


def test_a_hard_link_in_a_tar_is_its_file(tmp_path):
    root = tree(tmp_path / "images", ["a/1.png", "b/2.png"])
    os.link(root / "b/2.png", root / "b/3.png")
    path = make_pack(tar(tmp_path / "x.tar", root, "./top", mode="w"), tmp_path / "a.h5", split="1")
    assert counts(path) == {"train": [1, 2]}


def test_what_is_no_archive_that_can_be_read_is_named(tmp_path, refusal):
    root = class_folders(tmp_path / "images", {"a": 3, "b": 2})
    one = tar(tmp_path / "one.tar", root, mode="w")
    files = {
        "x.7z": (b"7z\xbc\xaf\x27\x1c0000", "a .7z archive: unpack it"),
        "x.tar.zst": (b"\x28\xb5\x2f\xfd000", "Zstandard: unpack it"),
        "x.rar": (b"Rar!\x1a\x07\0", "a .rar archive: unpack it"),
        "x.h5": (b"\x89HDF\r\n\x1a\n", "--data"),
        "x.npy": (b"\x93NUMPY\1\0", "write_pack"),
        "two.tar": (one.read_bytes() * 2, "--ignore-zeros"),
        "zero.iso": (bytes(40_000) + b"CD001", "none of them"),
        "x.zip.001": (zipped(tmp_path / "x.zip", root).read_bytes()[:500], "join its parts"),
    }
    for name, (data, text) in files.items():
        (tmp_path / name).write_bytes(data)
        said = refusal(tmp_path / name, split="1")
        assert name in said and text in said
    with tarfile.open(tmp_path / "nested.tar", "w") as archive:
        archive.add(one, "n01.tar")
    assert "(n01.tar)" in (said := refusal(tmp_path / "nested.tar", split="1")) and "unpack" in said
    with zipfile.ZipFile(tmp_path / "x.npz", "w") as archive:
        archive.writestr("x.npy", b"")
    assert "write_pack" in refusal(tmp_path / "x.npz")
    with zipfile.ZipFile(tmp_path / "x.xlsx", "w") as archive:
        archive.writestr("[Content_Types].xml", b"")
        archive.writestr("xl/workbook.xml", b"")
    assert "CSV" in refusal(tmp_path / "x.xlsx")
    os.mkfifo(tmp_path / "pipe")
    for name in (tmp_path / "pipe", "/dev/zero"):
        assert "not a regular file" in refusal(name, split="1")


def test_what_is_no_regular_file_is_unreadable(tmp_path, capfd):
    """A device would be read without end; in a folder as in a table."""
    names = ["a/zero.png", "a/socket.png", "a/pipe.png", "b/folder.png", "b/empty.png"]
    root = tree(tmp_path / "images", ["a/1.png", "b/2.png"])
    (root / "a/zero.png").symlink_to("/dev/zero")
    os.mkfifo(root / "a/pipe.png")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.path.relpath(root / "a/socket.png"))
    (root / "b/folder.png").mkdir()
    (root / "b/empty.png").touch()
    rows = "".join(f"{name},{name[0]}\n" for name in ["a/1.png", "b/2.png", *names])
    (tmp_path / "labels.csv").write_text(f"path,label\n{rows}")
    for number, manifest in enumerate([{}, {"manifest": tmp_path / "labels.csv"}]):
        path = make_pack(root, tmp_path / f"{number}.h5", split="1", skip_bad=True, **manifest)
        expected = sorted(name for name in names if manifest or name != "b/folder.png")
        assert skipped(path) == expected and placed(path).keys() == {0, 1}
        said = capfd.readouterr().err
        assert "a/zero.png: not a regular file" in said and "b/empty.png: an empty file" in said


def test_links_that_contain_each_other_end(tmp_path, capfd):
    root = tree(tmp_path / "images", ["a/1.png", "b/2.png"])
    (root / "a/x").symlink_to(root / "b")
    (root / "b/y").symlink_to(root / "a")
    (root / "whole").symlink_to(root)
    make_pack(root, tmp_path / "a.h5", split="1")
    said = capfd.readouterr().err
    assert "contains them: 3 links (a/x/y/, b/y/x/, whole/)" in said


# Tables


TABLE = "path,label\n{}\n{}\n"


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-be", "utf-32"])
def test_a_table_with_a_byte_order_mark_is_read(tmp_path, encoding):
    tree(tmp_path, ["1.png", "2.png"])
    mark = "\ufeff" * encoding.endswith("be")
    text = mark + TABLE.format("1.png,château", "2.png,öl").replace(",", "\t").replace("\n", "\r\n")
    (tmp_path / "Labels.TXT").write_bytes(text.encode(encoding))
    path = make_pack(tmp_path / "Labels.TXT", tmp_path / "a.h5", split="1")
    assert facts(path)["classes"] == ["château", "öl"]


def test_a_table_that_is_not_utf8_is_refused_unless_its_files_are_named_so(tmp_path, refusal):
    for line, rows in {2: ("1.png,château", "2.png,b"), 3: ("1.png,a", "é.png,b")}.items():
        (tmp_path / "x.csv").write_bytes(TABLE.format(*rows).encode("latin-1"))
        assert f"line {line} is not UTF-8" in refusal(tmp_path / "x.csv", split="1")
    (tmp_path / "x.csv").write_bytes(TABLE.format("1.png,a", "2.png,b").encode("utf-16-le"))
    assert "x.csv is not UTF-8" in refusal(tmp_path / "x.csv", split="1")
    tree(tmp_path, ["1.png", "\udce9.png"])  # é in Latin-1
    (tmp_path / "x.csv").write_bytes(TABLE.format("1.png,a", "é.png,b").encode("latin-1"))
    assert counts(make_pack(tmp_path / "x.csv", tmp_path / "a.h5", split="1")) == {"train": [1, 1]}


@pytest.mark.parametrize("kind", ANY_ARCHIVE)
def test_a_table_names_files_with_back_slashes_or_other_accents(tmp_path, refusal, capfd, kind):
    composed, decomposed = both_forms("é/à")
    files = [f"{composed}/0.png", f"{decomposed}/1.png", "x/2.png", f"{both_forms('ö')[1]}/3.png"]
    rows = [
        (f"{decomposed}/0.png", "b"),
        (f"{composed}/1.png".replace("/", "\\"), both_forms("ä")[0]),
        (".\\x\\2.png", both_forms("ä")[1] + " "),
        ("ö/3.png", "b"),
    ]
    if kind == "tar":
        rows[0] = (files[0], "b")
    root = tree(tmp_path / "images", files)
    table = tmp_path / "labels.tsv"
    table.write_text("sep=|\npath|label\n" + "".join(f"{a}|{b}\n" for a, b in rows) + "|\n")
    source = ANY_ARCHIVE[kind](tmp_path / "x", root)
    path = make_pack(source, tmp_path / "a.h5", manifest=table, split="1")
    assert {n: of[1] for n, of in placed(path).items()} == {0: "b", 1: "ä", 2: "ä", 3: "b"}
    assert "are one class: ä\n" in capfd.readouterr().err
    table.write_text("path,label\nx/2.png,a\nx\\2.png,b\n")
    assert "line 3 names x/2.png, as line 2" in refusal(source, manifest=table)


@pytest.mark.parametrize("name", ["LABELS.CSV", "labels.tsv", "train.txt", "labels"])
def test_a_table_of_any_name_is_a_source(tmp_path, name):
    tree(tmp_path, ["1.png", "2.png"])
    (tmp_path / name).write_text(TABLE.format("1.png,a", "2.png,b"))
    assert counts(make_pack(tmp_path / name, tmp_path / "a.h5", split="1")) == {"train": [1, 1]}
