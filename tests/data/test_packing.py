"""From image files to a pack by the command: sizes, channels, duplicates, bad files, crashes."""

import os
import re
import resource
import shutil
import signal
import socket
import sys

import h5py
import numpy as np
import pytest

from tests.support.api import command_line
from tests.support.launch import Job, marked, run
from tests.support.pictures import (
    arrays,
    class_folders,
    command_words,
    counts,
    encode,
    facts,
    file_names,
    make_pack,
    picture,
    placed,
    tar,
    zipped,
)
from tests.support.wait import wait_for

CLASSES = {"a": 43, "b": 37, "c": 21}  # 101 images


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return class_folders(tmp_path_factory.mktemp("source") / "images", CLASSES)


def test_channels_are_those_of_the_images_or_of_the_setting(folder, tmp_path):
    gray = class_folders(tmp_path / "gray", {"a": 9, "b": 9}, channels=1)
    assert arrays(make_pack(gray, tmp_path / "1.h5"))[0].shape[1:] == (11, 13, 1)
    assert arrays(make_pack(gray, tmp_path / "2.h5", channels=3))[0].shape[1:] == (11, 13, 3)
    assert arrays(make_pack(folder, tmp_path / "3.h5", channels=1))[0].shape[1:] == (11, 13, 1)
    (gray / "b" / "zzz.png").write_bytes(encode(picture(99)))  # the last one has colour
    assert arrays(make_pack(gray, tmp_path / "4.h5"))[0].shape[1:] == (11, 13, 3)


@pytest.mark.parametrize("jobs", [1, 3])
def test_sizes_that_differ_are_refused_wherever_they_are(tmp_path, refusal, jobs):
    """Far behind the first; and beside a first that has a header but cannot be decoded."""
    far = class_folders(tmp_path / "far", {"a": 300, "b": 3})
    class_folders(far / "c", {"x": 2}, width=17)
    said = refusal(far, tmp_path / "a.h5", jobs=jobs)
    assert "a/000.png" in said and "13x11" in said and "c/x/000.png" in said and "17x11" in said
    near = class_folders(tmp_path / "near", {"a": 40})
    (near / "a" / "000.png").write_bytes((near / "a" / "000.png").read_bytes()[:50])
    (near / "a" / "001.png").write_bytes(encode(picture(1, 19, 11)))
    assert "a/001.png" in refusal(near, tmp_path / "a.h5", jobs=jobs)
    path = make_pack(far, tmp_path / "a.h5", size="13x11", split="1")
    assert counts(path) == {"train": [300, 3, 2]}


def test_too_little_room_is_seen_before_any_work(folder, tmp_path, refusal, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=10**5)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    assert "free" in refusal(folder, tmp_path / "a.h5", 1, size="100x100")


def test_a_file_is_replaced_only_if_it_is_a_pack_and_overwrite_is_given(folder, tmp_path, refusal):
    output = tmp_path / "a.h5"
    output.write_text("precious")
    assert "--overwrite" in refusal(folder, output)
    assert "not a pack" in refusal(folder, output, overwrite=True)
    assert output.read_text() == "precious"
    h5py.File(output, "w").close()  # of another program
    assert "not a pack" in refusal(folder, output, overwrite=True)
    output.unlink()
    for _ in range(2):
        make_pack(folder, output, overwrite=True)
    before = output.read_bytes()
    refusal(folder, output)
    refusal(tmp_path / "none", output, overwrite=True)
    assert output.read_bytes() == before


