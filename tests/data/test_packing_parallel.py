"""pack under mpirun: the bytes, the words and the exit codes of one process."""

import json
import os
import re
import shutil
import signal
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import NamedTuple

import pytest

from hpctrain.cli import main
from hpctrain.data.packed import read_pack, verify
from hpctrain.data.packing.workers import PackTask
from hpctrain.pack import cut_steps
from tests.data.pictures import class_folders, encode, picture, tar, zipped
from tests.launch import Job, mpirun, run, run_cli, run_mpi

SIZE = {"width": 61, "height": 59}  # 97 images a block
ALL = ["--split", "0.8,0.1,0.1"]
END = "-- end of a command:"
BATCH = f"""
import json, sys
import hpctrain.pack
from hpctrain.cli import main
from hpctrain.launcher import launched_rank
hpctrain.pack.STEP_IMAGES = 20
for words in json.loads(sys.argv[1]):
    code = main(["pack", *words])
    for stream in (sys.stdout, sys.stderr) if launched_rank() == 0 else ():
        print("{END}", code, file=stream, flush=True)
"""


class Case(NamedTuple):
    """A command that ranks must do as one process does."""

    source: Path | str
    flags: tuple[str, ...] = ()
    sizes: tuple[int, ...] = (3,)  # ranks
    code: int = 0


class Said(NamedTuple):
    """Exit code and words, without the time it took, the name of the pack and the table's title."""

    code: int
    words: tuple[str, ...]
    table: str

    @classmethod
    def of(cls, code, out, err):
        lines = re.sub(r"\S+\.h5", "", err).splitlines()
        words = tuple(line for line in lines if not re.fullmatch(r".* images/s|", line))
        return cls(int(code), words, out.partition("┏")[2])


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


def sources_of_two_sizes(place):
    """An image of another size far behind; and one beside a first that cannot be decoded."""
    far, near = place / "far", place / "near"
    for root in (far, near):
        class_folders(root, {"a": 20, "b": 3})
        class_folders(root / "c", {"x": 20}, width=17)
    (near / "a" / "000.png").write_bytes((near / "a" / "000.png").read_bytes()[:50])  # its header
    (near / "a" / "001.png").write_bytes(encode(picture(1, 19, 11)))
    return far, near


def make_cases(place, folder):
    archive = zipped(place / "images.zip", folder)
    jpeg = class_folders(place / "jpeg", {"c": 31, "d": 23}, ".jpg", width=41, height=37)
    shutil.copytree(folder / "a", jpeg / "e")  # most are not JPEG: their files are encoded anew
    linked = class_folders(place / "linked", {"a": 5, "b": 5})
    (linked / "a" / "002x.png").symlink_to(linked / "none")
    gray = class_folders(place / "gray", {"a": 9, "b": 9}, channels=1)
    colour = shutil.copytree(gray, place / "colour")
    (colour / "b" / "zzz.png").write_bytes(encode(picture(99)))
    far, near = sources_of_two_sizes(place)
    skip, both = "--skip-bad", (2, 3)
    as_jpeg = (skip, "--encoding", "jpeg", "--size", "32x32", *ALL)
    return {
        "folder": Case(folder, (skip, *ALL), both),
        "zip": Case(archive, (skip, *ALL), both),
        "another seed": Case(folder, (skip, *ALL, "--seed", "1"), (2,)),
        "many threads": Case(archive, (skip, "--jobs", "7"), (2,)),
        "tgz": Case(tar(place / "images.tgz", folder, "top"), (skip, "--size", "13x17")),
        "tar": Case(tar(place / "images.tar", folder, "top", "w"), (skip, "--channels", "1")),
        "jpeg": Case(jpeg, as_jpeg, both),
        "jpeg zip": Case(zipped(place / "jpeg.zip", jpeg), as_jpeg, both),
        "digits": Case("digits", ("--seed", "3"), (2,)),
        "ranks without an image": Case(
            class_folders(place / "few", {"a": 1, "b": 1}), ("--split", "1")
        ),
        "gray": Case(gray),
        "colour": Case(colour),
        "corrupt": Case(folder, code=2),
        "link": Case(linked, (), (2,), 2),
        "none": Case(place / "none", (), (2,), 2),
        "size": Case(folder, ("--size", "big"), (2,), 2),
        "jobs": Case(folder, ("--jobs", "0"), (2,), 2),
        "size far behind": Case(far, (), both, 2),
        "size of a corrupt image": Case(near, code=2),
    }


@pytest.fixture(scope="module")
def batch(tmp_path_factory, folder):
    """All cases by one process and by ranks: the cases, what was said by (case, size), and where
    the packs are; size 1 is one process.
    """
    place, out = tmp_path_factory.mktemp("cases"), tmp_path_factory.mktemp("out")
    cases, said = make_cases(place, folder), {}
    for name, case in cases.items():
        for size in (1, *case.sizes):
            (out / name / str(size)).mkdir(parents=True)
        with redirect_stdout(StringIO()) as stdout, redirect_stderr(StringIO()) as stderr:
            code = main(["pack", *words_of(out, name, case, 1), *["--jobs=1"][: name != "jobs"]])
        said[name, 1] = Said.of(code, stdout.getvalue(), stderr.getvalue())
    for size in (2, 3):
        own = {name: case for name, case in cases.items() if size in case.sizes}
        asked = [words_of(out, name, case, size) for name, case in own.items()]
        done = run_mpi(size, ["-c", BATCH, json.dumps(asked)], cwd=place)
        assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
        ends = re.compile(f"{END} (\\d)\n")
        parts = ends.split(done.stdout)[:-1], ends.split(done.stderr)[:-1]
        for number, name in enumerate(own):
            stdout, stderr = (part[2 * number] for part in parts)
            said[name, size] = Said.of(parts[0][2 * number + 1], stdout, stderr)
    return cases, said, out


