"""From files to a pack, through the same functions as the command."""

import errno
import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
import types

import h5py
import numpy as np
import pytest
from PIL import Image

from hpctrain.cli import main as command
from hpctrain.config import PackConfig
from hpctrain.data.pack import create_pack, write_pack
from hpctrain.data.packed import read_pack, verify
from hpctrain.data.packing import decode, write
from hpctrain.errors import RunError, UsageError
from tests.data.pictures import (
    all_rows,
    class_folders,
    contents,
    counts,
    encode,
    pack,
    picture,
    tar,
    zipped,
)
from tests.support.wait import wait_for

CLASSES = {"a": 43, "b": 37, "c": 21}  # 101 images


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return class_folders(tmp_path_factory.mktemp("source") / "images", CLASSES)


def refusal(source, output, **settings):
    with pytest.raises((UsageError, RunError)) as caught:
        pack(source, output, **settings)
    text = str(caught.value)
    assert "\n" not in text
    assert not os.path.exists(output)
    return text


def test_a_folder_becomes_a_pack(folder, tmp_path):
    made = pack(folder, tmp_path / "a.h5", split="0.8,0.1,0.1", seed=5)
    assert made.classes == ("a", "b", "c") and made.image_shape == (11, 13, 3)
    assert counts(made) == {"train": [35, 29, 17], "validation": [4, 4, 2], "test": [4, 4, 2]}
    number, expected = 0, set()
    for label, count in enumerate(CLASSES.values()):
        for _ in range(count):
            expected.add((label, picture(number).tobytes()))
            number += 1
    assert all_rows(made) == expected and len(expected) == 101
    assert made.provenance["source"] == "images" and made.provenance["seed"] == 5
    assert made.provenance["images"] == {"train": 81, "validation": 10, "test": 10}
    pixels = contents(made, "train")[0] / 255
    assert np.allclose(made.mean, pixels.mean(axis=(0, 1, 2)), rtol=1e-12)
    assert verify(made) == []


def test_the_file_is_plain_hdf5(folder, tmp_path):
    made = pack(folder, tmp_path / "a.h5")
    with h5py.File(made.path) as file:
        assert list(file) == ["test", "train"]
        assert (file["train/images"][:] == contents(made, "train")[0]).all()
        assert (file["train/labels"][:] == contents(made, "train")[1]).all()
        assert file["train/images"].chunks is None and file["train/images"].dtype == np.uint8
        assert file["train/images"].id.get_offset() % 4096 == 0
        assert file.attrs["classes"].tolist() == [b"a", b"b", b"c"]
        assert json.loads(file.attrs["provenance"])["duplicates"]["groups"] == 0


def test_equal_asks_give_equal_bytes(folder, tmp_path):
    first = pack(folder, tmp_path / "1.h5", jobs=1)
    time.sleep(1.1)  # HDF5 holds no time of day, which it would note in seconds
    pack(folder, tmp_path / "2.h5", jobs=3)
    assert (tmp_path / "1.h5").read_bytes() == (tmp_path / "2.h5").read_bytes()
    other = pack(folder, tmp_path / "3.h5", seed=1)
    assert other.uuid != first.uuid
    assert all_rows(other) == all_rows(first)
    assert (contents(other, "test")[0] != contents(first, "test")[0]).any()


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    """397 images of 97 per block, three of them equal, and three bad files."""
    root = tmp_path_factory.mktemp("source") / "mixture"
    class_folders(root, {"a": 211, "b": 184}, width=61, height=59)
    (root / "a" / "twin.png").write_bytes(encode(picture(3, 61, 59)))
    (root / "b" / "twin.bmp").write_bytes(encode(picture(3, 61, 59), "BMP"))
    (root / "a" / "000.txt").write_text("hello")
    (root / "b" / "zzz.png").write_bytes(b"")
    (root / "b" / "nothing.png").write_text("GIF89a")
    return root


