"""Downloading against a server of our own on 127.0.0.1."""

import hashlib
import random
import resource
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest

from hpctrain.data import flowers
from hpctrain.data.flowers import Archive, fetch_archive
from hpctrain.errors import RunError, UsageError

BODY = random.Random(7).randbytes(1_000_003)


class Handler(BaseHTTPRequestHandler):
    """Answers with BODY; `server.plan` says for each request in turn what goes wrong."""

    def do_GET(self):
        wanted = self.headers.get("Range")
        self.server.ranges.append(wanted)
        trouble = self.server.plan.pop(0) if self.server.plan else {}
        if "status" in trouble:
            return self.send_error(trouble["status"])
        start = int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted else 0
        partial = wanted is not None and not trouble.get("ignore_range")
        start = start if partial else 0
        body = trouble.get("body", BODY)[start:]
        self.send_response(206 if partial else 200)
        self.send_header("Content-Length", str(len(body)))
        if partial:
            begin = start + trouble.get("wrong_start", 0)
            self.send_header("Content-Range", f"bytes {begin}-{len(BODY) - 1}/{len(BODY)}")
        self.end_headers()
        if "gate" in trouble:
            trouble["gate"].wait(60)
        self.wfile.write(body[: trouble.get("cut", len(body))])

    def log_message(self, *args):
        pass


@pytest.fixture
def server(monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(flowers, "DELAYS", (0.01, 0.01))
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as httpd:
        thread = threading.Thread(target=httpd.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        httpd.ranges, httpd.plan = [], []
        yield httpd
        httpd.shutdown()
        thread.join()


@pytest.fixture
def archive(server):
    port = server.server_address[1]
    digest = hashlib.sha256(BODY).hexdigest()
    return Archive(f"http://127.0.0.1:{port}/photos.tgz", "photos.tgz", len(BODY), digest)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_published_archive():
    assert flowers.FLOWER_PHOTOS.size == 228813984
    assert len(bytes.fromhex(flowers.FLOWER_PHOTOS.sha256)) == 32


def test_downloads_once(server, archive, tmp_path):
    path = fetch_archive(str(tmp_path / "new" / "data"), archive)
    assert path == tmp_path / "new" / "data" / "photos.tgz"
    assert path.read_bytes() == BODY
    assert names(path.parent) == ["photos.tgz"]
    assert fetch_archive(path.parent, archive) == path
    assert server.ranges == [None]


def test_goes_on_after_cut_connections(server, archive, tmp_path):
    server.plan += [{"cut": 300_007}, {"cut": 100_003}, {"status": 503}]
    assert fetch_archive(tmp_path, archive).read_bytes() == BODY
    assert server.ranges == [None, "bytes=300007-", "bytes=400010-", "bytes=400010-"]


def test_goes_on_in_a_later_call(server, archive, tmp_path):
    server.plan += [{"cut": 500_009}] + 3 * [{"status": 503}]
    with pytest.raises(RunError, match=r"HTTP 503.*500,009 of 1,000,003 bytes are kept"):
        fetch_archive(tmp_path, archive)
    assert names(tmp_path) == ["photos.tgz.part"]
    server.ranges.clear()
    assert fetch_archive(tmp_path, archive).read_bytes() == BODY
    assert server.ranges == ["bytes=500009-"]
    assert names(tmp_path) == ["photos.tgz"]


def test_whole_part_is_checked_without_a_request(server, archive, tmp_path):
    (tmp_path / "photos.tgz.part").write_bytes(BODY)
    assert fetch_archive(tmp_path, archive).read_bytes() == BODY
    assert server.ranges == []


def test_server_that_ignores_ranges(server, archive, tmp_path):
    (tmp_path / "photos.tgz.part").write_bytes(b"x" * 200_003)
    server.plan.append({"ignore_range": True})
    assert fetch_archive(tmp_path, archive).read_bytes() == BODY
    assert server.ranges == ["bytes=200003-"]


def test_server_that_never_gets_further_is_given_up(server, archive, tmp_path):
    server.plan += 99 * [{"ignore_range": True, "cut": 300_007}]
    with pytest.raises(RunError, match="the connection was cut"):
        fetch_archive(tmp_path, archive)
    assert len(server.ranges) == 4  # one that brought something, and three in vain


def test_server_that_sends_another_part(server, archive, tmp_path):
    (tmp_path / "photos.tgz.part").write_bytes(BODY[:101])
    server.plan.append({"wrong_start": 1})
    assert fetch_archive(tmp_path, archive).read_bytes() == BODY
    assert server.ranges == 2 * ["bytes=101-"]


def test_wrong_bytes_are_refused_and_not_kept(server, archive, tmp_path):
    flipped = bytes([BODY[0] ^ 1]) + BODY[1:]
    server.plan.append({"body": flipped})
    with pytest.raises(RunError, match="not the published archive") as caught:
        fetch_archive(tmp_path, archive)
    assert "\n" not in str(caught.value)
    assert fetch_archive(tmp_path, archive).read_bytes() == BODY
    assert server.ranges == [None, None]


def test_other_size_is_refused_before_downloading(server, archive, tmp_path):
    server.plan.append({"body": BODY + b"more"})
    with pytest.raises(RunError, match=r"offers 1,000,007 bytes, not 1,000,003"):
        fetch_archive(tmp_path, archive)
    assert (tmp_path / "photos.tgz.part").stat().st_size == 0


def test_damaged_archive_in_place_is_refused(server, archive, tmp_path):
    (tmp_path / "photos.tgz").write_bytes(BODY[:-1])
    with pytest.raises(RunError, match=r"1,000,002 bytes .* remove it"):
        fetch_archive(tmp_path, archive)
    assert server.ranges == []


def test_missing_page_is_not_tried_again(server, archive, tmp_path):
    server.plan.append({"status": 404})
    with pytest.raises(RunError, match="HTTP 404"):
        fetch_archive(tmp_path, archive)
    assert len(server.ranges) == 1


def test_no_network_gives_advice(server, archive, tmp_path):
    server.shutdown()
    server.server_close()
    with pytest.raises(RunError, match=r"Connection refused.*hpctrain pack FILE.*flowers\.h5") as e:
        fetch_archive(tmp_path, archive)
    assert "\n" not in str(e.value)


def test_no_room_and_no_permission(server, archive, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UsageError, match="--data-dir"):
        fetch_archive(tmp_path / "file", archive)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (archive.size // 2, before[1]))
    try:
        with pytest.raises(RunError, match="no room left"):
            fetch_archive(tmp_path, archive)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_second_process_waits_for_the_first(server, archive, tmp_path):
    gate = threading.Event()
    server.plan.append({"gate": gate})
    code = "import sys; from hpctrain.data.flowers import *; fetch_archive({!r}, {!r})"
    command = [sys.executable, "-c", code.format(str(tmp_path), archive)]
    first = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        while not server.ranges:
            assert first.poll() is None, first.stderr.read()
        second = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert "another process" in second.stderr.readline()
        gate.set()
        first.communicate(timeout=60)
        second.communicate(timeout=60)
    finally:
        gate.set()
        first.kill()
    assert (first.returncode, second.returncode) == (0, 0)
    assert server.ranges == [None]
    assert names(tmp_path) == ["photos.tgz"]
    assert (tmp_path / "photos.tgz").read_bytes() == BODY


def test_without_file_locks(server, archive, tmp_path, monkeypatch):
    def refuse(file, operation):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(flowers, "fcntl", SimpleNamespace(flock=refuse, LOCK_EX=0, LOCK_NB=0))
    assert fetch_archive(tmp_path, archive).read_bytes() == BODY
