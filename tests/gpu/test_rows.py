"""The rows of scripts/gpu_check: what they conclude from made numbers and on a CPU."""

from __future__ import annotations

import argparse

import numpy as np
import pytest
import torch
from torch import nn

from hpctrain.cli import parse
from hpctrain.config import Config, check_settings
from hpctrain.data.packed import read_pack
from hpctrain.errors import UsageError
from scripts.benchmarks.gpu import memory, parity, peers, runs, trace
from scripts.benchmarks.gpu.case import (
    FAILED,
    MISSED,
    NOT_RUN,
    OK,
    Case,
    Result,
    attempt,
    judged,
    made_pack,
    not_run,
    ready,
    shown,
    train,
)


@pytest.fixture
def case(tmp_path):
    return Case(tmp_path, rehearsal="cpu")


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

    assert attempt("a", lambda what: judged(what, 1.0)).verdict == OK
    assert attempt("a", lambda _: fail(UsageError("no --such"))) == not_run("a", "no --such")
    failed = attempt("a", lambda _: fail(RuntimeError("CUDA error\nmore")))
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
    assert (trace.kernels(events, "nccl"), trace.kernels(events)) == (1, 2)
    assert trace.copied_bytes(events, "DtoH") == 72


def test_an_empty_trace_proves_nothing(case, monkeypatch):
    monkeypatch.setattr(trace, "profiled", lambda step, path, on_gpu: [])
    monkeypatch.setattr(Case, "size", lambda case, real, tiny: real if real == 1 else tiny)
    found = {result.what: result.verdict for result in trace.traced(case, (), "MPI")}
    assert list(found.values()) == [MISSED, OK, MISSED, MISSED]  # calls, NCCL, kernels, bytes


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
    assert not memory.within(whole[2:8], whole[4:]) and not memory.within(whole[4:], whole[2:8])


def test_a_silent_alarm_proves_nothing(case, monkeypatch):
    modes = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    found = trace.unwaiting("a", case, ())
    assert (found.verdict, found.value) == (MISSED, "alarm silent")
    assert modes == ["error", "default"]
    answers = iter(["", "it waited"])
    monkeypatch.setattr(trace, "alarm", lambda work: next(answers))
    assert trace.unwaiting("a", case, ()).verdict == OK
    answers = iter(["step waited", "it waited"])
    found = trace.unwaiting("a", case, ())
    assert (found.verdict, found.value) == (MISSED, "step waited")


def test_memory_is_plain_where_the_driver_says_so_of_it_alone(case, monkeypatch):
    def plain(found, host):
        monkeypatch.setattr(memory, "attributes", lambda place: found)
        monkeypatch.setattr(memory, "attribute", lambda place, number: host)
        return memory.plain_memory("a", case).verdict

    monkeypatch.setattr(memory, "pinned_memory", lambda: torch.zeros(4))
    assert plain(memory.PLAIN, host=1) == OK
    assert plain(memory.PLAIN, host=memory.DEVICE_MEMORY) == MISSED
    assert plain({**memory.PLAIN, "legacy IPC": 0}, host=1) == MISSED


def test_the_pool_of_torch_is_known_by_its_segments(monkeypatch):
    tensor = torch.zeros(10)
    segment = {"address": tensor.data_ptr() - 64, "total_size": 65}
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: [segment])
    assert memory.in_torch_pool(tensor)
    segment["total_size"] = 64
    assert not memory.in_torch_pool(tensor)


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
    with pytest.raises(UsageError, match="unknown option '--such'"):
        train(case, "--such", "3")
    with pytest.raises(UsageError, match="--lr 0"):
        ready(case, "--lr", "0")


def test_all_ways_to_run_can_be_asked_for(case):
    flags = runs.workload(case)
    for _, more in runs.WAYS:
        _, config = parse(["train", *flags, *more])
        check_settings(config)
    with pytest.raises(UsageError, match="exclude each other"):
        check_settings(parse(["train", "--cuda-graphs", "--overlap", "3"])[1])


def test_a_run_that_is_wrongly_asked_for_is_not_run(case):
    pack = made_pack(case, 8, (28, 28, 1))
    found = attempt(
        "a", lambda what: judged(what, len(train(case, "--data", pack, "--shift", "40")))
    )
    assert (found.verdict, found.remark[:13]) == (NOT_RUN, "--shift is 40")


