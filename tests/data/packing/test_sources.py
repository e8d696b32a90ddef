import gzip
import io
import os
import tarfile
import zipfile

import numpy as np
import pytest

from hpctrain.data.packing.layout import folder_by_folder, read_class_folders
from hpctrain.data.packing.sources import open_source
from hpctrain.errors import UsageError
from tests.data.pictures import class_folders, encode, picture, tar, zipped


def listed(path, folder):
    with open_source(path, folder) as source:
        return source


def rows(source, *columns):
    """(name, ...) of every image."""
    facts = (source.images[column].tolist() for column in columns)
    return list(zip(source.names, *facts, strict=True))


def names(source):
    return [name for (name,) in rows(source)]


def refusal(path, folder):
    with pytest.raises(UsageError) as caught:
        listed(path, folder)
    text = str(caught.value)
    assert "\n" not in text
    return text


def class_folders_of(files, folders=()):
    return read_class_folders(files, folder_by_folder(files), folders, "here")


def arranged(files, folders=()):
    """Classes, and (name, label, split) of every image."""
    found = class_folders_of(files, folders)
    facts = (found.labels.tolist(), found.splits.tolist())
    return found.classes, list(zip([files[i] for i in found.order], *facts, strict=True))


def test_folders_become_classes():
    files = ["b/2.png", "b/10.png", "a/x/1.png", "README", "a/.hidden", ".git/config", "top.jpg"]
    files += ["b/Thumbs.db", "__MACOSX/b/1.png", "a.b/1.png"]
    classes, images = arranged(files, ["a", "a/x", "b"])
    assert classes == ("a", "a.b", "b")
    assert images == [
        ("a/x/1.png", 0, -1),
        ("a.b/1.png", 1, -1),
        ("b/10.png", 2, -1),
        ("b/2.png", 2, -1),
    ]
    assert class_folders_of(files).ignored == 1  # top.jpg


def test_names_are_sorted_folder_by_folder_and_the_last_of_equal_ones_counts():
    given = ["a.b/1", "a/2", "b", "a/1", "a/c/1", "a/2", "a b/1", "é/1", "a/1.png", "\udcff"]
    order = [given[row] for row in folder_by_folder(given)]
    assert order == ["a/1", "a/1.png", "a/2", "a/c/1", "a b/1", "a.b/1", "b", "é/1", "\udcff"]
    assert 5 in folder_by_folder(given) and len(folder_by_folder([])) == 0


def test_a_single_top_folder_is_skipped():
    files = ["photos/v1/a/1.png", "photos/v1/b/1.png", "photos/LICENSE.txt", "note.txt"]
    classes, images = arranged(files)
    assert classes == ("a", "b")
    assert [name for name, *_ in images] == files[:2]
    assert arranged(["a/1.png", "a/2.png"])[0] == ("a",)


@pytest.mark.parametrize(
    ("train", "validation", "test"),
    [
        ("Train", "val", "test"),
        ("training_data", "validation", "testing_data"),
        ("train-set", "dev", "TESTING"),
        ("train images", "valid", "testset"),
    ],
)
def test_split_folders(train, validation, test):
    files = [f"{train}/a/1.png", f"{train}/b/1.png", f"{validation}/a/2.png"]
    files += [f"{test}/b/3.png", f"{test}/b/x/4.png"]
    classes, images = arranged([f"top/{file}" for file in files])
    assert classes == ("a", "b")
    found = {name: (label, split) for name, label, split in images}
    expected = [(0, 0), (1, 0), (0, 1), (1, 2), (1, 2)]
    assert [found[f"top/{file}"] for file in files] == expected
    with pytest.raises(UsageError, match="1 of 2 class folders of here hold no file.* c;"):
        arranged([f"{train}/a/1.png", f"{test}/c/1.png"])


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (["val/a/1.png", "test/b/1.png"], "folders of splits (test, val) but none for training"),
        (["train/a/1.png", "cats/b/1.png"], "folders of splits (train) but others beside them (ca"),
        (["train/a/1.png", "labels/1.txt"], "folders of splits (train) but others beside them (la"),
        (
            ["x1/a/1.png", "x1/b/1.png", "x2/a/1.png", "x2/b/1.png"],
            "all folders of here (x1, x2) h",
        ),
    ],
)
def test_what_looks_like_splits_is_no_class(files, words):
    with pytest.raises(UsageError) as caught:
        arranged(files)
    assert words in str(caught.value) and "a table (--manifest)" in str(caught.value)