@pytest.mark.parametrize("kind", ["folder", "tgz", "tar", "zip"])
@pytest.mark.parametrize("encoding", ["raw", "jpeg"])
def test_any_number_of_jobs_gives_equal_bytes_and_words(mixture, tmp_path, capfd, kind, encoding):
    source = {
        "folder": lambda: mixture,
        "tgz": lambda: tar(tmp_path / "x.tgz", mixture, "top"),
        "tar": lambda: tar(tmp_path / "x.tar", mixture, "top", "w"),
        "zip": lambda: zipped(tmp_path / "x.zip", mixture),
    }[kind]()
    said = []
    (tmp_path / "out").mkdir()
    for jobs in (1, 3):
        output = tmp_path / "out" / f"{jobs}.h5"
        settings = {"size": "32x32", "skip_bad": True, "split": "0.8,0.1,0.1", "jobs": jobs}
        made = pack(source, output, encoding=encoding, **settings)
        said.append(capfd.readouterr().err)
    assert said[0] == said[1]
    assert "3 of 400 files left out" in said[0] and "equal pixels (in different cl" in said[0]
    assert sum(split.samples for split in made.splits.values()) == 397 and verify(made) == []
    assert (tmp_path / "out/1.h5").read_bytes() == (tmp_path / "out/3.h5").read_bytes()
    assert sorted(os.listdir(tmp_path / "out")) == ["1.h5", "3.h5"]  # and nothing hidden


@pytest.mark.parametrize("make", [tar, zipped])
@pytest.mark.parametrize("jobs", [1, 2])
def test_archives_give_the_pack_of_their_folder(folder, tmp_path, make, jobs):
    path = make(tmp_path / "images", folder, "top/")
    made = pack(path, tmp_path / "a.h5", jobs=jobs)
    assert made.uuid == pack(folder, tmp_path / "b.h5").uuid
    assert sorted(os.listdir(tmp_path)) == ["a.h5", "b.h5", "images"]  # nothing was unpacked


def test_a_mixture_of_formats(tmp_path):
    for name in "ab":
        (tmp_path / "images" / name).mkdir(parents=True)
    colour, gray = Image.fromarray(picture(1)), Image.fromarray(picture(2, channels=1)[..., 0])
    for i in range(7):
        colour = Image.fromarray(picture(i))
        for j, (image, suffix) in enumerate(
            [
                (colour, "png"),
                (gray.rotate(i), "png"),
                (colour.quantize(8), "gif"),
                (colour.convert("CMYK"), "jpg"),
                (colour.convert("RGBA"), "webp"),
                (colour.resize((31, 17)), "bmp"),
                (gray.rotate(i).convert("I").point(lambda v: v * 257), "tiff"),
            ]
        ):
            image.save(tmp_path / "images" / "ab"[i % 2] / f"{i}{j}.{suffix}")
    made = pack(tmp_path / "images", tmp_path / "a.h5", size="13x11", split="0.5,0.5")
    assert made.image_shape == (11, 13, 3)
    rows = all_rows(made)
    assert (1, picture(3).tobytes()) in rows
    assert (0, np.repeat(np.asarray(gray)[..., None], 3, axis=2).tobytes()) in rows


def test_channels_follow_the_images_unless_asked(folder, tmp_path):
    gray = class_folders(tmp_path / "gray", {"a": 9, "b": 9}, channels=1)
    assert pack(gray, tmp_path / "1.h5").image_shape == (11, 13, 1)
    assert pack(gray, tmp_path / "2.h5", channels=3).image_shape == (11, 13, 3)
    assert pack(folder, tmp_path / "3.h5", channels=1).image_shape == (11, 13, 1)
    (gray / "b" / "zzz.png").write_bytes(encode(picture(99)))  # one picture of colour, the last
    assert pack(gray, tmp_path / "4.h5").image_shape == (11, 13, 3)


def test_sizes(folder, tmp_path):
    made = pack(folder, tmp_path / "1.h5", size="7x5")
    assert made.image_shape == (5, 7, 3)
    cropped = pack(folder, tmp_path / "2.h5", size="5x5", crop=True)
    stretched = pack(folder, tmp_path / "3.h5", size="5x5")
    assert cropped.uuid != stretched.uuid
    mixed = class_folders(tmp_path / "mixed", {"a": 3})
    class_folders(mixed / "b", {"x": 2}, width=17)
    text = refusal(mixed, tmp_path / "4.h5", jobs=1)
    assert "b/x/000.png 17x11: give one with --size, at most 13x11 to enlarge none" in text
    assert pack(mixed, tmp_path / "4.h5", size="13x11", split="1").splits["train"].samples == 5


