"""scripts/gpu_check: its processes and clocks, its table and exit code, a rehearsal of all rows."""

from __future__ import annotations

import argparse
import json
import os
import sys
import uuid

import pytest
import torch
from rich.console import Console

from hpctrain import launch
from hpctrain.errors import UsageError
from scripts.benchmarks.gpu import check
from scripts.benchmarks.gpu.case import (
    FAILED,
    MISSED,
    NOT_RUN,
    OK,
    Result,
    judged,
    not_run,
)
from scripts.benchmarks.gpu.rows import ROWS
from tests.support.launch import ROOT, marked, run

CUDA_ONLY = {  # why a rehearsal leaves lines out, by row
    "parity": {"only a real GPU computes in TF32"},
    "message": {"CuPy does not allocate it"},
    "memory": {"CuPy does not allocate it"},
    "trace": {"torch's alarm for waits is CUDA's"},
    **{row: {"--cuda-graphs is for GPUs"} for row in ("peers", "digests", "speed")},
}
START = launch.start
EXACT = ("parity", "message", "memory", "trace", "digests")  # right on a CPU too


def options(**more):
    return argparse.Namespace(
        **{"rehearse": "cpu", "data": None, "only": None, "output": None, **more}
    )


def use_script(monkeypatch, text):
    """Let every row be this program, which is told the folder of the row."""

    def other(command, log, env):
        return START([sys.executable, "-c", text, command[4]], log, env)

    monkeypatch.setattr(check.launch, "start", other)


def test_a_row_that_dies_keeps_what_it_found(monkeypatch, tmp_path):
    line = json.dumps(judged("a", 1.0)._asdict())
    write = f"import sys; open(sys.argv[1] + '/results.jsonl', 'w').write({line!r} + '\\n'); "
    use_script(monkeypatch, write + "raise SystemError('it broke')")
    found = check.run_row("parity", options(), tmp_path / "log", 60)
    assert [result.verdict for result in found] == [OK, FAILED]
    assert found[1].remark == "(1) SystemError: it broke"
    assert "it broke" in (tmp_path / "log").read_text()
    use_script(monkeypatch, "pass")
    (nothing,) = check.run_row("parity", options(), tmp_path / "log", 60)
    assert nothing.verdict == FAILED


def test_a_row_that_hangs_is_ended_with_all_that_it_started(monkeypatch, tmp_path):
    monkeypatch.setattr(check, "LEAST", 0.1)
    mark = f"HPCTRAIN_TEST_JOB={uuid.uuid4()}"
    monkeypatch.setenv(*mark.split("="))
    # Deaf to SIGTERM, as a run that saves first.
    deaf = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(60)"
    text = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {deaf!r}]);"
    use_script(monkeypatch, text + "time.sleep(60)")
    monkeypatch.setattr(check, "PATIENCE", 0.5)
    (found,) = check.run_row("parity", options(), tmp_path / "log", 1.0)
    assert (found.verdict, found.remark) == (NOT_RUN, "its 1 s were over")
    assert set(marked(mark)) <= {os.getpid()}
    (late,) = check.run_row("parity", options(), tmp_path / "log", 0.0)
    assert "for all rows were over" in late.remark


def test_the_exit_code_says_whether_all_is_well(monkeypatch, tmp_path, capsys):
    def code(verdict, **more):
        folder = tmp_path / f"{verdict}{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        monkeypatch.setattr(check, "run_row", lambda *_: [Result("a", verdict)])
        return check.check(options(**more), ["parity"], folder)

    assert [code(v) for v in (OK, NOT_RUN, MISSED, FAILED)] == [0, 0, 0, 1]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert [code(v, rehearse=None) for v in (OK, NOT_RUN, MISSED, FAILED)] == [0, 0, 1, 1]
    assert capsys.readouterr().out.count(check.REHEARSAL) == 8


