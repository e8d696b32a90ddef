"""The benchmark: its arithmetic on made records, its jobs, and one tiny run of the real driver."""

import os
import sys
import time

import numpy as np
import pytest
from rich.console import Console

from hpctrain import cli
from hpctrain.bench import balance, data, jobs, readers, sweep, tree
from hpctrain.bench import command as bench
from hpctrain.bench.report import (
    BF16,
    DEFAULT,
    FORMATS,
    START,
    TRAINERS,
    WRITTEN,
    Contestant,
    ratio,
    table,
    target_lines,
    targets,
)
from hpctrain.config import BenchConfig
from hpctrain.data.pack import write_pack
from hpctrain.data.packed import read_pack
from hpctrain.errors import RunError, UsageError
from tests.launch import ALLOWED

LIMIT = Contestant("limit", "fp32", True)
CASE = bench.Case("digits", "pack.h5", 128, epochs=3, warm=71)


@pytest.fixture
def alone(monkeypatch):
    """As called from a shell: no launcher's variables, but its permissions."""
    for name in [n for n in os.environ if n.startswith(("OMPI_COMM", "PMI_", "SLURM_STEP"))]:
        monkeypatch.delenv(name)
    for name, value in ALLOWED.items():
        monkeypatch.setenv(name, value)


def make_pack(path, rows, shape=(28, 28, 1)):
    images = np.random.default_rng(7).integers(256, size=(rows, *shape), dtype=np.uint8)
    write_pack(path, {"train": (images, np.arange(rows) % 10)}, tuple("0123456789"), {})
    return path


def step(seconds, rows, own):
    """A step's record, `seconds` after midnight; its own seconds are `own`."""
    moment = f"2026-01-01T00:00:{seconds:06.3f}Z"
    return {"kind": "step", "time": moment, "rows": rows, "seconds": {"total": own}}


def test_steps_are_timed_from_the_end_of_the_warm_up():
    steps = [step(1, 64, 1), step(5, 64, 4), step(7, 64, 1), step(9.5, 17, 2)]
    assert jobs.steps_rate(steps, 2) == (pytest.approx(81 / 4.5), pytest.approx(3 / 4.5))
    assert jobs.steps_rate(steps, 1)[0] == pytest.approx(145 / 8.5)


def test_independent_ranks_count_by_the_slowest():
    assert bench.peers_rate([{"rows": 30, "seconds": 2.0}, {"rows": 31, "seconds": 4.0}]) == 61 / 4


def test_ratios_are_of_medians():
    results = {DEFAULT: [30.0, 90.0, 36.0], WRITTEN: [24.0, 1.0, 30.0]}
    assert ratio(results, DEFAULT, WRITTEN) == 1.5
    assert ratio(results, DEFAULT, LIMIT) is None
    assert ratio({DEFAULT: [], WRITTEN: [1.0]}, DEFAULT, WRITTEN) is None


def cells(case, results):
    """The table as printed: the cells of each line by its first one."""
    console = Console(width=140, no_color=True)
    with console.capture() as captured:
        console.print(table(case, results))
    lines = [line.split("│") for line in captured.get().splitlines() if line.startswith("│")]
    return {line[1].strip(): [cell.strip() for cell in line[2:-1]] for line in lines}


def test_the_table_shows_median_range_and_ratios():
    results = {
        DEFAULT: [4500.0, 4000.0, 5000.0],
        LIMIT: [4600.0, 4800.0, 4700.0],
        WRITTEN: [3000.0, 2900.0, 3100.0],
        START: [5.25, 5.0, 5.5],
    }
    found = cells("digits", results)
    assert found[DEFAULT.name] == ["fp32 NHWC", "4,500", "4,000 - 5,000", "1.500", "", "0.957"]
    assert found[START.name] == ["fp32 NHWC", "5.25 s", "5.00 - 5.50", "", "", ""]
    assert found[WRITTEN.name][3:] == ["", "", ""]


def test_targets_are_reached_or_missed():
    results = {DEFAULT: [95.0] * 3, LIMIT: [100.0] * 3, WRITTEN: [64.0] * 3, START: [6.01] * 3}
    lines = target_lines("digits", results)
    assert [line.split()[0] for line in lines] == ["MISSED", "reached", "MISSED"]
    assert lines[1] == f"reached 0.950  hpctrain fp32 NHWC >= 0.95 x {LIMIT.name}"
    results[WRITTEN], results[START] = [63.0] * 3, [5.9] * 3
    assert all(line.startswith("reached") for line in target_lines("digits", results))
    results[LIMIT] = [100.0] * 2
    assert "nothing to quote" in target_lines("digits", results)[-1]