@pytest.mark.parametrize("jobs", [1, 3])
def test_sizes_that_differ_are_found_anywhere(tmp_path, jobs):
    """Far behind the first; and beside a first that has a header but cannot be decoded."""
    far = class_folders(tmp_path / "far", {"a": 300, "b": 3})
    class_folders(far / "c", {"x": 2}, width=17)
    text = refusal(far, tmp_path / "a.h5", jobs=jobs)
    assert "a/000.png has 13x11 pixels and c/x/000.png 17x11" in text
    near = class_folders(tmp_path / "near", {"a": 40})
    (near / "a" / "000.png").write_bytes((near / "a" / "000.png").read_bytes()[:50])
    (near / "a" / "001.png").write_bytes(encode(picture(1, 19, 11)))
    text = refusal(near, tmp_path / "a.h5", jobs=jobs)
    assert "a/000.png has 13x11 pixels and a/001.png 19x11" in text


def test_wrong_settings_are_refused_before_any_work(folder, tmp_path):
    for settings, words in (
        ({"size": "100"}, "WIDTHxHEIGHT"),
        ({"size": "0x9"}, "1 to 16,384"),
        ({"size": "9x99999"}, "1 to 16,384"),
        ({"channels": 2}, "1 is gray, 3 is colour"),
        ({"crop": True}, "--crop cuts to a size"),
        ({"split": "0.9,0.2"}, "shares that sum to 1"),
        ({"jobs": 0}, "--jobs 0: give 1 or more"),
        ({"split": "0.999,0.001"}, "no image for test: there are 101 images"),
    ):
        assert words in refusal(folder, tmp_path / "a.h5", **settings)
    assert "no folder" in refusal(folder, tmp_path / "none" / "a.h5")
    assert "does not exist" in refusal(tmp_path / "none", tmp_path / "a.h5")
    with pytest.raises(UsageError, match="pack what"):
        create_pack(PackConfig())


def test_an_existing_pack_is_only_replaced_when_asked(folder, tmp_path):
    output = tmp_path / "a.h5"
    output.write_text("precious")
    with pytest.raises(UsageError, match="a.h5 exists: .* --overwrite"):
        pack(folder, output)
    with pytest.raises(UsageError, match="a.h5 is no pack: --overwrite replaces nothing else"):
        pack(folder, output, overwrite=True)
    assert output.read_text() == "precious"
    output.unlink()
    for _ in range(2):
        assert pack(folder, output, overwrite=True).splits["test"].samples == 10
    before = output.read_bytes()
    with pytest.raises(UsageError, match="there is no|does not exist"):
        pack(tmp_path / "none", output, overwrite=True)
    assert output.read_bytes() == before
    with pytest.raises(UsageError, match="is a folder"):
        pack(folder, tmp_path)


def test_equal_images_stay_in_one_split_and_are_reported(tmp_path, capfd):
    root = class_folders(tmp_path / "images", {"a": 40, "b": 40})
    (root / "a" / "twin.png").write_bytes(encode(picture(3)))
    (root / "b" / "twin.bmp").write_bytes(encode(picture(3), "BMP"))  # equal pixels, other file
    for seed in range(5):
        made = pack(root, tmp_path / "a.h5", seed=seed, split="0.5,0.5", overwrite=True)
        said = capfd.readouterr().err
        assert "equal pixels (in different classes): a/003.png = a/twin.png = b/twin.bmp" in said
        assert counts(made) == {"train": [21, 21], "test": [20, 20]}
        holders = [
            name
            for name in made.splits
            if (contents(made, name)[0] == picture(3)).all((1, 2, 3)).any()
        ]
        assert len(holders) == 1
        facts = {"groups": 1, "images": 3, "across_classes": 1, "left_out": 0}
        assert made.provenance["duplicates"] == facts
    (root / "a" / "twin.png").unlink()
    (root / "b" / "twin.bmp").unlink()
    assert pack(root, tmp_path / "b.h5").provenance["duplicates"]["groups"] == 0
    assert "equal" not in capfd.readouterr().err


