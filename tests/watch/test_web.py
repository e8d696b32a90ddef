"""The page: who gets it, who may stop a run, what the data hold."""

from __future__ import annotations

import http.client
import json
import re
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from importlib.resources import files
from typing import Any
from urllib.parse import quote

import pytest

from hpctrain.errors import UsageError
from hpctrain.watch.runs import WatchedRuns
from hpctrain.watch.web import ADDRESS, Server, serve
from tests.support.launch import Job
from tests.support.launch import run as run_command
from tests.support.records import (
    append,
    end_line,
    evaluation_line,
    line,
    make_run,
    run_line,
    step_line,
)
from tests.watch.test_terminal import LOSSES


@pytest.fixture
def server(tmp_path) -> Iterator[Any]:
    run = make_run(
        tmp_path / "a",
        run_line(),
        *map(step_line, range(1, 6)),
        evaluation_line(5),
        line("note", text="<script>alert(1)</script>"),
    )
    make_run(tmp_path / "b", run_line(), step_line(1), end_line("failed", "no room"))
    made = Server(WatchedRuns([str(run), str(tmp_path / "b")], "runs"))
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield made
    made.shutdown()
    thread.join()
    made.server_close()


def ask(server, path, method="GET", token=None, **headers):
    """Status, headers, body."""
    port = server.server_address[1]
    token = server.token if token is None else token
    connection = http.client.HTTPConnection(ADDRESS, port, timeout=10)
    headers = {"Host": f"localhost:{port}"} | {k.replace("_", "-"): v for k, v in headers.items()}
    connection.request(method, f"{path}{'&' if '?' in path else '?'}token={token}", headers=headers)
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, answer.headers, body


def origin(server):
    return f"http://localhost:{server.server_address[1]}"


def test_the_page_is_whole_loads_nothing_and_is_not_kept(server):
    status, headers, body = ask(server, "/")
    page = body.decode()
    assert status == 200 and "[[" not in re.sub(r"\[\[\w+(\.\.\.)?, |= \[\[", "", page)
    assert not re.findall(r"""(?:src|href)=["'](?!data:,)""", page) and "http://" not in page
    assert "innerHTML" not in page
    assert headers["Cache-Control"] == "no-store" and headers["Referrer-Policy"] == "no-referrer"
    nonces = set(re.findall(r"nonce=\"([^\"]+)\"", page))
    assert (
        len(nonces) == 1
        and f"script-src 'nonce-{nonces.pop()}'" in headers["Content-Security-Policy"]
    )
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert ask(server, "/")[2] != body


def test_the_data_of_all_runs_and_the_curves_of_one(server):
    status, headers, body = ask(server, "/data")
    first, second = json.loads(body)["runs"]
    assert (status, headers["Cache-Control"], headers["Content-Type"][:16]) == (
        200,
        "no-store",
        "application/json",
    )
    assert (first["name"], first["status"], first["step"], first["steps"]) == (
        "a",
        "running",
        5,
        40,
    )
    assert first["notes"] == ["<script>alert(1)</script>"] and first["can_be_stopped"]
    assert first["cells"][:4] == ["a", "running", "1/4", "12 %"]
    assert first["progress"].startswith("epoch 1 of 4, step 5 of 40, 12 %")
    assert ["ranks", "2"] in first["facts"] and ["network", "digits"] in first["facts"]
    assert (second["text"], second["can_be_stopped"]) == ("failed: no room", False)
    curves = json.loads(ask(server, "/curves?run=0")[2])
    assert curves["version"] == first["version"]
    assert curves["loss"]["training"][1] == [2, 0.5, 0.5, 0.5]
    assert curves["accuracy"]["validation"] == [[5, 0.75, 0.75, 0.75]]


@pytest.mark.parametrize(
    ("method", "path", "token"),
    [
        ("GET", "/", ""),
        ("GET", "/", "x"),
        ("GET", "/data", ""),
        ("GET", "/data", "%C3%A9"),
        ("HEAD", "/curves?run=0", ""),
        ("POST", "/stop?run=0", ""),
        ("POST", "/stop?run=0", "x"),
        ("PUT", "/nothing", ""),
    ],
)
def test_nothing_without_the_token(server, tmp_path, method, path, token):
    status, headers, body = ask(server, path, method, token, Origin=origin(server))
    assert status == 403 and headers["Cache-Control"] == "no-store"
    assert server.token.encode() not in body and not (tmp_path / "a" / "STOP").exists()


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("127.0.0.1:1234", 200),
        ("[::1]:80", 200),
        ("evil.example", 403),
        ("127.0.0.1.evil.example", 403),
        ("[::1", 403),
    ],
)
def test_only_names_of_this_machine(server, host, status):
    assert ask(server, "/data", Host=host)[0] == status


