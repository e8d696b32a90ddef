"""The emulated GPU itself: a program that forgets to wait has wrong numbers on it in some order,
and the same program with its wait the right ones in every order.
"""

from __future__ import annotations

import sys

import pytest
import torch

from tests.gpu.emulator import ORDERS
from tests.support.launch import ROOT, run

pytestmark = [
    pytest.mark.emulated_gpu,
    pytest.mark.filterwarnings("default"),  # torch tells of prototypes
]
SEEDS = [str(seed) for seed in range(1, 9)]
LENGTH = 1009


@pytest.fixture
def orders():
    """Do a piece of work in several orders: its results. No order is weakened by a slow machine:
    nothing goes on by itself.
    """
    import emulated_gpu

    def collect(work, names):
        found = {}
        for name in names:
            torch.cuda.empty_cache()
            emulated_gpu.set_order(name, idle=60_000)
            found[name] = work()
            torch.cuda.synchronize()
        return found

    yield collect
    emulated_gpu.set_order("free")


def ones(**options):
    return torch.ones(LENGTH, **options)


def read_by_host(waits):
    """A copy to pinned memory that the host reads."""
    host = torch.zeros(LENGTH, pin_memory=True)
    host.copy_(ones(device="cuda") * 3, non_blocking=True)
    copied = torch.cuda.current_stream().record_event()
    if waits:
        copied.synchronize()
    return host.sum().item() == 3 * LENGTH


def refilled(waits):
    """A pinned buffer that is filled again."""
    host = ones(pin_memory=True)
    first = host.to("cuda", non_blocking=True)
    if waits:
        torch.cuda.current_stream().record_event().synchronize()
    host.fill_(7)
    return first.sum().item() == LENGTH


def freed(records):
    """A tensor of one stream, used on another and dropped by the host."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        made = ones(device="cuda") * 5
    torch.cuda.current_stream().wait_stream(side)
    total = made.mul(2)
    if records:
        made.record_stream(torch.cuda.current_stream())
    del made
    with torch.cuda.stream(side):
        torch.zeros(LENGTH, device="cuda")
    return total.sum().item() == 10 * LENGTH


def handed_over(waits):
    """Work on one stream whose result another uses."""
    side = torch.cuda.Stream()
    start = torch.zeros(LENGTH, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        start.add_(2)
    if waits:
        torch.cuda.current_stream().wait_stream(side)
    total = start.sum()
    start.record_stream(side)
    return total.item() == 2 * LENGTH


@pytest.mark.parametrize("program", [read_by_host, refilled, freed, handed_over])
def test_what_is_not_waited_for_is_wrong_in_some_order(program, orders):
    right = orders(lambda: program(True), [*ORDERS, "free", *SEEDS])
    assert set(right.values()) == {True}, right
    wrong = orders(lambda: program(False), [*ORDERS, *SEEDS])
    assert wrong["early"] is True
    assert wrong["late"] is False, wrong
    assert not all(wrong[seed] for seed in SEEDS)


def pageable(_):
    """Pageable memory: read before a copy up returns, written when a copy down has returned."""
    host, back = ones(), torch.zeros(LENGTH)
    up = host.to("cuda", non_blocking=True)
    host.fill_(7)
    back.copy_(up, non_blocking=True)
    return back.sum().item() == LENGTH


def test_copies_of_pageable_memory_need_no_wait(orders):
    right = orders(lambda: pageable(False), [*ORDERS, "free", *SEEDS])
    assert set(right.values()) == {True}, right


TWO = """
import torch
one, other = (torch.ones(7, device=f"cuda:{n}") for n in range(2))
mixed = (lambda: one + other, lambda: one + torch.ones(7), lambda: torch.cat([one, other]))
for work in (*mixed, lambda: torch.tensor(1.0).add_(one[0])):
    try:
        work()
    except RuntimeError as error:
        print(str(error).splitlines()[0])
    else:
        raise SystemExit("taken")
assert (one.to("cuda:1") + other).sum().item() == 14
assert len({torch.cuda.get_device_properties(n).uuid for n in range(2)}) == 2
seen = torch.as_tensor(type("", (), {"__cuda_array_interface__": other.__cuda_array_interface__})())
assert seen.device == other.device and torch.cuda.current_device() == 0
"""


def test_devices_have_memory_of_their_own():
    done = run([sys.executable, "-c", TWO], 100, {"HPCTRAIN_EMULATED_GPUS": "2"}, ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("same device") == 3 and done.stdout.count("writes a tensor") == 1


RACES = """
import races, torch
from tests.gpu.test_emulator import handed_over
handed_over(True)
values, graph = torch.ones(9, device="cuda"), torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):  # captured on a stream of its own, launched on the current one
    doubled = values * 2
values.copy_(torch.ones(9))
graph.replay()
assert not races.found and doubled.sum() == 18, races.found
handed_over(False)
print(len(races.found), races.found)
"""


def test_a_missing_wait_is_named_as_a_race_whatever_came_of_it():
    env = {"HPCTRAIN_EMULATED_GPU_RACES": "1", "HPCTRAIN_EMULATED_GPU_ORDER": "early"}
    done = run([sys.executable, "-c", RACES], 100, env, ROOT)
    assert done.returncode == 0 and done.stdout.startswith("1 "), done.stdout + done.stderr
    assert "aten::sum" in done.stdout and "in handed_over" in done.stdout
    assert done.stderr.count("RACE") == 1