@pytest.mark.parametrize("jobs", [1, 2])
def test_unreadable_files_are_listed_and_refused_unless_skipped(tmp_path, capfd, jobs):
    root = class_folders(tmp_path / "images", {"a": 23, "b": 23})
    whole = encode(picture(1), "JPEG")
    (root / "a" / "half.jpg").write_bytes(whole[: len(whole) // 2])
    (root / "a" / "notes.txt").write_text("hello")
    (root / "b" / "empty.png").write_bytes(b"")
    (root / "b" / "[red]\x1b[2J.png").write_bytes(b"")  # neither markup nor a terminal command
    (root / "b" / ".hidden").write_text("ignored")
    text = refusal(root, tmp_path / "a.h5", jobs=jobs)
    assert text.startswith("4 of 50 files cannot be read, they are listed above")
    said = capfd.readouterr().err
    for name in ("a/half.jpg", "a/notes.txt: not an image", "b/empty.png", r"b/[red]\x1b[2J.png"):
        assert f"unreadable: {name}" in said
    made = pack(root, tmp_path / "a.h5", jobs=jobs, skip_bad=True)
    assert sum(split.samples for split in made.splits.values()) == 46
    assert made.provenance["skipped"]["files"] == 4
    assert made.provenance["skipped"]["names"][0] == "a/half.jpg"
    assert "4 of 50 files left out" in capfd.readouterr().err


def test_nothing_readable_at_all(tmp_path):
    (tmp_path / "images" / "a").mkdir(parents=True)
    (tmp_path / "images" / "a" / "x.txt").write_text("hello")
    for settings in ({}, {"size": "9x9"}, {"size": "9x9", "channels": 3, "skip_bad": True}):
        assert "none of its 1 files" in refusal(tmp_path / "images", tmp_path / "a.h5", **settings)


def test_a_test_split_of_the_source_is_kept(tmp_path, capfd):
    root = tmp_path / "images"
    class_folders(root / "train", {"a": 40, "b": 40})
    class_folders(root / "test", {"a": 10, "b": 10}, width=17)
    made = pack(root, tmp_path / "a.h5", size="13x11")
    assert counts(made) == {"train": [40, 40], "test": [10, 10]}
    assert "which images are for testing" in capfd.readouterr().err
    drawn = pack(root, tmp_path / "b.h5", size="13x11", split="0.6,0.2,0.2", jobs=2)
    assert counts(drawn) == {"train": [30, 30], "validation": [10, 10], "test": [10, 10]}
    assert (contents(drawn, "test")[0] == contents(made, "test")[0]).all()
    assert drawn.provenance["split_by"] == "folders" and drawn.provenance["validation_drawn"]


def test_split_folders_are_kept(tmp_path):
    root = tmp_path / "images"
    class_folders(root / "train", {"a": 9, "b": 9})
    class_folders(root / "val", {"a": 2, "b": 3}, width=17)
    made = pack(root, tmp_path / "a.h5", size="13x11")
    assert counts(made) == {"train": [9, 9], "validation": [2, 3]}


def test_built_in_sets_by_name(folder, tmp_path, monkeypatch):
    """What is packed by name; how digits and flowers come about is tested with them."""
    images = np.stack([picture(i, 28, 28, 1) for i in range(20)])
    splits = {"train": (images, np.arange(20) % 2), "unseen": (images[:3], np.zeros(3, int))}
    made_of = splits, ("0", "1"), {"source": "digits"}
    flowers = types.ModuleType("flowers")
    flowers.fetch_archive = lambda cache_dir: tar(tmp_path / "flower_photos.tgz", folder, "top")
    monkeypatch.setattr(
        "hpctrain.data.pack.generate", lambda seed: (*made_of[:2], made_of[2] | {"seed": seed})
    )
    monkeypatch.setitem(sys.modules, "hpctrain.data.flowers", flowers)
    cache_dir = str(tmp_path / "data")
    path = create_pack(PackConfig(source="digits", cache_dir=cache_dir, seed=7))
    assert path == tmp_path / "data" / "digits.h5"
    made = read_pack(path)
    assert list(made.splits) == ["train", "unseen"] and made.provenance["seed"] == 7
    path = create_pack(PackConfig(source="flowers", cache_dir=cache_dir, jobs=1))
    assert path == tmp_path / "data" / "flowers.h5"
    assert read_pack(path).image_shape == (100, 100, 3)
    with pytest.raises(UsageError, match="--size does not apply to digits"):
        create_pack(PackConfig(source="digits", size="9x9", output=str(tmp_path / "a.h5")))


def test_the_command(folder, tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert command(["pack", str(folder), "--jobs", "2", "--split", "0.8,0.1,0.1"]) == 0
    shown = capfd.readouterr()
    assert "images.h5" in shown.out and "3 classes" in shown.out
    assert "101 images in" in shown.err
    assert command(["pack", "--check", "images.h5"]) == 0
    assert "all checksums agree" in capfd.readouterr().out
    assert command(["pack", str(folder)]) == 2
    assert "images.h5 exists" in capfd.readouterr().err
    assert command(["pack", str(folder), "--check", "images.h5"]) == 2
    assert command(["pack", "--check", "none.h5"]) == 2
    assert "cannot be opened: No such file" in capfd.readouterr().err


def test_many_classes_are_summed_up(tmp_path, capfd):
    labels = np.repeat(np.arange(50), 2)
    images = np.arange(100, dtype=np.uint8).reshape(100, 1, 1, 1)
    write_pack(tmp_path / "a.h5", {"train": (images, labels)}, [f"[{i}]" for i in range(50)])
    assert command(["pack", "--check", str(tmp_path / "a.h5")]) == 0
    shown = capfd.readouterr().out
    assert "50 classes" in shown and "smallest class" in shown and "[7]" not in shown


@pytest.mark.parametrize("where", [decode, write])
def test_a_full_disk_is_one_line_and_leaves_nothing(folder, tmp_path, monkeypatch, where):
    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(where, "write_at", full)
    assert "no room left" in refusal(folder, tmp_path / "a.h5")
    assert os.listdir(tmp_path) == []


def test_a_disk_that_is_really_full(folder, tmp_path):
    """The limit of a process on file sizes stands in for the disk: the workers inherit it."""

    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))

    for jobs in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-m", "hpctrain", "pack", folder, "--output", tmp_path / "a.h5"]
            + ["--jobs", jobs],
            capture_output=True,
            text=True,
            preexec_fn=limit,
        )
        assert done.returncode == 1, done.stderr
        assert done.stderr.startswith("hpctrain: no room left") and done.stderr.count("\n") == 1
        assert os.listdir(tmp_path) == []