def test_rows_packs_and_folders_are_checked(tmp_path, monkeypatch, capsys):
    assert check.chosen(None) == list(ROWS) and check.chosen("trace,parity") == ["trace", "parity"]
    with pytest.raises(UsageError, match="no such row, did you mean 'parity'"):
        check.chosen("party")
    with pytest.raises(UsageError, match="--only : there is no such row"):
        check.chosen("")
    monkeypatch.setattr(sys, "argv", ["gpu_check", "--data", "nowhere.h5", "--rehearse"])
    assert check.main() == 2
    assert capsys.readouterr().err == "gpu_check: --data nowhere.h5: there is no such file\n"
    with pytest.raises(UsageError, match="name a new folder"):
        check.make_folder(tmp_path)
    assert check.make_folder(tmp_path / "a" / "b").is_dir()


def test_the_table_tells_all():
    console = Console(width=160)
    found = {"trace": [judged("kernels", 3.0, most=1.0, n=5), not_run("waits", "no GPU here")]}
    with console.capture() as shown_:
        console.print(check.table(found, plain=True))
    _, first, second = (line.split() for line in shown_.get().splitlines()[:3])
    assert first == ["trace", "kernels", "3", "<=", "1", "5", "MISSED"]
    assert second == ["waits", "not", "run:", "no", "GPU", "here"]


def gpu_check(*words, timeout=110):
    return run([sys.executable, str(ROOT / "scripts/gpu_check"), *words], timeout)


def test_without_a_gpu_nothing_is_checked_and_the_exit_code_says_so(tmp_path):
    if torch.cuda.device_count():
        pytest.skip("there is a GPU")
    done = gpu_check("--output", str(tmp_path / "out"))
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "gpu_check: torch sees no GPU, nothing was checked; --rehearse runs all on the CPU"
    ]
    assert done.stdout.count("not run: no GPU here") == len(ROWS)
    rows = json.loads((tmp_path / "out/results.json").read_text())["rows"]
    assert {r["verdict"] for results in rows.values() for r in results} == {NOT_RUN}


@pytest.mark.slow
@pytest.mark.parametrize(
    "names",
    ["parity,message,memory,trace,staging", "digits,flowers,peers", "digests", "several", "speed"],
)
def test_a_rehearsal_goes_through_every_row(names, tmp_path):
    done = gpu_check("--rehearse", "--only", names, "--output", str(tmp_path / "out"))
    said = (tmp_path / "out/log.txt").read_text() + done.stdout + done.stderr
    assert done.returncode == 0, said
    assert done.stdout.count(check.REHEARSAL) == 2
    left = json.loads((tmp_path / "out/results.json").read_text())
    assert left["rehearsal"] is True and left["machine"]["torch"] == torch.__version__
    assert list(left["rows"]) == names.split(",")
    for name, lines in left["rows"].items():
        results = [Result(**line) for line in lines]
        reasons = {r.remark.partition(":")[0] for r in results if r.verdict == NOT_RUN}
        assert reasons <= CUDA_ONLY.get(name, set()), said
        assert any(r.verdict in (OK, MISSED) for r in results), said
        if name in EXACT:
            assert {r.verdict for r in results} <= {OK, NOT_RUN}, said
    text = (tmp_path / "out/table.txt").read_text().splitlines()
    assert [line.split()[0] for line in text if line[1:2].strip()] == ["row", *names.split(",")]


@pytest.mark.emulated_gpu
@pytest.mark.timeout(300)
def test_a_rehearsal_on_gpus_leaves_out_what_only_real_ones_have(tmp_path):
    words = ("--rehearse", "cuda", "--only", "trace,digests")
    done = gpu_check(*words, "--output", str(tmp_path / "out"), timeout=290)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "out/results.json").read_text())["rows"]
    left = [r["remark"] for results in rows.values() for r in results if r["verdict"] != OK]
    assert left == ["only a real GPU has a profiler"], done.stdout


def test_all_rows_are_rehearsed():
    (mark, _) = test_a_rehearsal_goes_through_every_row.pytestmark
    assert sorted(",".join(mark.args[1]).split(",")) == sorted(ROWS)
