"""``hpctrain bench scale``: limits of the model, traffic of real reductions, published runs."""

import json
import math
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from hpctrain import bench, cli
from hpctrain.bench import network_job, scale
from hpctrain.bench.network_job import Measured
from hpctrain.bench.scale_figure import plot_scale
from hpctrain.bench.step_model import (
    PUBLISHED,
    SEGMENTS,
    Computation,
    Link,
    Times,
    Traffic,
    best_segments,
    efficiency,
    exposed,
    ring,
    slowest,
    tree,
)
from hpctrain.config import BenchConfig
from hpctrain.parallel.choose import choose_reduce
from hpctrain.parallel.halving import schedule, sent
from hpctrain.parallel.message import Message
from hpctrain.parallel.mpi import MPI
from hpctrain.parallel.overlap import cut
from hpctrain.parallel.placement import assign_shards
from hpctrain.parallel.transport import Transport

GIVEN = dict(step_time=0.2, latency=2.0, bandwidth=25.0)
TOLERANCE = 0.03  # stated in docs/speed.md


def inputs(tmp_path, **other):
    return scale.find_inputs(BenchConfig(case="scale", **GIVEN | other), tmp_path)


@pytest.mark.parametrize("run", PUBLISHED, ids=lambda run: f"{run.network}-{run.ranks}")
def test_the_model_gives_published_efficiencies(run):
    assert run.predict() == pytest.approx(run.published, abs=0.001 if run.fitted else TOLERANCE)


def test_one_run_per_machine_is_fitted_and_the_others_are_near_without_the_fit():
    for machine in {run.machine for run in PUBLISHED}:
        assert [run.fitted for run in PUBLISHED if run.machine == machine].count(True) == 1
    for run in PUBLISHED[:-1]:
        exact = run._replace(machine=run.machine._replace(spread=0.0))
        assert exact.predict() == pytest.approx(run.published, abs=0.04)


def test_the_model_at_its_limits(tmp_path):
    found = inputs(tmp_path, spread=5.0)
    for way, (traffic, segments) in scale.find_ways(found, 100, 1).items():
        assert traffic == (0, 0) and segments == 0, way
        assert efficiency(found.computation, found.link, traffic, 1, segments) == 1
    even, free = Computation(0.2, 0.0), Link(0.0, math.inf)
    for traffic, segments in scale.find_ways(found, 100, 4096).values():
        assert efficiency(even, free, traffic, 4096, segments) == 1
        assert efficiency(even, found.link, traffic, 4096, segments) < 1
        assert efficiency(found.computation, free, traffic, 4096, segments) < 0.9


def test_the_efficiency_of_a_step_computed_by_hand():
    link, traffic = Link(1e-3, 1e6), Traffic(10, 90_000)  # 10 ms and 90 ms
    assert efficiency(Computation(0.3, 0.0), link, traffic, 8) == pytest.approx(0.75)
    # backward takes 200 ms: of two halves, the second remains
    assert efficiency(Computation(0.3, 0.0), link, traffic, 8, 2) == pytest.approx(0.3 / 0.35)


def test_what_is_left_of_a_reduction():
    """Against a queue that is worked off segment by segment."""
    for compute, reduce in ((3.0, 1.0), (3.0, 5.0), (0.3, 7.0), (9.0, 0.1)):
        for n in (1, *SEGMENTS):
            backward, free = compute * 2 / 3, 0.0
            for segment in range(1, n + 1):
                free = max(free, backward * segment / n) + reduce / n
            assert exposed(Times(1, compute, reduce), n) == pytest.approx(free - backward)


def test_segments_are_chosen_where_they_save_time():
    assert best_segments(Times(1.0, 0.99, 0.01)) == 0
    assert best_segments(Times(1.0, 0.5, 0.5)) in SEGMENTS
    assert best_segments(Times(1.0, 0.01, 0.99)) == 0, "there is no backward to hide it behind"
    assert best_segments(Times(1.0, 0.7, 0.3)) > best_segments(Times(1.0, 0.94, 0.06)) > 0


@pytest.mark.parametrize("ranks", [1, 2, 8, 1000])
def test_the_slowest_rank_is_the_expected_maximum(ranks):
    draws = np.random.default_rng(0).normal(10, 1, (2000, ranks)).max(1).mean()
    assert slowest(Computation(10, 0.1), ranks) == pytest.approx(draws, abs=0.05)