def test_too_little_room_is_said_at_once(folder, tmp_path, monkeypatch):
    usage = type("Usage", (), {"free": 10**5})
    monkeypatch.setattr("hpctrain.data.packing.write.shutil.disk_usage", lambda path: usage)
    text = refusal(folder, tmp_path / "a.h5", size="100x100")
    assert "has 0 MiB free, packing needs 3 MiB" in text


def change_workers(monkeypatch, folder, change):
    """Let worker processes run this code when they start."""
    lines = [f"    {line}\n" for line in change.splitlines()]
    condition = "import hashlib, os, sys\nif '--multiprocessing-fork' in sys.orig_argv:\n"
    (folder / "sitecustomize.py").write_text(condition + "".join(lines))
    monkeypatch.setitem(os.environ, "PYTHONPATH", f"{folder}:{os.environ.get('PYTHONPATH', '')}")


WORKER_DIED = (
    "a worker process of pack died: --jobs 1 shows where; if memory ran out, use fewer --jobs"
)


def test_a_worker_that_dies_is_one_line(folder, tmp_path, monkeypatch):
    change_workers(monkeypatch, tmp_path, "os.kill(os.getpid(), 9)")
    assert refusal(folder, tmp_path / "a.h5", jobs=2) == WORKER_DIED


HOSTILE = """
from PIL import Image
opened = Image.open
def crash(file, **options):
    image = opened(file, **options)
    if image.size == (13, 12):
        os.kill(os.getpid(), 11)
    return image
Image.open = crash
"""


