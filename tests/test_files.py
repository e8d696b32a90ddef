"""Files that others cannot redirect: nothing is written through a link in the place of a name."""

from __future__ import annotations

import errno
import os
import stat

import pytest

from hpctrain import files
from hpctrain.data import staging
from hpctrain.data.images import read_image
from hpctrain.data.packed import read_pack, read_sums
from hpctrain.data.packing.manifest import read_manifest
from hpctrain.errors import Failure, UsageError
from hpctrain.heartbeats import Beat, write_beat
from hpctrain.inference.image_files import list_images
from hpctrain.report.recorder import RecordFile
from hpctrain.training.control import RunLock, request_stop
from tests.packs import make_pack, part_of

BEAT = Beat(0, "here", 1, "step 1", 0.0, 0.0)
SECRET = b"not to be overwritten"


@pytest.fixture
def victim(tmp_path):
    path = tmp_path / "victim"
    path.write_bytes(SECRET)
    path.chmod(0o600)
    yield path
    assert path.read_bytes() == SECRET
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_devices_and_pipes_are_not_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/dev/null")
    for name in ("pipe", "link"):
        with pytest.raises(OSError, match="it is no regular file"):
            files.write_whole(tmp_path / name, "text")
    assert sorted(os.listdir(tmp_path)) == ["link", "pipe"]
    with pytest.raises(UsageError, match="pipe cannot be read: it is no regular file"):
        read_manifest(tmp_path / "pipe")


def test_pipes_in_a_folder_of_images_are_not_read(tmp_path):
    (tmp_path / "a.png").touch()
    os.mkfifo(tmp_path / "b.png")
    assert list_images([tmp_path]) == [tmp_path / "a.png"]
    with pytest.raises(OSError, match="it is no regular file"):
        read_image(str(tmp_path / "b.png"), (2, 2, 3))


def test_a_name_is_new_and_cannot_be_known(tmp_path, victim, monkeypatch):
    path = tmp_path / "a"
    assert files.temporary_name(path) != files.temporary_name(path)
    monkeypatch.setattr(files.secrets, "token_hex", lambda count: "00" * count)
    files.temporary_name(path).symlink_to(victim)
    with pytest.raises(FileExistsError):
        files.write_whole(path, "mine")
    assert not path.exists()
    files.temporary_name(path).unlink()
    files.write_whole(path, "mine")
    assert path.read_text() == "mine"
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~files.UMASK
    assert sorted(os.listdir(tmp_path)) == ["a", "victim"]


def test_what_cannot_be_written_leaves_nothing(tmp_path, monkeypatch):
    """A heartbeat is tried anew every few seconds: each would leave a file on a full disk."""

    def full(*paths):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        write_beat(tmp_path, BEAT)
    with pytest.raises(OSError, match="No space left"):
        files.write_whole(tmp_path / "a", "mine")
    assert os.listdir(tmp_path) == []


def test_a_file_that_is_exchanged_while_it_is_written_is_noticed(tmp_path, victim):
    path = tmp_path / "a"
    with (
        pytest.raises(OSError, match="another file was put in its place"),
        files.whole_file(path) as file,
    ):
        os.unlink(file.name)
        os.symlink(victim, file.name)
        file.write(b"mine")
    assert os.listdir(tmp_path) == ["victim"]
    path.symlink_to(victim)
    files.write_whole(path, "mine")  # takes the place of a link
    assert (path.is_symlink(), path.read_text()) == (False, "mine")


def test_what_killed_writers_left_is_found(tmp_path):
    path = tmp_path / "a"
    mine = files.temporary_name(path)
    gone = [mine.with_name(mine.name.replace(f"-{os.getpid()}-", "-999999999-"))]
    gone.append(path.with_name(f".a.{files.socket.gethostname()}-999999998.tmp"))  # an older form
    elsewhere = mine.with_name(mine.name.replace(files.socket.gethostname(), "elsewhere"))
    for name in (mine, elsewhere, *gone):
        name.touch()
    assert sorted(files.left_behind(path)) == sorted(gone)


def take_lock(path):
    RunLock().take(path.parent)


WRITERS = {
    "progress.jsonl": RecordFile,
    "lock": take_lock,
    "STOP": lambda path: request_stop(path.parent),
}


@pytest.mark.parametrize("kind", ["link", "pipe"])
@pytest.mark.parametrize("name", WRITERS)
def test_what_stands_in_the_place_of_a_known_name_is_not_written_to(tmp_path, victim, name, kind):
    path = tmp_path / "run" / name
    path.parent.mkdir()
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(victim)
    with pytest.raises((Failure, OSError), match=r"symbolic link|no regular file|No such device"):
        WRITERS[name](path)


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo])
def test_a_folder_or_a_pipe_in_place_of_a_copy_is_not_one(tmp_path, make):
    packed = read_pack(make_pack(tmp_path / "a.h5", {"train": 11}))
    share = staging.pieces(packed, read_sums(packed), part_of(packed, range(11)))
    make(tmp_path / "b")
    descriptors = os.listdir("/proc/self/fd")
    assert not staging.compare(packed, tmp_path / "b", share)
    assert os.listdir("/proc/self/fd") == descriptors
