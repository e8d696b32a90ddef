"""The built-in sets: the digits, which never change, and the flowers, which are downloaded once."""

import hashlib
import os
import shutil
from pathlib import Path
from urllib.error import URLError

import pytest
import torch.hub

from tests.support import ranks
from tests.support.api import command_line
from tests.support.pictures import arrays, class_folders, facts, make_pack, tar

# Of the images and labels of seed 0, each split. Every operation of the generator is exact by IEEE
# 754: equal bytes came from numpy 1.26, 2.0 and 2.4, with and without AVX.
SHA256 = {
    "train": "7ae80152856932c547ba1e40f81e618e61dfd66623a902c56b0ec6025c902767",
    "test": "1f53cea93047ead86a69eb677af6918c127c9bf6ef7eb6accbadf02d76575fb8",
    "unseen": "61a00d6dcb515d54e4e99984b1a7e7e0d4da6de4d2039c30cd88ad56452bc0d1",
}


def sha256(images, labels):
    return hashlib.sha256(images.tobytes() + labels.astype("<i8").tobytes()).hexdigest()


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """The pack of the digits."""
    folder = tmp_path_factory.mktemp("digits")
    assert command_line(["pack", "digits", "--cache-dir", str(folder)]) == 0
    assert command_line(["pack", "digits", "--cache-dir", f"{folder}/digits.h5"]) == 2
    return folder / "digits.h5"


def test_the_bytes_of_the_digits_never_change(digits):
    assert {name: sha256(*arrays(digits, name)) for name in SHA256} == SHA256
    assert facts(digits)["classes"] == list("0123456789")


def test_another_seed_draws_other_digits_and_shares_divide_them_again(digits, tmp_path):
    path = make_pack("digits", tmp_path / "a.h5", seed=1, split="0.7,0.1,0.2")
    rows = {name: len(arrays(path, name)[1]) for name in ("train", "validation", "test", "unseen")}
    assert rows == {"train": 7000, "validation": 1000, "test": 2000, "unseen": 1000}
    first = {image.tobytes() for image in arrays(digits, "unseen")[0]}
    assert not first & {image.tobytes() for image in arrays(path, "unseen")[0]}


def dry_run(n, name, folder):
    """What the ranks say of a run that trains nothing."""
    words = ["--cache-dir", folder, "--runs-dir", folder / "runs", "--dry-run"]
    ended = ranks.command(n, "--data", name, "--model", "resnet18", *words, "--progress", "none")
    assert ended.code == 0, ended.err
    return ended.err


def test_the_digits_are_drawn_by_the_first_run_only(digits, tmp_path):
    assert "digits.h5" in dry_run(1, "digits", tmp_path / "new")
    path = tmp_path / "new" / "digits.h5"
    assert path.read_bytes() == digits.read_bytes()
    os.utime(path, ns=(5, 5))
    assert dry_run(2, "digits", tmp_path / "new") == ""
    assert path.stat().st_mtime_ns == 5


def draw(comm, folder, main):
    """Each rank on its own, as if it was started alone."""
    os.environ.clear()  # of the launcher's variables
    return main(["pack", "digits", "--cache-dir", folder, "--overwrite"])


def test_processes_that_draw_the_digits_at_once_leave_one_whole_pack(digits, tmp_path):
    given = {"folder": str(tmp_path), "main": command_line}
    assert ranks.on_ranks(2, draw, **given) == [0, 0]
    assert [path.name for path in tmp_path.iterdir()] == ["digits.h5"]
    assert (tmp_path / "digits.h5").read_bytes() == digits.read_bytes()


# The flowers, without the network


@pytest.fixture
def archive(tmp_path):
    images = class_folders(tmp_path / "photos", {"roses": 50, "tulips": 50})
    return tar(tmp_path / "flowers.tgz", images, "top")


def test_the_flowers_are_downloaded_and_packed_once(archive, tmp_path, monkeypatch):
    asked = []

    def download(url, path, sha256, progress):
        asked.append((url, sha256))
        shutil.copy(archive, path)

    monkeypatch.setattr(torch.hub, "download_url_to_file", download)
    words = ["pack", "flowers", "--cache-dir", str(tmp_path / "data"), "--jobs", "1"]
    assert command_line(words) == 0
    ((url, sha256),) = asked
    assert url.startswith("https://") and len(sha256) == 64
    assert facts(tmp_path / "data" / "flowers.h5")["classes"] == ["roses", "tulips"]
    assert command_line([*words, "--overwrite"]) == 0 and len(asked) == 1


@pytest.mark.parametrize(
    "error",
    [URLError("unreachable"), RuntimeError("invalid hash value"), ConnectionError("cut")],
    ids=str,
)
def test_a_failed_download_is_one_line_and_leaves_nothing(tmp_path, monkeypatch, capfd, error):
    def download(url, path, sha256, progress):
        raise error

    monkeypatch.setattr(torch.hub, "download_url_to_file", download)
    assert command_line(["pack", "flowers", "--cache-dir", str(tmp_path / "data")]) == 1
    last = capfd.readouterr().err.rstrip("\n").split("\n")[-1]
    assert last.startswith("hpctrain: cannot download https://") and str(error) in last
    assert list((tmp_path / "data").iterdir()) == []


@pytest.mark.ranks(2)
def test_flowers_are_packed_on_one_rank_and_no_process_is_started_beside_mpi(
    comm, archive, tmp_path, monkeypatch
):
    def refused(*arguments):
        raise AssertionError("a process is started beside MPI")

    (tmp_path / "data").mkdir(exist_ok=True)
    if comm.rank == 0:
        shutil.copy(archive, tmp_path / "data" / "flower_photos.tgz")
    comm.Barrier()
    monkeypatch.setattr(os, "fork", refused)
    monkeypatch.setattr("_posixsubprocess.fork_exec", refused)
    words = ["--data", "flowers", "--cache-dir", tmp_path / "data", "--dry-run"]
    words += ["--runs-dir", tmp_path, "--model", "resnet18", "--progress", "none"]
    assert command_line([str(word) for word in words]) == 0
    images = arrays(Path(tmp_path / "data" / "flowers.h5"))[0]
    assert images.shape == (90, 100, 100, 3)