@pytest.mark.parametrize("encoding", ["raw", "jpeg"])
def test_an_image_that_crashes_the_decoder_is_one_line(tmp_path, monkeypatch, encoding):
    root = class_folders(tmp_path / "images", {"a": 43, "b": 47})
    (root / "b" / "hostile.png").write_bytes(encode(picture(1, 13, 12)))
    change_workers(monkeypatch, tmp_path, HOSTILE)
    text = refusal(root, tmp_path / "a.h5", jobs=2, size="7x5", channels=3, encoding=encoding)
    assert text == WORKER_DIED
    assert [name for name in os.listdir(tmp_path) if "h5" in name] == []


def test_one_job_shows_where_a_decoder_crashes(folder, tmp_path):
    code = "import os, sys; from PIL import Image; from hpctrain.cli import main\n"
    code += "Image.open = lambda *of, **how: os.kill(os.getpid(), 11)\nmain(sys.argv[1:])"
    words = ["pack", folder, "--jobs", "1", "--output", tmp_path / "a.h5"]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True)
    assert done.returncode == -signal.SIGSEGV
    assert "Segmentation fault" in done.stderr and "images.py" in done.stderr


def test_a_bug_in_a_worker_shows_its_traceback(folder, tmp_path, monkeypatch):
    change_workers(monkeypatch, tmp_path, "hashlib.blake2b = None")
    with pytest.raises(TypeError) as caught:
        pack(folder, tmp_path / "a.h5", jobs=2)
    assert "decode_rows" in str(caught.value.__cause__)


SLOW = """
from PIL import Image
import time
really_open = Image.open
def slow(*arguments, **options):
    open(os.environ["HPCTRAIN_TEST"] + "/begun", "w").close()
    time.sleep({seconds})
    return really_open(*arguments, **options)
Image.open = slow
"""


def processes_with(word):
    """Command lines of running processes that contain `word`."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/environ", "rb") as file:
                    found += [entry] * (word.encode() in file.read())
            except OSError:
                continue
    return found


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("hang", [False, True])
def test_a_pack_that_is_killed_leaves_no_pack(tmp_path, monkeypatch, number, hang):
    """Nor processes, even if they hang in an image."""
    change_workers(monkeypatch, tmp_path, SLOW.format(seconds=1000 if hang else 0.1))
    root = class_folders(tmp_path / "images", {"a": 1, "b": 1}, width=997, height=887)
    for i in range(300):
        (root / "b" / f"{i:03}x.png").hardlink_to(root / "b" / "000.png")
    output = tmp_path / "out" / "a.h5"
    output.parent.mkdir()
    mark = f"HPCTRAIN_TEST={tmp_path}"
    packing = subprocess.Popen(
        [sys.executable, "-m", "hpctrain", "pack", root, "--output", output, "--jobs", "2"]
        + ["--size", "500x500", "--channels", "3"],
        stderr=subprocess.PIPE,
        env={**os.environ, "HPCTRAIN_TEST": str(tmp_path)},
        start_new_session=True,  # a Ctrl-C reaches the workers too
    )
    wait_for((tmp_path / "begun").exists)
    wait_for(lambda: len(processes_with(mark)) >= 4)  # with that which multiprocessing starts
    os.killpg(packing.pid, number) if number == signal.SIGINT else packing.send_signal(number)
    said = packing.communicate(timeout=90)[1]
    assert packing.returncode not in (0, 2) and b"Traceback" not in said
    left = os.listdir(output.parent)
    assert not left or (number != signal.SIGINT and re.fullmatch(r"\.a\.h5\..*\.tmp", *left))
    wait_for(lambda: processes_with(mark) == [])
    pack(class_folders(tmp_path / "few", {"a": 2}), output, split="1")
    assert os.listdir(output.parent) == ["a.h5"]  # the next one removes it


def test_read_pack_takes_what_pack_gives(folder, tmp_path):
    made = pack(folder, tmp_path / "a.h5")
    assert read_pack(tmp_path / "a.h5") == made
