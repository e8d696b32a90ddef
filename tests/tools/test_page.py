"""The page that watch serves: who gets it, who may stop a run, what its data hold."""

from __future__ import annotations

import re
import shutil
import signal
import socket
import sys
from pathlib import Path
from urllib.parse import quote

import pytest

from tests.support.launch import Job
from tests.support.page import watched
from tests.support.ranks import alone
from tests.support.records import (
    end_line,
    evaluation_line,
    line,
    make_run,
    run_line,
    step_line,
    step_lines,
)


@pytest.fixture
def runs(tmp_path, clock):
    """One that is under way, and one that has failed; two of their settings differ."""
    told = [evaluation_line(4, accuracy=0.9), evaluation_line(5)]
    told += [line("note", text="<script>alert(1)</script>")]
    first = run_line(settings={"lr": 0.1, "epochs": 4, "weight_decay": 0.001})
    one = make_run(tmp_path / "a", first, *step_lines(1, 5), *told)
    other = run_line(settings={"lr": 0.2, "epochs": 4})
    return one, make_run(tmp_path / "b", other, step_line(1), end_line("failed", "no room"))


@pytest.fixture
def page(runs):
    with watched(*runs) as made:
        yield made


def test_the_page_loads_nothing_and_is_not_kept(page):
    answer = page.ask("/")
    assert answer.status == 200 and answer.headers["Content-Type"].startswith("text/html")
    assert not re.findall(r"""(?:src|href)=["'](?!data:,)""", answer.text)
    assert "http://" not in answer.text and "innerHTML" not in answer.text
    assert answer.headers["Cache-Control"] == "no-store"
    assert answer.headers["Referrer-Policy"] == "no-referrer"
    (nonce,) = set(re.findall(r"nonce=\"([^\"]+)\"", answer.text))
    policy = answer.headers["Content-Security-Policy"]
    assert f"script-src 'nonce-{nonce}'" in policy and "default-src 'none'" in policy
    assert nonce not in page.ask("/").text


def test_the_data_of_all_runs(page):
    first, second = page.runs()
    answer = page.ask("/data")
    assert (answer.status, answer.headers["Cache-Control"]) == (200, "no-store")
    assert answer.headers["Content-Type"].startswith("application/json")
    columns = "run status done left validation best test images/s lr weight_decay"
    assert answer.json()["columns"] == columns.split()
    texts = [text for text, _ in first["cells"]]
    assert texts == ["a", "running", "12 %", "", "75.00 %", "90.00 %", "", "80.0", "0.1", "0.001"]
    assert first["notes"] == ["<script>alert(1)</script>"] and first["can_be_stopped"]
    assert first["progress"].startswith("epoch 1 of 4, step 5 of 40, 12 %")
    assert ["ranks", "2"] in first["facts"] and ["network", "digits"] in first["facts"]
    assert (second["text"], second["can_be_stopped"]) == ("failed: no room", False)
    assert second["cells"][2][1] == 0.025 and second["cells"][4] == ["", None]
    assert second["cells"][-1] == ["0", 0.0]  # not recorded: the default


def test_the_curves_of_one_run(page):
    first, _ = page.runs()
    curves = page.curves(0)
    assert curves["version"] == first["version"]
    means = [[step, pytest.approx(1 / step, rel=1e-4)] for step in range(1, 6)]
    assert curves["loss"]["training"] == means
    assert curves["accuracy"]["validation"] == [[4, 0.9], [5, 0.75]]


REFUSED = [  # token, headers, status: only who has it, on this machine, from the page itself
    ("", {}, 403),
    ("x", {}, 403),
    ("%C3%A9", {}, 403),
    (None, {"Host": "evil.example"}, 403),
    (None, {"Host": "127.0.0.1.evil.example"}, 403),
    (None, {"Origin": "http://evil.example"}, 403),
    (None, {"Sec_Fetch_Site": "cross-site"}, 403),
    (None, {"Sec_Fetch_Site": "same-origin", "Host": "127.0.0.1:1234"}, 200),
]


@pytest.mark.parametrize(("token", "headers", "status"), REFUSED)
def test_nothing_without_the_token_nor_for_another_page(page, runs, token, headers, status):
    for path in ("/", "/data", "/curves?run=0"):
        answer = page.ask(path, token=token, **headers)
        assert (answer.status, answer.headers["Cache-Control"]) == (status, "no-store")
        assert page.token not in answer.text or status == 200
    refused = page.ask("/stop?run=0", "POST", token, **{"Origin": page.origin, **headers})
    assert refused.status == 403
    assert not (runs[0] / "STOP").exists()


@pytest.mark.parametrize("origin", [None, "null", "http://localhost:1", "http://evil.example"])
def test_a_stop_is_for_the_page_itself(page, runs, origin):
    assert page.ask("/stop?run=0", "POST", Origin=origin).status == 403
    assert page.ask("/stop?run=0", Origin=page.origin).status in (403, 404)  # by GET
    assert not (runs[0] / "STOP").exists()
    assert page.stop(0).status == 200
    assert (runs[0] / "STOP").exists() and not (runs[1] / "STOP").exists()


@pytest.mark.parametrize("run", ["", "2", "x", "²", "9" * 5000])
def test_a_run_that_is_none_of_them(page, run):
    assert page.ask(f"/curves?run={quote(run)}").status == 404
    assert page.ask(f"/stop?run={quote(run)}", "POST", Origin=page.origin).status == 404


def test_a_stop_that_cannot_be_written_is_reported(page, runs):
    shutil.rmtree(runs[0])
    answer = page.stop(0)
    assert answer.status == 409 and "STOP: No such file" in answer.json()["text"]


def test_each_server_has_a_token_of_its_own(page):
    with watched() as other:
        assert other.token != page.token and len(other.token) == 43


def test_a_taken_port_is_one_line(tmp_path):
    make_run(tmp_path / "a", run_line())
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = alone("watch", tmp_path / "a", "--web", "--port", port)
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1) and str(port) in done.err


def test_the_address_and_the_tunnel_are_printed_the_loopback_listens_and_ctrl_c_ends_it(tmp_path):
    make_run(tmp_path / "runs" / "a", run_line())
    job = Job([sys.executable, "-m", "hpctrain", "watch", "a", "--web"], cwd=tmp_path)
    try:
        lines = [job.stdout.readline() for _ in range(3)]
        sockets = [row.split()[1:4] for row in Path("/proc/net/tcp").read_text().splitlines()]
        job.send_signal(signal.SIGINT)
        out, err = job.communicate(timeout=60)
    finally:
        job.end()
    port = re.fullmatch(r"http://127.0.0.1:(\d+)/\?token=[\w-]{43}\n", lines[0])[1]
    ending = f":{int(port):04X}"
    listening = [own for own, _, state in sockets if own.endswith(ending) and state == "0A"]
    assert (job.returncode, out, err) == (0, "", "")
    assert f"ssh -L {port}:127.0.0.1:{port} " in lines[1]
    assert listening == [f"0100007F{ending}"], "not the loopback alone"