def test_the_recipe_is_one_and_fits_pixels_too(case):
    _, config = parse(["train", "--config", str(runs.RECIPE)])
    assert (config.model, config.epochs, config.precision) == ("resnet50", 100, "bf16")
    assert config.random_crop > 0 and config.schedule == "cosine"
    pack = made_pack(case, 48, (28, 28, 3))
    assert runs.adapted(pack) == runs.PIXELS
    _, fitted = parse(["train", "--config", str(runs.RECIPE), *runs.PIXELS])
    assert fitted.random_crop == 0 and fitted.shift > 0
    assert fitted.lr == config.lr != Config.lr


def test_a_pack_of_files_needs_nothing_adapted(monkeypatch):
    monkeypatch.setattr(
        "hpctrain.data.packed.read_pack", lambda path: argparse.Namespace(encoded=True)
    )
    assert runs.adapted("any.h5") == ()


def test_no_flowers_is_no_failure(case):
    (found,) = runs.flowers(Case(case.folder, rehearsal="cpu", data="nowhere.h5"))
    assert found.verdict == NOT_RUN and found.remark.startswith("no flowers: --data 'nowhere.h5'")


def test_made_packs_hold_what_was_asked(case):
    pack = read_pack(made_pack(case, 11, (6, 5, 3), smooth=True, test=4))
    assert {name: split.samples for name, split in pack.splits.items()} == {"train": 11, "test": 4}
    assert pack.image_shape == (6, 5, 3)


def test_peers_are_measured_in_turn_and_by_medians(monkeypatch):
    monkeypatch.setattr(peers, "ROUNDS", 2)
    calls = []
    ways = {name: lambda number, name=name: calls.append((name, number)) for name in "ab"}
    seconds = peers.rounds(ways, 2)
    assert calls == 3 * [("a", 0), ("a", 1), ("b", 0), ("b", 1)]
    assert {name: len(values) for name, values in seconds.items()} == {"a": 2, "b": 2}
    found = peers.ratio("a", "b", {"a": [3.0, 9.0, 2.0], "b": [4.0, 6.0, 9.0]})
    assert (found.what, found.number, found.verdict, found.n) == ("a / b", 0.5, MISSED, 3)


def test_staging_is_what_is_reached_of_the_copies(case, monkeypatch):
    monkeypatch.setattr(peers, "rounds", lambda ways, steps: {"staged": [5.0], "copies": [4.0]})
    (found,) = peers.staging(case)
    assert (found.number, found.verdict) == (0.8, OK)


def rates(monkeypatch, by_flag):
    """Let a run's speed be that of the flag it has, the last of `by_flag` that it has."""

    def rate(case, side, *flags, ranks=1):
        words = [*flags, str(ranks)]
        return next(number for flag, number in reversed(by_flag.items()) if flag in words), 7

    monkeypatch.setattr(runs, "rate", rate)


def test_ways_to_be_faster_are_compared_with_none(case, monkeypatch):
    rates(
        monkeypatch,
        {"1": 9.5, "fp32": 10.0, "tf32": 9.0, "bf16": 100.0, "--cuda-graphs": 98, "--compile": 97},
    )
    found = {result.what.split(", ", 1)[1]: result for result in runs.speed(case)}
    assert {what: result.verdict for what, result in found.items()} == {
        **dict.fromkeys(("default", "fp32", "tf32", "bf16", "bf16, graphs"), OK),
        "bf16, compile": MISSED,
    }
    assert found["bf16"].target == "" and found["bf16"].n == 7


def test_several_gpus_are_compared_with_one(case, monkeypatch):
    rates(monkeypatch, {"1": 100.0, "2": 180.0, "--overlap": 170.0})
    monkeypatch.setattr(runs, "digest", lambda case, *flags, ranks=1: str(ranks))
    same, growth, gain = runs.several(case)
    assert (same.verdict, growth.verdict, gain.verdict) == (MISSED, OK, MISSED)
    assert (growth.number, gain.number) == (0.9, 170 / 180)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    (alone,) = runs.several(Case(case.folder))
    assert (alone.verdict, alone.remark) == (NOT_RUN, "needs 2 GPUs")


@pytest.mark.parametrize(("accuracy", "verdict"), [(0.6649, MISSED), (0.67, OK)])
def test_the_reference_is_to_be_beaten(case, monkeypatch, accuracy, verdict):
    evaluation = {"kind": "evaluation", "split": "test", "accuracy": accuracy, "rows": 367}
    records = [{"kind": "epoch"}, {"kind": "epoch"}, evaluation, {"kind": "end"}]
    monkeypatch.setattr(runs, "train", lambda case, *flags: records)
    found, seconds = runs.flowers(case)
    assert (found.verdict, found.n, found.what[-8:]) == (verdict, 367, "2 epochs")
    assert seconds.number < 1