def words_of(out, name, case, size):
    return [str(case.source), "--output", str(out / name / str(size) / "a.h5"), *case.flags]


NAMES = (
    *("folder", "zip", "another seed", "many threads", "tgz", "tar", "jpeg"),
    *("jpeg zip", "digits", "ranks without an image", "gray", "colour", "corrupt", "link", "none"),
    *("size", "jobs", "size far behind", "size of a corrupt image"),
)


@pytest.mark.parametrize("name", NAMES)
def test_ranks_say_and_write_what_one_process_does(batch, name):
    cases, said, out = batch
    case = cases[name]
    assert said[name, 1].code == case.code
    for size in (1, *case.sizes):
        assert said[name, size] == said[name, 1]
        place = out / name / str(size)
        assert os.listdir(place) == ([] if case.code else ["a.h5"])  # and nothing hidden
        if not case.code:
            assert (place / "a.h5").read_bytes() == (out / name / "1" / "a.h5").read_bytes()


def test_what_is_said_of_sources_by_ranks(batch):
    cases, said, out = batch
    assert set(cases) == set(NAMES)
    words = {name: "\n".join(said[name, case.sizes[-1]].words) for name, case in cases.items()}
    for name in ("folder", "zip"):
        assert "3 of 400 files left out" in words[name]
        assert "equal pixels (in different classes)" in words[name]
    assert "3 of 400 files cannot be read" in words["corrupt"]
    assert words["corrupt"].count("unreadable: ") == 3
    assert "1 of 11 files" in words["link"] and "002x.png: a link to nothing" in words["link"]
    assert "does not exist" in words["none"]
    assert "WIDTHxHEIGHT" in words["size"]
    assert "--jobs 0: give 1 or more" in words["jobs"]
    assert "a/000.png has 13x11 pixels and c/x/000.png 17x11" in words["size far behind"]
    assert "a/000.png has 13x11 pixels and a/001.png 19x11" in words["size of a corrupt image"]
    made = read_pack(out / "folder" / "3" / "a.h5")
    assert sum(split.samples for split in made.splits.values()) == 397
    assert verify(made) == []
    other = out / "another seed" / "2" / "a.h5"
    assert other.read_bytes() != Path(made.path).read_bytes()
    for name, channels in (("gray", 1), ("colour", 3)):  # of an image anywhere
        assert read_pack(out / name / "3" / "a.h5").image_shape == (11, 13, channels)


def test_the_check_is_done_once(batch, tmp_path):
    good = batch[2] / "folder" / "1" / "a.h5"
    data = bytearray(good.read_bytes())
    data[2**20] ^= 1
    (tmp_path / "bad.h5").write_bytes(data)
    checks = [["--check", str(good)], ["--check", str(tmp_path / "bad.h5")]]
    done = run_mpi(2, ["-c", BATCH, json.dumps(checks)], cwd=tmp_path)
    assert re.findall(f"{END} (.)", done.stdout) == ["0", "1"]
    assert done.stdout.count("all checksums agree") == done.stderr.count("are corrupt") == 1


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


UNSEEN = """
import os, sys
from hpctrain import pack
from hpctrain.cli import main
from hpctrain.launcher import launched_rank
old, other = pack._size, launched_rank() == 1
if other:
    pack._size = lambda path: -1 if path.endswith((".zip", ".tmp")) else old(path)
for source in sys.argv[1:]:
    if source == "images" and other:
        os.chdir("elsewhere")
    assert main(["pack", source, "--output", "a.h5"]) == 2
"""


def test_a_source_that_a_rank_does_not_see(folder, tmp_path):
    """A .zip, what a .tgz was unzipped to, and a folder."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "images").symlink_to(folder)
    archives = zipped(tmp_path / "x.zip", folder).name, tar(tmp_path / "x.tgz", folder).name
    done = run_mpi(2, ["-c", UNSEEN, *archives, "images"], cwd=tmp_path)
    ours = [line for line in done.stderr.splitlines() if line.startswith("hpctrain: ")]
    assert done.returncode == 0 and len(ours) == 3, done.stderr
    for line in ours:
        assert re.search("rank 1: .* is not on this host what it is on rank 0's", line)
        assert "the folder of the pack must be where all hosts see them" in line
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
    three_said, one_said = (Said.of(d.returncode, d.stdout, d.stderr) for d in (three, one))
    assert three_said == one_said
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
    words = ["-c", program, str(folder), "--skip-bad", "--output", "a.h5", "--size", "201x201"]
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


def test_a_step_has_a_bounded_number_of_tasks_and_images():
    """So that messages stay below 2 GiB, with few large tasks as with many small ones."""
    many = [PackTask((), 16) for _ in range(10_000)]
    steps = list(cut_steps(iter(many), 2, 1))
    assert [task for step in steps for task in step] == many
    assert {len(step) for step in steps[:-1]} == {2 * 512}
    assert {len(step) for step in list(cut_steps(many, 2, 64))[:-1]} == {2 * 32 * 64}
    large = [PackTask((), 60_000)] * 300
    for ranks, most in ((2, 1 << 16), (10_000, 1 << 22)):
        counts = [sum(t.images for t in step) for step in cut_steps(large, ranks, 1)]
        assert max(counts) <= most and sum(counts) == 300 * 60_000
