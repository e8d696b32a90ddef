"""pack under mpirun: the bytes, the words and the exit codes of one process."""

import os
import re
import shutil
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from hpctrain.data.packed import read_pack, verify
from tests.data.pictures import class_folders, encode, idx, picture, tar, zipped
from tests.launch import Job, mpirun, run, run_cli, run_mpi

SIZE = {"width": 61, "height": 59}  # 97 images a block
ALL = ["--split", "0.8,0.1,0.1"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """397 good images, three of them equal, and three bad files."""
    root = class_folders(tmp_path_factory.mktemp("source") / "images", {"a": 211, "b": 184}, **SIZE)
    (root / "a" / "twin.png").write_bytes(encode(picture(3, 61, 59)))
    (root / "b" / "twin.bmp").write_bytes(encode(picture(3, 61, 59), "BMP"))
    (root / "a" / "000.txt").write_text("hello")
    (root / "b" / "zzz.png").write_bytes(b"")
    (root / "b" / "nothing.png").write_text("GIF89a")
    return root


def said(done):
    """Exit code and words, without the time it took, the name of the output and what mpirun adds
    about exit codes.
    """
    lines = re.sub(r"\w+\.h5", "", done.stderr.split("\n" + "-" * 74)[0]).splitlines()
    words = [line for line in lines if not re.fullmatch(r"-{74}|.* images/s|", line)]
    return done.returncode, words, done.stdout.partition("┏")[2]  # the title is the file's name


def same(source, tmp_path, sizes, *flags, code=0):
    """Pack with one process and with `sizes` ranks: the same words and bytes. Those words."""
    first = run_cli(["pack", str(source), "--output", "one.h5", *flags], cwd=tmp_path)
    assert first.returncode == code, first.stderr
    for size in sizes:
        words = ["-m", "hpctrain", "pack", str(source), "--output", f"{size}.h5", *flags]
        done = run_mpi(size, words, cwd=tmp_path)
        assert said(done) == said(first)
        assert "Traceback" not in done.stderr
        if code == 0:
            assert (tmp_path / f"{size}.h5").read_bytes() == (tmp_path / "one.h5").read_bytes()
    made = [f"{name}.h5" for name in ("one", *sizes)] if code == 0 else []
    assert sorted(p.name for p in tmp_path.glob("*")) == sorted(made)  # and nothing hidden
    assert [p for p in os.listdir(tmp_path) if p.startswith(".")] == []
    return first.stderr


@pytest.mark.parametrize("make", [lambda path, root: root, zipped], ids=["folder", "zip"])
def test_ranks_give_the_bytes_of_one_process(folder, tmp_path, make):
    source = make(folder.parent / "images.zip", folder)
    words = same(source, tmp_path, (2, 3), "--skip-bad", *ALL)
    assert "3 of 400 files left out" in words
    assert "equal pixels (in different classes)" in words
    made = read_pack(tmp_path / "3.h5")
    assert sum(split.rows for split in made.splits.values()) == 397
    assert verify(made) == []
    other = run_mpi(
        2, ["-m", "hpctrain", "pack", str(source), "--skip-bad", "--seed", "1"], cwd=tmp_path
    )
    assert other.returncode == 0
    assert (tmp_path / "images.h5").read_bytes() != (tmp_path / "one.h5").read_bytes()


def arrays(folder, count=601):
    folder.mkdir()
    images = np.stack([picture(i, 31, 29, 1)[..., 0] for i in range(count)])
    for part, start in (("train", 0), ("t10k", 400)):
        idx(folder / f"{part}-images-idx3-ubyte.gz", images[start : start + 400])
        idx(folder / f"{part}-labels-idx1-ubyte", np.arange(len(images[start : start + 400])) % 2)
    return images


def test_unpacked_sources(folder, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    images = arrays(tmp_path / "mnist")
    np.savez_compressed(tmp_path / "x.npz", images=images, labels=np.arange(len(images)) % 3)
    sources = [
        (tar(tmp_path / "images.tgz", folder, "top"), ["--skip-bad", "--size", "13x17"]),
        (tar(tmp_path / "images.tar", folder, "top", "w"), ["--skip-bad", "--channels", "1"]),
        (tmp_path / "mnist", ["--split", "0.9,0.05,0.05"]),
        (tmp_path / "x.npz", ["--size", "17x19", "--crop"]),
    ]
    for source, flags in sources:
        same(source, out, (3,), *flags)
        for file in out.glob("*"):
            file.unlink()


@pytest.mark.parametrize("make", [lambda path, root: root, zipped], ids=["folder", "zip"])
def test_jpeg_files_are_kept_in_the_same_order(folder, tmp_path, make):
    """Most of these images are not JPEG: their files are encoded anew."""
    root = class_folders(tmp_path / "images", {"c": 31, "d": 23}, ".jpg", width=41, height=37)
    shutil.copytree(folder / "a", root / "e")
    out = tmp_path / "out"
    out.mkdir()
    source = make(tmp_path / "images.zip", root)
    same(source, out, (2, 3), "--skip-bad", "--encoding", "jpeg", "--size", "32x32", *ALL)


def test_digits_by_name(tmp_path):
    same("digits", tmp_path, (2,), "--seed", "3")


def test_ranks_without_an_image(tmp_path):
    source = class_folders(tmp_path / "images", {"a": 1, "b": 1})
    out = tmp_path / "out"
    out.mkdir()
    same(source, out, (3,), "--split", "1")


def test_mistakes_are_told_once_as_by_one_process(folder, tmp_path):
    (tmp_path / "out").mkdir()
    words = same(folder, tmp_path / "out", (3,), code=2)
    assert "3 of 400 files cannot be read" in words and words.count("unreadable: ") == 3
    linked = class_folders(tmp_path / "images", {"a": 5, "b": 5})
    (linked / "a" / "002x.png").symlink_to(linked / "none")
    words = same(linked, tmp_path / "out", (2,), code=2)
    assert "1 of 11 files" in words and "a/002x.png: a link to nothing" in words
    tmp_path = tmp_path / "out"
    assert "does not exist" in same(tmp_path / "none", tmp_path, (2,), code=2)
    assert "WIDTHxHEIGHT" in same(folder, tmp_path, (2,), "--size", "big", code=2)
    assert "--jobs 0: give 1 or more" in same(folder, tmp_path, (2,), "--jobs", "0", code=2)


def test_the_first_image_of_another_size_is_named(tmp_path):
    source = class_folders(tmp_path / "images", {"a": 20, "b": 3})
    class_folders(source / "c", {"x": 20}, width=17)
    out = tmp_path / "out"
    out.mkdir()
    words = same(source, out, (2, 3), code=2)
    assert "a/000.png has 13x11 pixels and c/x/000.png 17x11" in words
    whole = (source / "a" / "000.png").read_bytes()
    (source / "a" / "000.png").write_bytes(whole[:50])  # its header says a size, no more
    (source / "a" / "001.png").write_bytes(encode(picture(1, 19, 11)))
    words = same(source, out, (3,), code=2)
    assert "a/000.png has 13x11 pixels and a/001.png 19x11" in words


def test_an_image_of_colour_anywhere_makes_all_of_three_channels(tmp_path):
    source = class_folders(tmp_path / "images", {"a": 9, "b": 9}, channels=1)
    gray, colour = tmp_path / "gray", tmp_path / "colour"
    gray.mkdir(), colour.mkdir()
    same(source, gray, (3,))
    (source / "b" / "zzz.png").write_bytes(encode(picture(99)))
    same(source, colour, (3,))
    assert read_pack(gray / "3.h5").image_shape == (11, 13, 1)
    assert read_pack(colour / "3.h5").image_shape == (11, 13, 3)


def test_the_check_is_done_once(folder, tmp_path):
    same(folder, tmp_path, (), "--skip-bad")
    done = run_mpi(2, ["-m", "hpctrain", "pack", "--check", "one.h5"], cwd=tmp_path)
    assert (done.returncode, done.stdout.count("all checksums agree")) == (0, 1)
    data = bytearray((tmp_path / "one.h5").read_bytes())
    data[2**20] ^= 1
    (tmp_path / "one.h5").write_bytes(data)
    done = run_mpi(2, ["-m", "hpctrain", "pack", "--check", "one.h5"], cwd=tmp_path)
    assert (done.returncode, done.stderr.count("are corrupt")) == (1, 1)


def test_processes_of_a_foreign_launcher_are_refused_once(folder, tmp_path):
    for rank, words in (("0", "started 4 processes, but each sees only itself"), ("3", "")):
        env = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": rank}
        done = run_cli(["pack", str(folder), "--output", "a.h5"], cwd=tmp_path, env=env)
        assert done.returncode == 2 and words in done.stderr and bool(done.stderr) == bool(words)
    assert os.listdir(tmp_path) == []


#: A program that packs as the command does, after a change made by `{change}`.
CHANGED = """
import errno, os, resource, sys, time
from hpctrain import pack
from hpctrain.data.packing import decode
from hpctrain.launcher import launched_rank, launched_size
{change}
from hpctrain.cli import main
sys.exit(main(["pack", *sys.argv[1:]]))
"""


def changed(size, change, *words, cwd):
    return run_mpi(size, ["-c", CHANGED.format(change=change), *map(str, words)], cwd=cwd)


def test_a_source_that_a_rank_does_not_see(folder, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "images").symlink_to(folder)
    away = "os.chdir('elsewhere')"
    lost = "old = pack._size\npack._size = lambda path: -1 if {} in path else old(path)"
    sources = (
        ("images", away),
        (zipped(tmp_path / "x.zip", folder).name, lost.format("'zip'")),
        (tar(tmp_path / "x.tgz", folder).name, lost.format("'.tmp'")),  # what it was unzipped to
    )
    for source, gone in sources:
        gone = "if launched_rank() == 1:\n    " + gone.replace("\n", "\n    ")
        done = changed(2, gone, source, "--output", "a.h5", cwd=tmp_path)
        ours = [line for line in done.stderr.splitlines() if line.startswith("hpctrain: ")]
        assert done.returncode == 2 and len(ours) == 1, done.stderr
        assert re.search("rank 1: .* is not on this host what it is on rank 0's", ours[0])
    assert "the folder of the pack must be where all hosts see them" in ours[0]
    assert list(tmp_path.glob("*.h5")) == [] and list(tmp_path.glob(".*")) == []


def test_a_full_disk_on_one_rank_is_one_line_and_leaves_nothing(folder, tmp_path):
    full = (
        "def full(*arguments): raise OSError(errno.ENOSPC, 'No space left on device')\n"
        "if launched_rank() == 1: decode.write_at = full"
    )
    done = changed(3, full, folder, "--skip-bad", "--output", "a.h5", cwd=tmp_path)
    ours = [line for line in done.stderr.splitlines() if line.startswith("hpctrain: ")]
    assert done.returncode == 1 and len(ours) == 1, done.stderr
    assert ours[0].startswith("hpctrain: rank 1: no room left in ")
    assert os.listdir(tmp_path) == []


def test_a_bug_on_one_rank_ends_all(folder, tmp_path):
    bug = "if launched_rank() == 1: decode.hashlib = None"
    done = changed(3, bug, folder, "--skip-bad", "--output", "a.h5", cwd=tmp_path)
    assert done.returncode == 1 and re.search(r"\[rank 1 of 3 .*AttributeError", done.stderr)
    assert [name for name in os.listdir(tmp_path) if not name.startswith(".a.h5.")] == []


ALONE_ON_ROOT = """
from pathlib import Path
from hpctrain.data import flowers
def fetch(data_dir):
    assert not launched_rank()
    return Path({path!r})
flowers.fetch_archive = fetch
def no_fork(event, arguments):
    assert "mpi4py" not in sys.modules or event not in ("subprocess.Popen", "os.fork")
sys.addaudithook(no_fork)
"""


def test_flowers_are_fetched_once_and_nothing_is_forked_beside_mpi(folder, tmp_path):
    change = ALONE_ON_ROOT.format(path=str(tar(folder.parent / "images.tgz", folder)))
    program = CHANGED.format(change=change)
    one = run([sys.executable, "-c", program, "flowers", "--skip-bad"], cwd=tmp_path)
    assert one.returncode == 0, one.stderr
    three = changed(3, change, "flowers", "--skip-bad", "--output", "3.h5", cwd=tmp_path)
    assert said(three) == said(one)
    assert (tmp_path / "3.h5").read_bytes() == (tmp_path / "data/flowers.h5").read_bytes()
    assert read_pack(tmp_path / "3.h5").image_shape == (100, 100, 3)


def test_one_process_starts_no_mpi(folder, tmp_path):
    lines = "import atexit\natexit.register(lambda: print('mpi4py' in sys.modules))"
    program = CHANGED.format(change=lines)
    words = [sys.executable, "-c", program, str(folder), "--skip-bad", "--output", "a.h5"]
    assert run(words, cwd=tmp_path).stdout.endswith("False\n")
    done = changed(2, lines, folder, "--skip-bad", "--output", "b.h5", cwd=tmp_path)
    assert done.stdout.count("True") == 2


SLOW = """
old = {where}
def slow(*arguments):
    print("working", flush=True)
    time.sleep(0.3)
    return old(*arguments)
{where} = slow
"""


@pytest.mark.parametrize(
    ("where", "rank"),
    [("decode.decode", "2"), ("decode.write_span", "0"), ("os.preadv", "1")],  # that copies rows
)
def test_a_rank_that_is_killed_leaves_nothing_that_looks_whole(folder, tmp_path, where, rank):
    program = CHANGED.format(change=SLOW.format(where=where))
    words = ["-c", program, str(folder), "--skip-bad", "--output", "a.h5", "--size", "601x601"]
    job = Job([mpirun(), "-n", "3", sys.executable, *words], cwd=tmp_path)
    try:
        assert job.stdout and job.stdout.readline() == "working\n"
        (victim,) = (
            pid
            for pid in job.members()
            if f"OMPI_COMM_WORLD_RANK={rank}".encode()
            in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        )
        os.kill(victim, signal.SIGKILL)
        job.communicate(timeout=30)
    finally:
        job.end()
    assert job.returncode not in (0, 2)
    for _ in range(500):
        if not job.members():
            break
        time.sleep(0.01)
    assert job.members() == []
    left = os.listdir(tmp_path)
    assert [name for name in left if not name.startswith(".a.h5.")] == []


def test_many_threads_decode_a_zip(folder, tmp_path):
    source = zipped(tmp_path / "images.zip", folder)
    out = tmp_path / "out"
    out.mkdir()
    same(source, out, (2,), "--skip-bad", "--jobs", "7")
