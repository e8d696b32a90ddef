"""scripts/gpu_check: the judging on made numbers, its clocks, and a rehearsal of every row."""

from __future__ import annotations

import argparse
import json
import sys

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import nn

from hpctrain import launch
from hpctrain.bench.gpu import check, learning, memory, parity, trace
from hpctrain.bench.gpu.case import Case, made_pack, ready, train
from hpctrain.bench.gpu.result import (
    FAILED,
    MISSED,
    NOT_RUN,
    OK,
    Result,
    attempt,
    judged,
    not_run,
    shown,
)
from hpctrain.bench.gpu.rows import ROWS
from hpctrain.cli import parse
from hpctrain.config import Config
from hpctrain.data.packed import read_pack
from hpctrain.errors import UsageError
from tests.launch import ROOT, run

CUDA_ONLY = {  # what a rehearsal cannot look at, by the start of its reason
    "parity": {"TF32 is arithmetic of GPUs"},
    "message": {"that allocator is for GPUs"},
    "memory": {"cudaMalloc is CUDA's"},
    "trace": {"torch's alarm for waits is CUDA's"},
}
START = launch.start
EXACT = ("parity", "message", "memory", "trace", "digests")  # right on a CPU too


@pytest.fixture
def case(tmp_path):
    return Case(tmp_path, rehearsal=True)


def test_numbers_are_judged_by_both_bounds():
    assert [judged("", x, least=1.0, most=2.0).verdict for x in (0.9, 1.0, 2.0, 2.1)] == [
        MISSED,
        OK,
        OK,
        MISSED,
    ]
    found = judged("speed", 12345.678, "images/s", least=0.98, n=7)
    assert found == Result("speed", OK, "12,346 images/s", ">= 0.98", 7, "", 12345.678)
    assert judged("", float("nan"), most=1.0).verdict == MISSED
    assert judged("", 5.25e-6, most=2e-5)[2:4] == ("5.2e-06", "<= 2.0e-05")
    assert shown("", False, "a", "b").verdict == MISSED


def test_an_error_becomes_a_line():
    def fail(error):
        raise error

    assert attempt("a", lambda: judged("a", 1.0)).verdict == OK
    assert attempt("a", lambda: fail(UsageError("no --such"))) == not_run("a", "no --such")
    failed = attempt("a", lambda: fail(RuntimeError("CUDA error\nmore")))
    assert (failed.verdict, failed.remark) == (FAILED, "RuntimeError: CUDA error")


def test_a_trace_tells_kernels_and_copies():
    events = [
        {"cat": "kernel", "name": "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgs)"},
        {"cat": "kernel", "name": "void at::native::vectorized_elementwise_kernel<4>"},
        {"cat": "cpu_op", "name": "nccl:all_reduce"},
        {"cat": "gpu_memcpy", "name": "Memcpy DtoH (Device -> Pinned)", "args": {"bytes": 64}},
        {"cat": "gpu_memcpy", "name": "Memcpy DtoH (Device -> Pageable)", "args": {"bytes": 8}},
        {"cat": "gpu_memcpy", "name": "Memcpy HtoD (Pinned -> Device)", "args": {"bytes": 999}},
        {"ph": "M", "name": "process_name"},
    ]
    assert trace.nccl_kernels(events) == 1
    assert trace.copied_bytes(events, "DtoH") == 72


def test_calls_of_one_object_are_counted_and_made():
    class Sum:
        def allreduce(self, vector):
            vector += 1

    one, other, vector = Sum(), Sum(), np.zeros(1)
    calls = trace.count_calls(one, "allreduce")
    one.allreduce(vector)
    other.allreduce(vector)
    assert (len(calls), vector[0]) == (1, 2)


def test_the_alarm_tells_waits_from_other_errors():
    def wait():
        raise RuntimeError("called a synchronizing CUDA operation\nand more")

    def bug():
        raise RuntimeError("index out of range")

    assert trace.alarm(wait) == "called a synchronizing CUDA operation"
    assert trace.alarm(lambda: 1) == ""
    with pytest.raises(RuntimeError, match="out of range"):
        trace.alarm(bug)


def test_parts_lie_within_the_whole():
    whole = torch.zeros(10)
    assert memory.within(whole[4:], whole) and memory.within(whole, whole)
    assert not memory.within(torch.zeros(3), whole)
    assert not memory.within(whole, whole[4:])
    assert not memory.within(whole[2:8], whole[4:])


def test_smooth_networks_have_no_kinks():
    kinds = {type(m) for m in parity.resnet18((32, 32, 3), 5).modules()}
    assert not kinds & {nn.ReLU, nn.MaxPool2d} and {nn.Softplus, nn.AvgPool2d} <= kinds
    torch.manual_seed(0)
    narrow = parity.digits((28, 28, 1), 5)
    torch.manual_seed(0)
    wide = parity.digits_float64((28, 28, 1), 5)
    assert wide.fc.weight.dtype == torch.float64 and torch.equal(
        wide.fc.weight.float(), narrow.fc.weight
    )
    assert parity.distance(torch.tensor([3.0, 4.5]), torch.tensor([3.0, 4.0])) == pytest.approx(0.1)