def test_every_target_is_measured():
    for case in ("digits", "resnet50"):
        assert all(t.who in TRAINERS and t.against in TRAINERS for t in targets(case))
    assert {t.factor for t in targets("resnet50") if t.who == BF16} == {1.9, 1.0, 0.88}


@pytest.mark.parametrize("contestant", [*TRAINERS, START], ids=lambda c: f"{c.name} {c.format}")
def test_jobs_differ_in_what_is_compared_only(contestant, tmp_path):
    command = bench.command(contestant, CASE, tmp_path)
    assert command[1:4] == ["-n", "4" if contestant == START else "2", sys.executable]
    if contestant.kind in ("hpctrain", "start"):
        name, settings = cli.parse(command[6:])
        assert (name, settings.threads, settings.batch_size) == ("train", 1, 128)
        assert settings.epochs == (1 if contestant == START else 3)
        assert (settings.precision, settings.channels_last) == (
            contestant.precision,
            contestant.channels_last,
        )
    else:
        text = " ".join(command)
        assert f"{contestant.kind} --model digits --pack pack.h5 --batch 128 --epochs 3" in text
        assert ("--channels-last" in text) == contestant.channels_last
        assert f"--precision {contestant.precision} " in text


def test_all_formats_meet_their_like():
    for kind in ("hpctrain", "limit", "ddp"):
        found = [(c.precision, c.channels_last) for c in TRAINERS if c.kind == kind]
        assert found == list(FORMATS)


def test_jobs_run_on_one_thread_whatever_the_shell_says(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    monkeypatch.setenv("PRTE_MCA_rmaps_default_mapping_policy", "slot")
    given = jobs.environment()
    assert given["OMP_NUM_THREADS"] == "1"
    assert given["PRTE_MCA_rmaps_default_mapping_policy"] == "slot"


def test_a_job_that_fails_says_why(capsys):
    program = "print('first', flush=True); raise SystemError('the cause')"
    with pytest.raises(RunError, match=r"^the job failed \(1\): SystemError: the cause\nfirst\n"):
        jobs.run_job([sys.executable, "-c", program], "the job")
    with pytest.raises(UsageError, match=r"^--lr is 0$"):
        jobs.run_job([sys.executable, "-c", "print('hpctrain: --lr is 0'); exit(2)"], "the job")
    capsys.readouterr()
    jobs.run_job([sys.executable, "-c", "print('Error')"], "the job")
    assert capsys.readouterr().err == "running the job ...\n"


def test_a_job_that_hangs_is_ended(monkeypatch):
    monkeypatch.setattr(jobs, "JOB_LIMIT", 0.3)
    began = time.monotonic()
    with pytest.raises(RunError, match="not done after"):
        jobs.run_job([sys.executable, "-c", "import time; time.sleep(60)"], "the job")
    assert time.monotonic() - began < 10


def test_what_cannot_be_measured_is_refused(monkeypatch, alone, tmp_path):
    with pytest.raises(UsageError, match="--rounds 0"):
        bench.main(BenchConfig(rounds=0))
    small = make_pack(tmp_path / "small.h5", 101)
    with pytest.raises(UsageError, match="101 training images; 15 steps of 32 need 480"):
        bench.make_case(BenchConfig(case="resnet50", data=str(small)), tmp_path)
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="without mpirun"):
        bench.main(BenchConfig())


def test_cases(monkeypatch, tmp_path):
    pack = make_pack(tmp_path / "p.h5", 499)
    digits = bench.make_case(BenchConfig(data=str(pack)), tmp_path)
    assert (digits.pack, digits.warm, digits.epochs) == (str(pack), 4, 3)
    resnet = bench.make_case(BenchConfig(case="resnet50", data=str(pack)), tmp_path)
    assert read_pack(resnet.pack).splits["train"].rows == 480
    monkeypatch.setattr(bench, "RESNET_STEPS", 1)
    made = read_pack(bench.make_case(BenchConfig(case="resnet50"), tmp_path).pack)
    assert (made.image_shape, made.splits["train"].rows) == ((100, 100, 3), 32)


