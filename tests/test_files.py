"""Atomic writes, and what killed writers leave."""

from __future__ import annotations

import errno
import os

import pytest

from hpctrain import files
from hpctrain.heartbeats import Beat, write_beat

BEAT = Beat(0, "here", 1, "step 1", 0.0, 0.0)


def test_devices_and_pipes_are_not_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/dev/null")
    for name in ("pipe", "link"):
        with pytest.raises(OSError, match="it is no regular file"):
            files.write_whole(tmp_path / name, "text")
    assert sorted(os.listdir(tmp_path)) == ["link", "pipe"]


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


def test_what_killed_writers_left_is_found(tmp_path):
    path = tmp_path / "a"
    mine = files.temporary_name(path)
    gone = [mine.with_name(mine.name.replace(f"-{os.getpid()}-", "-999999999-"))]
    gone.append(path.with_name(f".a.{files.socket.gethostname()}-999999998.tmp"))  # an older form
    elsewhere = mine.with_name(mine.name.replace(files.socket.gethostname(), "elsewhere"))
    for name in (mine, elsewhere, *gone):
        name.touch()
    assert sorted(files.left_behind(path)) == sorted(gone)
