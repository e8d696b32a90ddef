"""What --data names."""

import subprocess
import sys

import numpy as np
import pytest

from hpctrain.config import PackConfig
from hpctrain.data import builtin as digits
from hpctrain.data import flowers, pack
from hpctrain.data.builtin import locate
from hpctrain.data.packed import read_pack
from hpctrain.data.split import Split
from hpctrain.errors import UsageError
from tests.data.pictures import class_folders, tar
from tests.support.launch import run_mpi


@pytest.fixture
def small(monkeypatch):
    """Digits of 20 images a class instead of 1,000."""
    monkeypatch.setattr(digits, "PER_CLASS", 20)
    monkeypatch.setattr(digits, "TEST_PER_CLASS", 2)
    monkeypatch.setattr(digits, "UNSEEN_PER_CLASS", 3)


def test_digits_are_made_once(small, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "new" / "data"
    path = locate("digits", str(folder))
    assert capsys.readouterr().err == f"drawing the digits for {path} ...\n"
    assert path == folder / "digits.h5"
    made = read_pack(path)
    assert made.image_shape == (28, 28, 1)
    assert made.classes == tuple("0123456789")
    assert {name: split.samples for name, split in made.splits.items()} == {
        "train": 180,
        "test": 20,
        "unseen": 30,
    }
    images, labels = digits.generate()[0]["test"]
    with Split(made, "test") as rows:
        got = np.empty((20, 28, 28, 1), np.uint8)
        rows.gather(np.arange(20), got)
        assert np.array_equal(got, images) and np.array_equal(rows.labels, labels)
    monkeypatch.setattr(digits, "generate", None)
    assert locate("digits", str(folder)) == path
    assert capsys.readouterr().err == ""


def test_two_processes_at_once(tmp_path):
    code = f"from hpctrain.data.builtin import locate; locate('digits', {str(tmp_path)!r})"
    shrink = "from hpctrain.data import builtin as d; d.PER_CLASS, d.TEST_PER_CLASS = 20, 2;"
    running = [
        subprocess.Popen([sys.executable, "-c", shrink + code], stderr=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    said = [process.communicate(timeout=100)[1] for process in running]
    assert [process.returncode for process in running] == [0, 0, 0], said
    assert [path.name for path in tmp_path.iterdir()] == ["digits.h5"]
    assert read_pack(tmp_path / "digits.h5").splits["train"].samples == 180


def test_flowers_are_packed_once(tmp_path, monkeypatch):
    asked = []

    def fetch(cache_dir):
        root = class_folders(tmp_path / "photos", {"a": 5, "b": 6})
        asked.append(str(cache_dir))
        return tar(tmp_path / "photos.tgz", root)

    monkeypatch.setattr(flowers, "fetch_archive", fetch)
    folder = str(tmp_path / "data")
    path = locate("flowers", folder)
    assert path == tmp_path / "data" / "flowers.h5"
    assert read_pack(path).image_shape == (100, 100, 3)
    assert locate("flowers", folder) == path
    assert asked == [folder]


BESIDE_MPI = """
import _posixsubprocess, os, subprocess, sys  # subprocess first: h5py may run uname
from pathlib import Path
from hpctrain.data import flowers
from hpctrain.data.builtin import locate
from hpctrain.parallel.mpi import call_on_root, start_mpi
def refused(*arguments):
    raise AssertionError("a process is started beside MPI")
comm = start_mpi()
os.fork = _posixsubprocess.fork_exec = refused
flowers.fetch_archive = lambda cache_dir: Path(sys.argv[1])
print(call_on_root(comm, lambda: str(locate("flowers", "data"))))
"""


def test_flowers_are_packed_on_one_rank_and_no_process_is_started_beside_mpi(tmp_path):
    archive = tar(tmp_path / "photos.tgz", class_folders(tmp_path / "photos", {"a": 50, "b": 50}))
    done = run_mpi(2, ["-c", BESIDE_MPI, str(archive)], cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "data/flowers.h5\n" * 2), done.stderr
    assert sum(s.samples for s in read_pack(tmp_path / "data/flowers.h5").splits.values()) == 100


def test_flowers_are_packed_as_the_name_says(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(pack, "make_pack", lambda config: seen.append(config) or "made")
    assert locate("flowers", str(tmp_path)) == "made"
    assert seen == [
        PackConfig(
            source="flowers",
            output=str(tmp_path / "flowers.h5"),
            cache_dir=str(tmp_path),
            jobs=1,
            overwrite=True,
        )
    ]


def test_a_file_is_itself(tmp_path, monkeypatch):
    path = tmp_path / "mine.h5"
    path.write_bytes(b"whatever: the reader judges it")
    assert locate(str(path), "nowhere") == path
    monkeypatch.chdir(tmp_path)
    path.rename("digits")
    assert str(locate("./digits", "nowhere")) == "digits"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("photos", r"is a folder, not a pack: run python -m hpctrain pack photos first"),
        ("two words.tar.gz", r"is an archive.*pack 'two words.tar.gz' first"),
        ("a.ZIP", "is an archive"),
        ("/dev/null", "no regular file"),
        ("digit", r"'digit' is no file.*did you mean 'digits'\?"),
        ("Flower", r"did you mean 'flowers'\?"),
        ("missing.h5", "no file and no built-in set: built in are digits and flowers"),
        ("phots.h5", "no file and no built-in set, did you mean 'photos.h5'\\?"),
        ("", "no file"),
    ],
)
def test_what_is_no_pack_is_refused(data, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos.h5").touch()
    for name in ("two words.tar.gz", "a.ZIP"):
        (tmp_path / name).write_bytes(b"x")
    with pytest.raises(UsageError, match=message) as caught:
        locate(data, str(tmp_path))
    assert "\n" not in str(caught.value)


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UsageError, match="--cache-dir .*cannot be made"):
        locate("digits", str(tmp_path / "file" / "data"))