def test_subfolders_that_differ_belong_to_their_class():
    classes, images = arranged(["cats/2019/1.png", "dogs/2019/1.png", "dogs/2020/1.png"])
    assert classes == ("cats", "dogs") and {split for *_, split in images} == {-1}
    assert arranged(["bus/1.png", "car/1.png", "train/1.png"])[0] == ("bus", "car", "train")


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
    assert "is no .tgz, .tar, .zip or .csv file" in refusal(tmp_path / "a.txt", tmp_path)
    np.savez(tmp_path / "a.npz", x=np.zeros(3))
    assert "arrays are packed by hpctrain.write_pack" in refusal(tmp_path / "a.npz", tmp_path)


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
    assert names(source) == [
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
    expected = rows(listed(root, tmp_path), "label")
    archives = [
        tar(tmp_path / "1.tgz", root),
        tar(tmp_path / "2.tar.gz", root, "top"),
        tar(tmp_path / "3.tar", root, "top", "w"),
        zipped(tmp_path / "4.zip", root),
        zipped(tmp_path / "5.zip", root, "top/"),
    ]
    for path in archives:
        source = listed(path, tmp_path)
        found = [(name.removeprefix("top/"), n) for name, n in rows(source, "label")]
        assert found == expected, path
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


def test_links_and_devices_in_archives_are_no_images(tmp_path):
    path = tar_of(
        tmp_path / "x.tgz",
        ("a/2.png", "hard", "b/1.png"),
        ("a/3.png", "soft", "../b/1.png"),
        ("a/4.png", "device", ""),
    )
    source = listed(path, tmp_path)
    assert names(source) == ["a/1.png", "b/1.png"]
    assert source.bad == [(f"a/{number}.png", "no regular file") for number in (2, 3, 4)]
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        archive.writestr("a/1.png", b"")
        link = zipfile.ZipInfo("a/2.png")
        link.external_attr = 0o120777 << 16
        archive.writestr(link, "/etc/passwd")
    assert listed(tmp_path / "x.zip", tmp_path).bad == [("a/2.png", "no regular file")]


def test_a_later_member_replaces_an_earlier_one(tmp_path):
    path = tar_of(tmp_path / "x.tgz", ("./a/1.png", "file", ""))
    items = dict(rows(listed(path, tmp_path), "offset"))
    assert items["a/1.png"] > items["b/1.png"]


def test_damaged_archives(tmp_path):
    root = class_folders(tmp_path / "images", {"a": 3, "b": 2}, width=97)
    whole = tar(tmp_path / "x.tgz", root).read_bytes()
    (tmp_path / "half.tgz").write_bytes(whole[: len(whole) // 2])
    assert "cut short or corrupt" in refusal(tmp_path / "half.tgz", tmp_path)
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 255
    (tmp_path / "flip.tgz").write_bytes(flipped)
    assert "cut short or corrupt" in refusal(tmp_path / "flip.tgz", tmp_path)
    plain = tar(tmp_path / "x.tar", root, mode="w").read_bytes()
    end = plain.rindex(b"IEND")
    (tmp_path / "half.tar").write_bytes(plain[: end - 100])
    assert "half.tar" in refusal(tmp_path / "half.tar", tmp_path)
    data = zipped(tmp_path / "x.zip", root).read_bytes()
    (tmp_path / "half.zip").write_bytes(data[: len(data) // 2])
    assert "no whole zip" in refusal(tmp_path / "half.zip", tmp_path)
    (tmp_path / "x.gz").write_bytes(gzip.compress(b"no tar at all"))
    assert "no whole tar" in refusal(tmp_path / "x.gz", tmp_path)
