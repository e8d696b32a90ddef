"""The page that watch serves: who gets it, who may stop a run, what its data hold."""

from __future__ import annotations

import re
import signal
import socket
import sys
from pathlib import Path

import pytest

from tests.support.launch import Job
from tests.support.page import watched
from tests.support.ranks import alone
from tests.support.records import (
    end_line,
    evaluation_line,
    line,
    make_other,
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
    (policy,) = re.findall(r"Content-Security-Policy\" content=\"([^\"]+)\"", answer.text)
    assert f"script-src 'nonce-{nonce}'" in policy and "default-src 'none'" in policy
    with watched() as other:
        assert other.token != page.token and len(other.token) == 43
        assert nonce not in other.ask("/").text


def test_the_data_of_all_runs(page):
    first, second = page.runs()
    answer = page.ask("/data")
    assert (answer.status, answer.headers["Cache-Control"]) == (200, "no-store")
    assert answer.headers["Content-Type"].startswith("application/json")
    columns = "run status done validation best test images/s lr weight_decay"
    assert answer.json()[0] == columns.split()
    texts = [text for text, _ in first["cells"]]
    assert texts == ["a", "running", "12 %", "75.00 %", "90.00 %", "", "80.0", "0.1", "0.001"]
    assert first["notes"] == ["<script>alert(1)</script>"] and first["can_be_stopped"]
    assert first["text"] == "running"
    assert first["facts"][0] == "epoch 1 of 4, step 5 of 40"
    assert (second["text"], second["can_be_stopped"]) == ("failed: no room", False)
    texts = [text for text, _ in second["cells"]]
    assert texts == ["b", "failed", "2 %", "", "", "", "80.0", "0.2", ""]


def test_rows_are_sorted_from_the_largest_number_the_best_metric_and_the_first_text(tmp_path):
    """Accuracies before losses, of which the smallest is the best; what is unknown last."""
    ends = {"a": [0.5, 0.1], "b": [0.9, 0.2], "c": [None, "auto"], "d": [None, None]}
    for name, (accuracy, rate) in ends.items():
        loss = {"a": 0.1, "b": 0.2, "c": 0.25, "d": 0.125}[name]
        lines = [evaluation_line(1, accuracy=accuracy, loss=loss)]
        lines += [evaluation_line(1, "test")] * (name == "d")
        make_run(tmp_path / name, run_line(settings={"lr": rate, "seed": 1}), *lines)
    orders = {"run": "abcd", "validation": "badc", "lr": "bacd", "test": "dabc"}
    with watched(*(tmp_path / name for name in "abcd")) as page:
        page.runs()
        columns = page.ask("/data").json()[0]
        for column, order in orders.items():
            found = page.ask(f"/data?sort={columns.index(column)}").json()[1]
            assert "".join(run["name"] for run in found) == order


def test_the_figures_of_another_task(tmp_path):
    """The best is the smallest error; so are rows sorted, by the last one or the best."""
    errors = {"a": (3.0, 1.0), "b": (2.0, 4.0), "c": (0.5, 5.0)}
    for name, each in errors.items():
        make_other(tmp_path / name, *each)
    with watched(*(tmp_path / name for name in errors)) as page:
        texts = [[text for text, _ in run["cells"][3:6]] for run in page.runs()]
        assert texts[1:] == [["4.0000", "2.0000", "4.0000"], ["5.0000", "0.5000", "5.0000"]]
        for column, order in {3: "abc", 4: "cab"}.items():
            found = page.ask(f"/data?sort={column}").json()[1]
            assert "".join(run["name"] for run in found) == order
        curves = page.curves(1)
        facts = page.runs()[1]["facts"]
        assert "accuracy" not in page.ask("/").text  # the script draws what the curves name
    assert [*curves] == ["loss", "mae"]
    assert curves["mae"] == {"training": [[10, 2], [20, 4]], **curves["mae"]}
    assert curves["mae"]["validation"] == [[10, 2], [20, 4]]
    assert "validation loss 0.2500 mae 4.0000" in facts
    assert "best validation loss 0.2500 mae 2.0000" in facts


def test_the_curves_of_one_run(page):
    first, _ = page.runs()
    version, curves = page.of_run("/curves", 0).json()
    assert version == first["version"]
    means = [[step, pytest.approx(1 / step, rel=1e-4)] for step in range(1, 6)]
    assert curves["loss"]["training"] == means
    assert curves["accuracy"]["validation"] == [[4, 0.9], [5, 0.75]]


def test_nothing_without_the_token_no_stop_without_a_post_and_none_of_other_runs(page, runs):
    for token in ("", "x", "%C3%A9"):
        requests = [("/", "GET"), ("/data", "GET"), ("/curves", "GET"), ("/stop", "POST")]
        answers = [page.of_run(path, 0, method, token) for path, method in requests]
        assert all(each.status == 403 and page.token not in each.text for each in answers)
    for name in ("", "0", "/tmp", "%00"):
        assert page.ask(f"/curves?run={name}").status == 404
        assert page.ask(f"/stop?run={name}", "POST").status == 404
    assert page.of_run("/stop", 0).status == 404 and not (runs[0] / "STOP").exists()
    page.stop(0)
    assert (runs[0] / "STOP").exists() and not (runs[1] / "STOP").exists()


def test_requests_that_no_page_makes_are_refused_and_print_nothing(page, capfd):
    assert page.ask("/data?sort=9999").json()[0] == page.ask("/data").json()[0]
    for sort in ("x", "", "1.5", "9" * 5000, "%00", "%D9%A1", "--1", "1e3", "nan"):
        status = page.ask(f"/data?sort={sort}").status
        assert status == (400 if sort else 200), "parse_qsl leaves out what is empty"
    for method in ("PUT", "DELETE", "POST", "HEAD", "Q"):
        assert [page.ask(path, method).status for path in ("/", "/data")] == [405, 405]
        assert page.of_run("/curves", 0, method).status == 405
    with socket.create_connection(("127.0.0.1", page.port)) as connection:
        connection.sendall(b"\x16\x03\x01 \xff\r\nContent-Length: x\r\n\r\n")
        assert connection.recv(10) != b""
    assert capfd.readouterr() == ("", "")


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