def test_the_pack_is_named_after_its_source(folder, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    assert command_line(["pack", str(folder), "--jobs", "2", "--split", "0.8,0.1,0.1"]) == 0
    assert command_line(["pack", "--check", "images.h5"]) == 0
    shown = capfd.readouterr().out
    assert all(name in shown for name in ("images.h5", "validation", "101"))


def test_check_names_what_is_corrupt(folder, tmp_path, capfd):
    path = make_pack(folder, tmp_path / "a.h5", split="1")
    with h5py.File(path, "r+", locking=False) as file:
        file["train/images"][7] ^= 1
        file["train/targets"][3] = 99
    capfd.readouterr()
    assert command_line(["pack", "--check", str(path)]) == 1
    said = capfd.readouterr()
    assert "sample 7 of split 'train'" in said.err and "label is 99" in said.err
    assert "2 corrupt" in said.err and not said.out
    with h5py.File(path, "r+", locking=False) as file:
        file["train/images"][10:40] ^= 1
    assert command_line(["pack", "--check", str(path)]) == 1
    said = capfd.readouterr().err.splitlines()
    assert said[10] == "corrupt: 22 more" and "32 corrupt" in said[11] and len(said) == 12


def test_a_source_that_cannot_be_read_is_not_an_output_that_cannot_be_written(tmp_path, refusal):
    """The memory of this process is a regular file whose first page cannot be read."""
    assert "/proc/self/mem cannot be read" in refusal("/proc/self/mem", tmp_path / "a.h5")


def test_equal_files_stay_in_one_split_and_are_reported(tmp_path, capfd):
    root = class_folders(tmp_path / "images", {"a": 40, "b": 40})
    for name in ("a/twin.png", "b/twin.png"):
        shutil.copy(root / "a/003.png", root / name)
    for seed in range(5):
        path = make_pack(root, tmp_path / "a.h5", seed=seed, split="0.5,0.5", overwrite=True)
        assert "a/003.png = a/twin.png = b/twin.png" in capfd.readouterr().err
        assert counts(path) == {"train": [21, 21], "test": [20, 20]}
        images = [arrays(path, name)[0] for name in ("train", "test")]
        assert sum((of == picture(3)).all((1, 2, 3)).any() for of in images) == 1
        assert facts(path)["provenance"]["duplicates"]["groups"] == 1


def test_equal_files_of_several_classes_are_named_first(tmp_path, capfd):
    root = class_folders(tmp_path / "images", {"a": 20, "b": 20})
    for number in range(12):
        shutil.copy(root / f"a/{number:03}.png", root / f"b/x{number:03}.png")
    shutil.copy(root / "b/000.png", root / "b/y.png")
    make_pack(root, tmp_path / "a.h5", split="0.5,0.5")
    said = capfd.readouterr().err.splitlines()
    first = next(number for number, line in enumerate(said) if "contradictory labels" in line)
    assert "12 groups of equal files in several classes: a/000.png = b/x000.png;" in said[first]
    assert said[first].endswith("; and 7 more groups") and said[first].count(" = ") == 5
    assert "26 files in 13 groups are equal" in said[first + 1]


def test_bitmaps_with_equal_ends_stay_distinct(tmp_path):
    """Files of equal size are compared by all their bytes."""
    (tmp_path / "images" / "a").mkdir(parents=True)
    for number in range(1000):
        pixels = np.zeros((64, 64), np.uint8)
        pixels[-1, :2] = divmod(number, 256)  # the last line is the first of a bitmap
        (tmp_path / "images" / "a" / f"{number:03}.bmp").write_bytes(encode(pixels, "BMP"))
    path = make_pack(tmp_path / "images", tmp_path / "a.h5", split="0.5,0.5")
    assert facts(path)["provenance"]["duplicates"]["groups"] == 0
    assert counts(path) == {"train": [500], "test": [500]}


@pytest.mark.parametrize("make", [lambda path, root: root, tar, zipped])
def test_a_sample_keeps_the_name_of_its_file(tmp_path, make):
    second = "æ€" if make is zipped else "\udcff"  # no UTF-8
    root = class_folders(tmp_path / "images", {"a": 20, second: 20})
    files = {encode(picture(n)): n for n in range(40)}
    expected = {files[f.read_bytes()]: str(f.relative_to(root)) for f in root.rglob("*.png")}
    source = make(tmp_path / "x", root)
    path = make_pack(source, tmp_path / "a.h5", split="0.5,0.5")
    known, found = {picture(n).tobytes(): n for n in range(40)}, {}
    for split in ("train", "test"):
        names = file_names(path, split)
        numbers = [known[image.tobytes()] for image in arrays(path, split)[0]]
        found |= dict(zip(numbers, names, strict=True))
    assert found == expected
    other = make_pack(source, tmp_path / "b.h5", split="0.5,0.5", no_names=True)
    with h5py.File(path) as one, h5py.File(other) as two:
        assert "names" not in two["train"] and "name_offsets" not in two["train"]
        assert one["identity"][:].tobytes() == two["identity"][:].tobytes()


def test_copies_of_test_images_are_left_out_of_train(tmp_path):
    root = tmp_path / "images"
    class_folders(root / "train", {"a": 9, "b": 9})
    (root / "test" / "a").mkdir(parents=True)
    for name in ("003.png", "004.png"):
        shutil.copy(root / "train" / "a" / name, root / "test" / "a" / name)
    path = make_pack(root, tmp_path / "a.h5")
    assert counts(path) == {"train": [7, 9], "test": [2, 0]}
    assert {n for n, (split, _) in placed(path).items() if split == "test"} == {3, 4}


@pytest.mark.parametrize("jobs", [1, 2])
def test_unreadable_files_are_listed_and_refused_unless_skipped(tmp_path, refusal, capfd, jobs):
    root = class_folders(tmp_path / "images", {"a": 23, "b": 23})
    whole = encode(picture(1), "JPEG")
    bad = ["a/half.jpg", "a/notes.txt", "b/empty.png", "b/[red]\x1b[2J.png"]
    for name, data in zip(bad, (whole[: len(whole) // 2], b"hello", b"", b""), strict=True):
        (root / name).write_bytes(data)
    (root / "b" / ".hidden").write_text("ignored")
    assert refusal(root, tmp_path / "a.h5", jobs=jobs).startswith("hpctrain: 4 of 50 files")
    path = make_pack(root, tmp_path / "a.h5", jobs=jobs, skip_bad=True)
    said = capfd.readouterr().err
    assert all(name in said for name in bad[:3]) and "\x1b" not in said  # no terminal command
    assert sum(map(sum, counts(path).values())) == 46
    skipped = facts(path)["provenance"]["skipped"]
    assert skipped["files"] == 4 and skipped["names"][0] == "a/half.jpg"
    for number in range(20):
        (root / "a" / f"{number}.txt").write_text("hello")
    make_pack(root, tmp_path / "a.h5", jobs=jobs, skip_bad=True, overwrite=True)
    named = [x for x in capfd.readouterr().err.splitlines() if x.startswith("unreadable: ")]
    assert len(named) == 11 and named[-1] == "unreadable: 14 more"


def test_a_source_without_a_readable_image_is_refused(tmp_path, refusal):
    (tmp_path / "images" / "a").mkdir(parents=True)
    (tmp_path / "images" / "a" / "x.txt").write_text("hello")
    for settings in ({}, {"size": "9x9", "channels": 3, "skip_bad": True, "split": "1"}):
        assert "none of its 1 file can be packed" in refusal(tmp_path / "images", **settings)


def test_splits_of_the_source_are_kept_and_validation_is_drawn_if_asked(tmp_path):
    root = tmp_path / "images"
    class_folders(root / "train", {"a": 40, "b": 40})
    class_folders(root / "test", {"a": 10, "b": 10}, width=17)
    made = make_pack(root, tmp_path / "a.h5", size="13x11")
    drawn = make_pack(root, tmp_path / "b.h5", size="13x11", split="0.6,0.2,0.2", jobs=2)
    assert counts(drawn) == {"train": [30, 30], "validation": [10, 10], "test": [10, 10]}
    assert np.array_equal(arrays(drawn, "test")[0], arrays(made, "test")[0])
    assert facts(drawn)["provenance"]["split_by"] == "folders"


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_full_disk_is_one_line_and_leaves_nothing(folder, tmp_path, refusal, jobs):
    """The limit of a process on file sizes stands in for the disk: the workers inherit it."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        assert "nothing is kept" in refusal(folder, tmp_path / "a.h5", 1, jobs=jobs)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_disk_that_is_full_at_the_last_byte_is_one_line(folder, tmp_path):
    """HDF5, which writes it, must not crash at exit."""
    blocks = (make_pack(folder, tmp_path / "a.h5").stat().st_size - 1) // 1024
    words = [sys.executable, "-m", "hpctrain", *command_words(folder, tmp_path / "b.h5")]
    done = run(["bash", "-c", f'ulimit -f {blocks}; "$@"', "", *words])
    assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
    assert "nothing is kept" in done.stderr and os.listdir(tmp_path) == ["a.h5"]


# Workers that die, and packing that is killed


def change_workers(monkeypatch, folder, change):
    """Let worker processes run this code when they start."""
    lines = "".join(f"    {line}\n" for line in change.splitlines())
    condition = "import os, sys\nif '--multiprocessing-fork' in sys.orig_argv:\n"
    (folder / "site").mkdir()
    (folder / "site" / "sitecustomize.py").write_text(condition + lines)
    path = f"{folder}/site:{os.environ.get('PYTHONPATH', '')}"
    monkeypatch.setitem(os.environ, "PYTHONPATH", path)


OPENED = """
from PIL import Image
opened = Image.open
def changed(file, **options):
    image = opened(file, **options)
    {change}
    return image
Image.open = changed
"""
CRASH = OPENED.format(change="if image.size == (13, 12): os.kill(os.getpid(), 11)")
HANG = OPENED.format(
    change="import time; image.load = lambda: time.sleep(999 * open("
    "f\"{os.environ['HPCTRAIN_TEST']}/begun.{os.getpid()}\", 'w').write('1'))"
)


def test_an_image_that_crashes_its_decoder_ends_packing_in_one_line(tmp_path, monkeypatch, refusal):
    root = class_folders(tmp_path / "images", {"a": 43, "b": 47})
    (root / "b" / "hostile.png").write_bytes(encode(picture(1, 13, 12)))
    change_workers(monkeypatch, tmp_path, CRASH)
    (tmp_path / "out").mkdir()
    said = refusal(root, tmp_path / "out" / "a.h5", 1, jobs=2, size="7x5", channels=3)
    assert "worker process" in said and "--jobs 1" in said


def test_one_job_shows_where_a_decoder_crashes(folder, tmp_path):
    code = "import os, sys; from PIL import Image; from hpctrain.cli import main\n"
    code += "Image.open = lambda *of, **how: os.kill(os.getpid(), 11)\nmain(sys.argv[1:])"
    words = command_words(folder, tmp_path / "a.h5")
    done = run([sys.executable, "-c", code, *words], timeout=110)
    assert done.returncode == -signal.SIGSEGV
    assert "Segmentation fault" in done.stderr and "formats.py" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_packing_that_is_killed_leaves_no_pack_and_no_process(tmp_path, monkeypatch, number):
    """Even if its workers hang in an image. The next one removes what is left."""
    change_workers(monkeypatch, tmp_path, HANG)
    root = class_folders(tmp_path / "images", {"a": 20, "b": 20})
    output = tmp_path / "out" / "a.h5"
    output.parent.mkdir()
    words = command_words(root, output, jobs=2, size="500x500", channels=3)
    packing = Job([sys.executable, "-m", "hpctrain", *words], {"HPCTRAIN_TEST": str(tmp_path)})
    wait_for(lambda: len([*tmp_path.glob("begun.*")]) == 2)
    os.killpg(packing.pid, number) if number == signal.SIGINT else packing.send_signal(number)
    said = packing.communicate(timeout=90)[1]
    assert packing.returncode not in (0, 2) and "Traceback" not in said
    left = os.listdir(output.parent)
    assert not left or (number != signal.SIGINT and re.fullmatch(r"\.a\.h5\..*\.tmp", *left))
    wait_for(lambda: not marked(packing.mark))
    elsewhere = [name.replace(socket.gethostname(), "elsewhere") for name in left]
    for name in elsewhere:  # of a host where it may still be written
        (output.parent / name).touch()
    make_pack(class_folders(tmp_path / "few", {"a": 2}), output, split="1")
    assert sorted(os.listdir(output.parent)) == sorted([*elsewhere, "a.h5"])