class Counter(Transport):
    """Sends nothing, and counts what a rank would send."""

    def __init__(self, comm):
        super().__init__(comm)
        self.messages = self.bytes = 0

    def add(self, messages, size):
        self.messages, self.bytes = self.messages + messages, self.bytes + size

    def allreduce(self, vector):
        self.add(*ring(len(vector), self.comm.size))

    def exchange(self, sends, receives):
        for _, vectors in sends:
            self.add(1, sum(each.nbytes for each in vectors))

    def alltoall(self, vector, received):
        self.add(self.comm.size - 1, vector.nbytes * (self.comm.size - 1) // self.comm.size)

    def allgather(self, vector):
        self.add(self.comm.size - 1, vector.nbytes * (self.comm.size - 1) // self.comm.size)


@pytest.mark.parametrize("ranks", [2, 8, 12, 512])
def test_the_counted_traffic_is_what_the_reductions_send(ranks, tmp_path, monkeypatch):
    monkeypatch.setattr(scale, "best_segments", lambda times: 4)
    found = inputs(tmp_path, parameters=1001)
    rest = scale.make_objects(ranks).rest
    ways = scale.find_ways(found, rest, ranks)
    assert ways["tree + overlap"][1] == len(cut(found.layout, 4)) == 4
    runs = assign_shards(ranks, ranks)
    words = {
        "plain": {},
        "tree": {"runs": runs},
        "tree + overlap": {"runs": runs, "overlap": 4},
        "bf16": {"comm_dtype": "bf16"},
    }
    for way, settings in words.items():
        model = nn.ParameterList([torch.zeros(size) for size in scale.even_shares(1001, 64)])
        comm = SimpleNamespace(rank=0, size=ranks)
        message = Message(model, 0, 0, ranks)
        counter = Counter(comm)
        reduce = choose_reduce(comm, message, transport=counter, **settings)
        reduce()
        reduce.close()
        assert (counter.messages, counter.bytes) == ways[way][0], way
    length = found.layout.length + rest
    messages, numbers = sent(schedule(0, runs, length), ranks)
    assert ways["tree"][0] == tree(length, ranks) == (messages, 4 * numbers)


def test_the_message_is_that_of_resnet_50_or_of_the_parameters_given(tmp_path):
    found = inputs(tmp_path)
    assert 25_557_032 <= found.layout.length < 25_570_000 and found.channels == 26_560
    few = inputs(tmp_path, parameters=3)
    assert len(few.layout.segments) == 3 and few.channels == 0


def test_objects_of_many_ranks_are_made_and_cost_more(monkeypatch):
    monkeypatch.setattr(scale, "CALLS", 2)
    few, many = scale.make_objects(2), scale.make_objects(16_384)
    assert many.memory > few.memory + 16_384 and many.rest >= few.rest
    assert 0 < few.start < many.start and few.step > 0
    assert many.step - few.step < 1e-3


def test_only_inputs_that_are_not_given_are_measured(tmp_path, monkeypatch):
    jobs = []

    def run(command, name):
        jobs.append(command[-4:])
        steps = {"seconds": 0.5, "spread": 0.03} if command[-1] != "0" else {}
        measured = Measured(4, 1, latency=7e-6, bandwidth=3e9, **steps)
        (tmp_path / "measured.json").write_text(json.dumps(measured._asdict()))

    monkeypatch.setattr(scale, "run_job", run)
    assert inputs(tmp_path).computation == (0.2, 0.01) and jobs == []
    partly = inputs(tmp_path, latency=None)
    assert partly.computation == (0.2, 0.01) and partly.link == pytest.approx((7e-6, 25e9))
    assert partly.lines[2:] == (
        "link: 7 us a message (measured), 25 GB/s (given)",
        "measured: 4 ranks on 1 host; messages within a host say nothing about a network",
    )
    all_measured = inputs(tmp_path, step_time=None, bandwidth=None, latency=None)
    assert all_measured.computation == (0.5, 0.03)
    assert all_measured.link == pytest.approx((7e-6, 3e9))
    assert inputs(tmp_path, step_time=None, spread=0.0).computation == (0.5, 0.0)
    assert [job[-1] for job in jobs] == ["0", str(scale.STEPS), str(scale.STEPS)]


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("scale --step-time 0", "--step-time 0.0: give a number above 0"),
        ("scale --spread -1", r"--spread -1.0: give a number in \[0, 100\]"),
        ("scale --spread nan", "--spread nan"),
        ("scale --parameters 0 --step-time 1", "--parameters 0: give 1 or more"),
        ("scale --latency -2", "--latency -2.0: give 0 or more"),
        ("scale --bandwidth 0", "--bandwidth 0.0: give a number above 0"),
        ("scale --parameters 5", "--parameters 5 needs --step-time: only ResNet-50"),
        ("scale --ranks 1 --latency 2", "--ranks 1 sends no messages: give --latency and"),
        ("scale --data digits", "bench scale reads no data"),
        ("scale --plot x.bmp", "ends in .png, .svg or .pdf"),
        ("digits --latency 2", "--latency is for bench scale, not digits"),
    ],
)
def test_contradictions_are_one_line(words, error, capsys, monkeypatch):
    monkeypatch.setattr(bench, "machine_lines", lambda: pytest.fail("too late"))
    assert cli.main(["bench", *words.split()]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1
    assert re.search(error, printed.err)


def test_from_the_command_to_tables_and_figure(tmp_path, capsys, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(scale, "RANKS", (8, 16_384))
    monkeypatch.setattr(scale, "CALLS", 1)
    words = [f"--{name.replace('_', '-')}={value}" for name, value in GIVEN.items()]
    path = tmp_path / "scale.png"
    assert cli.main(["bench", "scale", *words, f"--plot={path}"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert path.stat().st_size > 10_000
    assert "This is a model: nothing ran on so many ranks" in printed
    assert "step: 0.2 s (given), standard deviation 1 % (assumed)" in printed
    assert "16,384 │ 32,766 | 204.9 │ 28 | 204.9 │" in printed
    assert "│ 0.2079 │ 71.0 │ 92.5 │ 94.3 │ 72.1 │ 2 │" in printed  # as in docs/speed.md


def test_the_figure_shows_every_published_run_and_names_every_line():
    pytest.importorskip("matplotlib")
    curves = {way: [0.9, 0.8 - 0.001 * number] for number, way in enumerate(scale.WAYS)}
    left, right = plot_scale((8, 16), curves, ("step: 1 s",)).axes
    dots = {
        (line.get_xdata()[0], line.get_ydata()[0])
        for line in left.lines
        if line.get_marker() == "o"
    }
    assert dots == {(run.ranks, 100 * run.published) for run in PUBLISHED}
    assert {text.get_text() for text in left.texts} == {run.network for run in PUBLISHED}
    heights = {text.get_text(): text.xy[1] for text in right.texts}
    assert list(heights) == list(scale.WAYS)
    assert min(-np.diff(list(heights.values()))) > 2  # they do not overlap
    assert "a model, not a measurement\nstep: 1 s" in right.get_title(loc="left")


@pytest.mark.mpi
def test_messages_between_ranks_are_timed(monkeypatch):
    monkeypatch.setattr(network_job, "LONG", 1 << 16)
    monkeypatch.setattr(network_job, "CALLS", {network_job.SHORT: 3, 1 << 16: 2})
    monkeypatch.setattr(network_job, "IMAGES", {"cpu": 2})
    monkeypatch.setattr(network_job, "IMAGE_SHAPE", (32, 32, 3))
    threads = torch.get_num_threads()
    found = network_job.measure(MPI.COMM_WORLD, 2)
    torch.set_num_threads(threads)
    assert (found.ranks, found.hosts) == (MPI.COMM_WORLD.size, 1)
    assert 0 < found.seconds < 60 and found.spread >= 0
    sends = found.ranks > 1
    assert (found.latency > 0) == (found.bandwidth > 0) == sends
    assert found == MPI.COMM_WORLD.bcast(found)


def test_latency_bandwidth_and_spread_computed_by_hand(monkeypatch):
    seconds = {
        network_job.CALLS[network_job.SHORT]: 2e-6,
        network_job.CALLS[network_job.LONG]: 2e-6 + 4 * (network_job.LONG - 1) / 3e9,
    }
    monkeypatch.setattr(network_job, "time_calls", lambda comm, call, calls: seconds[calls])
    transport = SimpleNamespace(comm=SimpleNamespace(rank=0, size=2))
    found = network_job.time_link(transport, torch.device("cpu"))
    assert found == pytest.approx((2e-6, 3e9))
    draws = np.random.default_rng(0).normal(2.0, 0.1, 10_000).tolist()
    monkeypatch.setattr(network_job, "time_steps", lambda device, steps: draws)
    threads = torch.get_num_threads()
    measured = network_job.measure(MPI.COMM_SELF, 1)
    torch.set_num_threads(threads)
    assert (measured.seconds, measured.spread) == pytest.approx((2.0, 0.05), rel=0.03)


def test_a_job_writes_what_it_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(network_job, "measure", lambda comm, steps: Measured(1, 1, steps))
    output = tmp_path / "measured.json"
    assert network_job.main(output, 3) == 0
    assert Measured(**json.loads(output.read_text())) == (1, 1, 3, 0, 0, 0)
