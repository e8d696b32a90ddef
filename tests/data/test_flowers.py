"""The download of the flowers, from a file instead of the network."""

import hashlib
import random
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from hpctrain.data import flowers
from hpctrain.errors import RunError

BODY = random.Random(7).randbytes(1_000_003)


@pytest.fixture
def published(tmp_path, monkeypatch):
    """The folder to download into; the published archive is a file."""
    (tmp_path / "source").write_bytes(BODY)
    monkeypatch.setattr(flowers, "URL", (tmp_path / "source").as_uri())
    monkeypatch.setattr(flowers, "SHA256", hashlib.sha256(BODY).hexdigest())
    return tmp_path / "new" / "data"


def test_the_archive_is_downloaded_once(published, tmp_path):
    path = flowers.fetch_archive(str(published))
    assert path == published / "flower_photos.tgz" and path.read_bytes() == BODY
    (tmp_path / "source").unlink()
    assert flowers.fetch_archive(published) == path
    assert list(published.iterdir()) == [path]


class Half(BaseHTTPRequestHandler):
    """Closes the connection before the last byte."""

    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", str(len(BODY)))
        self.end_headers()
        self.wfile.write(BODY[:-1])

    def log_message(self, *args):
        pass


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://127.0.0.1:1/a.tgz", "Connection refused"),
        ("file:///missing.tgz", "No such file"),
        (f"file://{__file__}", "invalid hash value"),
    ],
    ids=["unreachable", "missing", "another file"],
)
def test_a_failed_download_is_one_line_and_leaves_nothing(published, monkeypatch, url, said):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(flowers, "URL", url)
    with pytest.raises(RunError, match=rf"^cannot download {url} to .*{said}.* by hand$") as caught:
        flowers.fetch_archive(published)
    assert "\n" not in str(caught.value) and list(published.iterdir()) == []


def test_a_connection_that_is_cut_is_seen(published, monkeypatch):
    with ThreadingHTTPServer(("127.0.0.1", 0), Half) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        monkeypatch.setattr(flowers, "URL", f"http://127.0.0.1:{server.server_address[1]}/a.tgz")
        with pytest.raises(RunError, match="invalid hash value|IncompleteRead"):
            flowers.fetch_archive(published)
        server.shutdown()
    assert list(published.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match="Not a directory|File exists"):
        flowers.fetch_archive(tmp_path / "file")