def test_arithmetic_other_than_asked_for_is_seen(case):
    """bf16 in place of fp32, and fp32 in place of bf16, are out of bounds."""
    pack = made_pack(case, parity.ROWS, (28, 28, 1), smooth=True)
    exact = parity.gradient(case, pack, "digits_float64", "fp32", "cpu")
    errors = {
        precision: parity.distance(parity.gradient(case, pack, "digits", precision, "cpu"), exact)
        for precision in ("fp32", "bf16")
    }
    assert errors["fp32"] < parity.BOUNDS["tf32"][0] < parity.BOUNDS["bf16"][0] < errors["bf16"]
    assert errors["fp32"] < parity.BOUNDS["fp32"][1] < errors["bf16"] < parity.BOUNDS["bf16"][1]


def test_flags_that_are_not_there_are_refused_before_a_run(case):
    with pytest.raises(UsageError, match="no setting 'such'"):
        train(case, "--such", "3")
    with pytest.raises(UsageError, match="--lr is 0"):
        ready(case, "--lr", "0")


def test_a_run_that_is_wrongly_asked_for_is_not_run(case):
    pack = made_pack(case, 8, (28, 28, 1))
    found = attempt("a", lambda: judged("a", len(train(case, "--data", pack, "--shift", "40"))))
    assert (found.verdict, found.remark[:13]) == (NOT_RUN, "--shift is 40")


def test_the_recipe_is_one_and_fits_pixels_too(case):
    _, config = parse(["train", "--config", str(learning.RECIPE)])
    assert (config.model, config.epochs, config.precision) == ("resnet50", 100, "bf16")
    assert config.random_crop > 0 and config.schedule == "cosine"
    pack = made_pack(case, 48, (28, 28, 3))
    assert learning.adapted(pack) == learning.PIXELS
    _, fitted = parse(["train", "--config", str(learning.RECIPE), *learning.PIXELS])
    assert fitted.random_crop == 0 and fitted.shift > 0
    assert fitted.lr == config.lr != Config.lr


def test_a_pack_of_files_needs_nothing_adapted(monkeypatch):
    monkeypatch.setattr(
        "hpctrain.data.packed.read_pack", lambda path: argparse.Namespace(encoded=True)
    )
    assert learning.adapted("any.h5") == ()


def test_no_flowers_is_no_failure(case):
    (found,) = learning.flowers(Case(case.folder, rehearsal=True, data="nowhere.h5"))
    assert found.verdict == NOT_RUN and found.remark.startswith("no flowers: --data 'nowhere.h5'")


def test_made_packs_hold_what_was_asked(case):
    pack = read_pack(made_pack(case, 11, (6, 5, 3), smooth=True, test=4))
    assert {name: split.rows for name, split in pack.splits.items()} == {"train": 11, "test": 4}
    assert pack.image_shape == (6, 5, 3)


def options(**more):
    return argparse.Namespace(
        **{"rehearse": True, "data": None, "only": None, "output": None, **more}
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


def test_a_row_that_hangs_is_ended(monkeypatch, tmp_path):
    monkeypatch.setattr(check, "LEAST", 0.1)
    use_script(monkeypatch, "import time; time.sleep(60)")
    (found,) = check.run_row("parity", options(), tmp_path / "log", 1.0)
    assert (found.verdict, found.remark) == (NOT_RUN, "its 1 s were over")
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
    assert [code(v, rehearse=False) for v in (OK, NOT_RUN, MISSED, FAILED)] == [0, 0, 1, 1]
    assert capsys.readouterr().out.count(check.REHEARSAL) == 8


def test_rows_and_folders_are_checked(tmp_path):
    assert check.chosen(None) == list(ROWS) and check.chosen("trace,parity") == ["trace", "parity"]
    with pytest.raises(UsageError, match="no such row, did you mean 'parity'"):
        check.chosen("party")
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


@pytest.mark.parametrize(
    "names",
    ["parity,message,memory,trace,staging", "digits,flowers,peers", "digests,several", "speed"],
)
def test_a_rehearsal_goes_through_every_row(names, tmp_path):
    done = gpu_check("--rehearse", "--only", names, "--output", str(tmp_path / "out"))
    told = (tmp_path / "out/log.txt").read_text() + done.stdout + done.stderr
    assert done.returncode == 0, told
    assert done.stdout.count(check.REHEARSAL) == 2
    left = json.loads((tmp_path / "out/results.json").read_text())
    assert left["rehearsal"] is True and left["machine"]["torch"] == torch.__version__
    assert list(left["rows"]) == names.split(",")
    for name, lines in left["rows"].items():
        results = [Result(**line) for line in lines]
        reasons = {r.remark for r in results if r.verdict == NOT_RUN}
        reasons = {r for r in reasons if not r.startswith(("there is no setting", "argument --"))}
        assert reasons <= CUDA_ONLY.get(name, set()), told
        assert any(r.verdict in (OK, MISSED) for r in results), told
        if name in EXACT:
            assert {r.verdict for r in results} <= {OK, NOT_RUN}, told
    text = (tmp_path / "out/table.txt").read_text().splitlines()
    assert [line.split()[0] for line in text if line[1:2].strip()] == ["row", *names.split(",")]


def test_all_rows_are_rehearsed():
    (mark,) = test_a_rehearsal_goes_through_every_row.pytestmark
    assert sorted(",".join(mark.args[1]).split(",")) == sorted(ROWS)