def test_the_driver_measures_all_kinds(alone, tmp_path):
    pack = make_pack(tmp_path / "p.h5", 101)
    case = bench.Case("digits", str(pack), 14, epochs=2, warm=8)
    said = []
    contestants = (DEFAULT, LIMIT, WRITTEN)
    results = bench.measure(case, contestants, 1, tmp_path, said.append)
    assert list(results) == list(contestants)
    assert all(len(values) == 1 and 10 < values[0] < 1e6 for values in results.values())
    assert [line.split(",")[0] for line in said[:2]] == [
        "round 1 of 1  hpctrain",
        "round 1 of 1  limit: no loading",
    ]
    assert not list(tmp_path.glob("0-*"))


def test_what_tree_order_costs_is_a_ratio_of_medians():
    rates = {(r, way): [100.0, 50.0, 80.0] for r in tree.RANKS for way in (False, True)}
    rates[2, True] = [90.0, 64.0, 64.0]
    assert tree.step_ratio(rates, 2) == 1.25
    figures = [
        {"tree": t, "allreduce": 2.0, "bf16": 1.0, "sent": 8, "ring": 4} for t in (1.0, 3.0, 2.5)
    ]
    sums = {(2, n): figures for n in tree.LENGTHS}
    assert tree.sum_ratio(sums, 2, tree.LENGTHS[0]) == 1.25
    lines = tree.target_lines(rates, sums)
    assert [line.split()[:2] for line in lines] == [["MISSED", "1.250"], ["reached", "1.250"]]
    text = ""
    for made in (tree.step_table(rates), tree.sum_table(sums)):
        console = Console(width=120)
        with console.capture() as capture:
            console.print(made)
        text += capture.get()
    assert "1.250" in text
    assert "2.000" in text  # sent over ring


def test_both_ways_to_sum_are_timed_in_one_job(alone, tmp_path):
    figures = tree.add(2, 1001, tmp_path / "sum.json")
    assert figures["n"] >= 11
    assert 0 < figures["tree"] < 1
    assert 0 < figures["allreduce"] < 1
    assert figures["sent"] == figures["ring"] == 4 * 1001


def test_what_auto_gets_back_is_a_share_of_what_the_told_split_saves():
    rates = {"even": [1.0, 1.0, 9.0], "3,1": [2.0, 2.0, 2.0], "auto": [1.6, 1.0, 2.0]}
    assert balance.recovered(rates) == pytest.approx(0.75)
    assert balance.lines(rates)[-1].startswith("MISSED  0.750")
    assert balance.lines({**rates, "auto": [1.9, 1.9, 1.9]})[-1].startswith("reached 0.947")


def test_data_contestants_read_every_image(tmp_path, monkeypatch):
    """All of them, on a few images: whole epochs, and the rate from them."""
    monkeypatch.setattr(data, "FILES", 40)
    monkeypatch.setattr(readers, "SECONDS", 0.0)
    monkeypatch.setattr(readers, "BATCH", 16)
    raw, jpeg = data.make_files(tmp_path, None)
    assert raw.splits["train"].rows == 40 * data.COPIES
    assert jpeg.splits["train"].rows == 40
    assert readers.contestants().keys() == data.SAID.keys() - {"pack"}
    for name, make in readers.contestants().items():
        epoch = make(tmp_path)
        rows = 40 if name == "pillow" or "jpeg" in name else 80
        assert sum(epoch(0)) == sum(epoch(1)) == rows, name
    monkeypatch.setattr(readers, "SECONDS", 0.001)
    assert readers.rate(lambda number: iter([3])) > 0
    assert data.pack_rate(tmp_path) > 0


def test_data_table_and_targets():
    rates = {who: [float(n)] * 3 for n, who in enumerate(data.SAID, start=1)}
    rates["memory copy"], rates["gather"] = [100.0] * 3, [36.0] * 3
    console = Console(width=160)
    with console.capture() as shown:
        console.print(data.table(rates))
    assert "0.36" in shown.get() and "12.00" in shown.get()  # of the copy, of h5py
    lines = data.target_lines(rates)
    assert lines[0].startswith("reached 0.36") and lines[1].startswith("MISSED  12.0")
    assert len(lines) == len(data.TARGETS)
    assert "fewer than 3" in data.target_lines({who: n[:1] for who, n in rates.items()})[-1]


def test_a_sweep_is_measured_against_its_networks_one_after_another():
    found = sweep.lines({2: [5.0, 4.0, 9.0], 1: [10.0, 10.0, 1.0]})
    assert found[-1].startswith("reached 0.500")
    assert sweep.lines({2: [7.0], 1: [10.0]})[-1].startswith("MISSED  0.700")