@pytest.mark.parametrize(
    ("page", "site"),
    [
        (None, None),
        ("http://evil.example", None),
        ("null", None),
        ("http://localhost:1", None),
        ("own", "cross-site"),
    ],
)
def test_a_stop_from_another_page_is_refused(server, tmp_path, page, site):
    page = origin(server) if page == "own" else page
    headers = {"Origin": page, "Sec_Fetch_Site": site}
    headers = {name: value for name, value in headers.items() if value}
    assert ask(server, "/stop?run=0", "POST", **headers)[0] == 403
    assert not (tmp_path / "a" / "STOP").exists()


def test_data_are_not_for_other_pages(server):
    assert ask(server, "/data", Origin="http://evil.example")[0] == 403
    assert ask(server, "/data", Sec_Fetch_Site="cross-site")[0] == 403
    assert ask(server, "/data", Sec_Fetch_Site="same-origin")[0] == 200


def test_a_stop_writes_the_stop_file_of_that_run_alone(server, tmp_path):
    own = {"Origin": origin(server)}
    assert ask(server, "/stop?run=0")[0] == 405
    assert not (tmp_path / "a" / "STOP").exists()
    status, _, body = ask(server, "/stop?run=0", "POST", **own)
    assert status == 200 and "is asked to stop" in json.loads(body)["text"]
    assert (tmp_path / "a" / "STOP").exists() and not (tmp_path / "b" / "STOP").exists()
    assert json.loads(ask(server, "/data")[2])["runs"][0]["status"] in ("running", "stopping")
    status, _, body = ask(server, "/stop?run=1", "POST", **own)
    assert "already ended" in json.loads(body)["text"] and not (tmp_path / "b" / "STOP").exists()


@pytest.mark.parametrize("run", ["", "2", "x", "²", "9" * 5000])
def test_a_run_that_is_none_of_them(server, run):
    path = f"run={quote(run)}"
    assert ask(server, f"/curves?{path}")[0] == 404
    assert ask(server, f"/stop?{path}", "POST", Origin=origin(server))[0] == 404


def test_a_stop_that_cannot_be_written_is_told(server, tmp_path):
    (tmp_path / "a" / "config.toml").unlink()
    status, _, body = ask(server, "/stop?run=0", "POST", Origin=origin(server))
    assert status == 409 and "config.toml" in json.loads(body)["text"]


def test_the_data_follow_the_run(server, tmp_path, monkeypatch):
    monkeypatch.setattr("hpctrain.watch.web.POLL_EVERY", 0.0)
    ask(server, "/data")
    append(tmp_path / "a", step_line(6), end_line())
    run = json.loads(ask(server, "/data")[2])["runs"][0]
    assert (run["step"], run["status"]) == (6, "done")


def test_only_the_loopback_listens(server):
    assert server.server_address[0] == "127.0.0.1"
    with Server(WatchedRuns([], "runs")) as other:
        assert other.token != server.token and len(other.token) == 43


def test_a_taken_port_is_one_line():
    with socket.create_server((ADDRESS, 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=f"--port {port}"):
            serve(WatchedRuns([], "runs"), port)


def test_the_address_and_the_tunnel_are_printed_and_ctrl_c_ends_it(tmp_path):
    make_run(tmp_path / "runs" / "a", run_line())
    job = Job([sys.executable, "-m", "hpctrain", "watch", "a", "--web"], cwd=tmp_path)
    assert job.stdout is not None
    lines = [job.stdout.readline() for _ in range(3)]
    job.send_signal(signal.SIGINT)
    out, err = job.communicate(timeout=20)
    assert (job.returncode, out, err) == (0, "", "")
    port = re.fullmatch(r"http://127.0.0.1:(\d+)/\?token=[\w-]{43}\n", lines[0])[1]
    assert f"ssh -L {port}:127.0.0.1:{port} " in lines[1]


@pytest.mark.skipif(shutil.which("node") is None, reason="runs the page's script in Node")
def test_the_axis_of_a_loss_ends_beyond_its_curve_and_what_is_shaded():
    cases = [[least, most, 0.9 * least] for least, most in LOSSES if least >= 0]
    script = (files("hpctrain.watch") / "page" / "plot.js").read_text()
    script += """
    const ends = (least, most, peak) => {
      const box = limits([{ points: [[1, most, most, 9 * most], [2, least, peak, least]] }], false);
      return [box.low, box.high, box.up.ticks[0], box.up.ticks.at(-1), box.up.ticks.length];
    };"""
    script += f"console.log(JSON.stringify({json.dumps(cases)}.map((case_) => ends(...case_))))"
    done = run_command(["node", "-e", script])
    assert done.returncode == 0, done.stderr
    for (_, most, peak), found in zip(cases, json.loads(done.stdout), strict=True):
        low, high, first, last, count = found
        assert (low, high) == (first, last) and 2 <= count <= 9
        assert low <= peak * (1 + 1e-9) and most <= high * (1 + 1e-9)
