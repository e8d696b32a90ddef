"""``hpctrain bench`` and scripts/benchmarks: arithmetic on made figures, tiny real runs."""

import itertools
import json
import os
import sys
import time
from contextlib import nullcontext
from datetime import UTC, datetime
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console

from hpctrain import bench, cli
from hpctrain.bench import DDP, HPCTRAIN, LIMIT, LOADER, harness, peers
from hpctrain.bench.peers import TrainingJob
from hpctrain.config import BenchConfig
from hpctrain.data.pack import write_pack
from hpctrain.data.packed import read_pack
from hpctrain.errors import RunError, UsageError
from hpctrain.sweep.file import read_sweep
from scripts.benchmarks import cases, data
from tests.launch import ALLOWED

WORK = TrainingJob("digits", "pack.h5", 128, epochs=3, warm=71)


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


def step(seconds, rows):
    """A step's record, `seconds` after midnight."""
    return {"kind": "step", "time": f"2026-01-01T00:00:{seconds:06.3f}Z", "rows": rows}


def test_steps_are_timed_from_the_end_of_the_warm_up():
    steps = [step(1, 64), step(5, 64), step(7, 64), step(9.5, 17)]
    assert harness.steps_rate(steps, 2) == pytest.approx(81 / 4.5)
    assert harness.steps_rate(steps, 1) == pytest.approx(145 / 8.5)


def test_independent_ranks_count_by_the_slowest(tmp_path):
    for rank, found in enumerate(({"rows": 30, "seconds": 2.0}, {"rows": 31, "seconds": 4.0})):
        (tmp_path / f"rank{rank}.json").write_text(json.dumps(found))
    assert bench.training_rate(tmp_path, 2, 71) == 61 / 4


def test_contestants_run_in_turn():
    calls, shown = [], []
    rates = harness.measure("ab", 2, lambda name: calls.append(name) or len(calls), shown.append)
    assert (calls, rates) == (["a", "b", "a", "b"], {"a": [1, 3], "b": [2, 4]})
    assert shown[2].startswith("round 2 of 2  a: 3.00 (job 0.0 s)")


def cells(table):
    """A table as printed: the cells of each line by its first one."""
    console = Console(width=160, no_color=True)
    with console.capture() as captured:
        console.print(table)
    text = captured.get()
    lines = [line.split("│") for line in text.splitlines() if line.startswith("│")]
    return {line[1].strip(): [cell.strip() for cell in line[2:-1]] for line in lines}, text


def test_the_table_shows_medians_ranges_and_ratios_of_medians():
    rates = {"a": [30.0, 90.0, 36.0], "b": [24.0, 1.0, 30.0]}
    assert harness.ratio(rates, "a", "b") == 1.5
    found, text = cells(harness.table("T", rates, {"a": {"/ b": "b", "/ c": "c"}}))
    assert found == {
        "a": ["36.0", "30.0 - 90.0", "1.500", ""],
        "b": ["24.0", "1.00 - 30.0", "", ""],
    }
    assert "T, median of 3 round(s)" in text and "fewer than" not in text
    assert "fewer than 3" in cells(harness.table("T", {"a": [1.0, 2.0]}, {}))[1]


def test_jobs_differ_in_what_is_compared_only():
    jobs = bench.make_commands(WORK, 3)
    forms = {who: [name for name in jobs if name.startswith(f"{who}, ")] for who in (LIMIT, DDP)}
    assert [len(found) for found in forms.values()] == [3, 3] and len(jobs) == 3 + 6 + 2
    for name, command in jobs.items():
        who, _, form = name.rpartition(", ")
        assert command[1:5] == ["-n", "3", sys.executable, "-m"]
        if who == HPCTRAIN:
            _, settings = cli.parse(command[6:])
            assert (settings.threads, settings.device) == (1, "cpu")
        else:
            assert command[5] == "hpctrain.bench.peers"
            settings = TrainingJob(**json.loads(command[6]))
            workers = 2 if "2 workers" in name else 0
            assert (settings.mode, settings.workers) == (bench.MODES[who], workers)
        assert (settings.precision, settings.channels_last) == bench.FORMATS[form]
        found = settings.data, settings.model, settings.batch_size, settings.epochs
        assert found == ("pack.h5", "digits", 128, 3)


def test_jobs_run_on_one_thread_whatever_the_shell_says(monkeypatch, tmp_path):
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    write = "import os, sys; open(sys.argv[1], 'w').write(os.environ['OMP_NUM_THREADS'])"
    harness.run_job([sys.executable, "-c", write, str(tmp_path / "threads")], "the job")
    assert (tmp_path / "threads").read_text() == "1"


def test_a_job_that_fails_says_why(capsys):
    program = "print('first', flush=True); raise SystemError('the cause')"
    with pytest.raises(RunError, match=r"^the job failed \(1\): SystemError: the cause\nfirst\n"):
        harness.run_job([sys.executable, "-c", program], "the job")
    with pytest.raises(UsageError, match=r"^--lr is 0$"):
        harness.run_job([sys.executable, "-c", "print('hpctrain: --lr is 0'); exit(2)"], "the job")
    capsys.readouterr()
    harness.run_job([sys.executable, "-c", "print('Error')"], "the job")
    assert capsys.readouterr().err == "running the job ...\n"


def test_a_job_that_hangs_is_ended(monkeypatch):
    monkeypatch.setattr(harness, "JOB_LIMIT", 0.3)
    began = time.monotonic()
    with pytest.raises(RunError, match="not done after"):
        harness.run_job([sys.executable, "-c", "import time; time.sleep(60)"], "the job")
    assert time.monotonic() - began < 10


def test_what_cannot_be_measured_is_refused(tmp_path):
    for flag in ("rounds", "ranks"):
        with pytest.raises(UsageError, match=f"--{flag} 0: give 1 or more"):
            cli.parse(["bench", f"--{flag}", "0"])
    small = make_pack(tmp_path / "small.h5", 101)
    with pytest.raises(UsageError, match="101 training images, 480 are needed"):
        bench.make_job(BenchConfig(case="resnet50", data=str(small)), tmp_path)


def test_workloads(monkeypatch, tmp_path):
    pack = make_pack(tmp_path / "p.h5", 499)
    digits = bench.make_job(BenchConfig(data=str(pack)), tmp_path)
    assert (digits.data, digits.warm, digits.epochs) == (str(pack), 4, 3)
    resnet = bench.make_job(BenchConfig(case="resnet50", data=str(pack)), tmp_path)
    assert read_pack(resnet.data).splits["train"].samples == 480
    monkeypatch.setattr(bench, "RESNET_STEPS", 1)
    made = read_pack(bench.make_job(BenchConfig(case="resnet50"), tmp_path).data)
    assert (made.image_shape, made.splits["train"].samples) == ((100, 100, 3), 32)


@pytest.mark.slow
def test_training_is_measured_against_the_limit_and_ddp(alone, monkeypatch, tmp_path):
    """From the command line to the table."""
    pack = make_pack(tmp_path / "p.h5", 101)
    work = TrainingJob("digits", str(pack), 14, epochs=2, warm=8)
    monkeypatch.setattr(bench, "make_job", lambda config, folder: work)
    shown, all_jobs, chosen = [], bench.make_commands, (HPCTRAIN, LIMIT, LOADER)
    names = [f"{who}, {form}" for who in chosen for form in bench.FORMATS]

    def some(*words):
        jobs = all_jobs(*words)
        return {name: jobs[name] for name in (names[1], names[4], names[6])}

    monkeypatch.setattr(bench, "make_commands", some)
    rates = bench.bench_training(BenchConfig(rounds=1), tmp_path, shown.append)
    assert all(len(values) == 1 and 10 < values[0] < 1e6 for values in rates.values())
    found, _ = cells(shown[-1])
    assert list(found) == list(rates) == [names[1], names[4], names[6]]
    ratios = [[bool(cell) for cell in found[name][2:]] for name in rates]  # DataLoader, DDP, limit
    assert ratios == [[True, False, True], [True, False, False], [False, False, False]]
    assert not (tmp_path / "job").exists()


def test_every_reader_reads_every_image(tmp_path, monkeypatch):
    """All of them, on a few images: whole epochs, and the rate from them."""
    monkeypatch.setattr(data, "FILES", 40)
    monkeypatch.setattr(peers, "BATCH", 16)
    monkeypatch.setattr(peers, "SECONDS", 0.001)
    raw, jpeg = data.make_files(tmp_path, None)
    assert raw.splits["train"].samples == 40 * data.COPIES
    assert jpeg.splits["train"].samples == 40
    for name, reader in data.READERS.items():
        epochs = reader(tmp_path / "raw.h5")
        rows = 40 if name == data.PILLOW or "JPEG" in name else 80
        assert [next(epochs), next(epochs)] == [rows, rows], name
    assert peers.images_rate(itertools.repeat(3)) > 0
    assert data.pack_rate(tmp_path) > 0
    assert {who for name, _, other in data.GOALS for who in (name, other)} - {""} <= {
        *data.READERS,
        data.PACK,
    }


def test_reading_is_measured_in_a_process(alone, monkeypatch, tmp_path):
    pack, shown = make_pack(tmp_path / "p.h5", 300), []
    monkeypatch.setattr(peers, "READERS", {peers.GATHER: None})  # here; the process has all
    rates = bench.bench_data(BenchConfig(data=str(pack), rounds=1), tmp_path, shown.append)
    assert list(rates) == [peers.GATHER] and rates[peers.GATHER][0] > 100
    assert list(cells(shown[-1])[0]) == [peers.GATHER]


@pytest.mark.parametrize("code", [0, 1])
def test_allreduce_is_measured_by_doctor(monkeypatch, tmp_path, code):
    calls = []
    done = SimpleNamespace(returncode=code)
    monkeypatch.setattr(
        bench.subprocess, "run", lambda *words, **options: calls.append(words) or done
    )
    failed = pytest.raises(RunError, match=r"doctor on 3 ranks failed \(1\)")
    with failed if code else nullcontext():
        bench.bench_allreduce(BenchConfig(case="allreduce", ranks=3), tmp_path, print)
    assert calls[0][0][1:] == ["-n", "3", sys.executable, "-m", "hpctrain", "doctor"]


def test_every_goal_is_about_something_measured():
    for goals in cases.GOALS.values():
        assert {who for name, _, other in goals for who in (name, other)} <= {
            *bench.make_commands(WORK, 2)
        }
    assert cases.goal_line(0.949, 0.95, "a") == "MISSED 0.949  a >= 0.95"
    assert cases.goal_line(0.95, 0.95, "a").startswith("met ")
    assert cases.goal_line(6.1, 6.0, "a", at_most=True) == "MISSED 6.100  a <= 6.0"


def test_each_way_to_sum_is_timed_in_one_job(alone, monkeypatch, tmp_path):
    figures = cases.add(2, 1001, tmp_path / "sum.json")
    assert list(figures) == ["Allreduce", "tree order", "gradients in bf16"]
    assert all(0 < seconds < 1 for seconds in figures.values())


def test_what_tree_order_costs_is_a_ratio_of_times(monkeypatch, tmp_path):
    pack, shown = str(make_pack(tmp_path / "p.h5", 300)), []
    config = BenchConfig(data=pack, rounds=3)
    seconds = {True: 1.25, False: 1.0}

    def steps(folder, ranks, *flags):
        each = seconds["--deterministic" in flags]
        return [step(each * number, 128) for number in range(1, 10)]

    ways = {"Allreduce": 2.0, "tree order": 1.0, "gradients in bf16": 3.0}
    monkeypatch.setattr(cases, "train", steps)
    monkeypatch.setattr(cases, "add", lambda *_: ways)
    lines = cases.tree(config, tmp_path, shown.append)
    assert [line.split()[:2] for line in lines] == [["MISSED", "1.250"], ["met", "0.500"]]
    sums = cells(shown[-1])[0]
    assert sums["29,000 numbers, 4 ranks, gradients in bf16"][-1] == "1.500"
    assert len(sums) == 2 * 2 * 3


def test_a_case_goes_from_its_commands_to_its_goal(monkeypatch, tmp_path):
    commands, shown = [], []
    steps = [step(number, 512) for number in range(1, 10)]
    monkeypatch.setattr(cases, "run_job", lambda command, name: commands.append(command))
    monkeypatch.setattr(cases, "read_records", lambda folder: iter(steps))
    config = BenchConfig(case="sweep", data=str(make_pack(tmp_path / "p.h5", 300)), rounds=1)
    (line,) = cases.sweep(config, tmp_path, shown.append)
    assert line.split()[0] in ("met", "MISSED")
    assert len(cells(shown[-1])[0]) == len(commands) == 2
    settings = [cli.parse(command[command.index("hpctrain") + 1 :])[1] for command in commands]
    assert [each.slots for each in settings] == [2, 1]
    assert len(read_sweep(tmp_path / "sweep.toml").networks) == cases.NETWORKS


def test_the_first_step_is_timed(monkeypatch, tmp_path):
    record = {"time": datetime.fromtimestamp(time.time() + 5, UTC).isoformat()}
    monkeypatch.setattr(cases, "train", lambda folder, ranks, *flags: [record] * ranks)
    assert 4.5 < cases.first_step("pack.h5", tmp_path) < 5.5


def test_a_package_without_metadata_has_no_version(monkeypatch):
    def fails(name):
        raise harness.PackageNotFoundError(name)

    monkeypatch.setattr(harness, "version", fails)
    assert harness.machine_lines()[1].endswith("torch ?, mpi4py ?, h5py ?")


def test_ranks_meet_in_the_folder_of_their_job_whatever_its_name(monkeypatch, tmp_path):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setattr(peers.torch, "set_num_threads", lambda count: None)
    images = np.zeros((32, 28, 28, 1), np.uint8)
    splits = {"train": (images, np.arange(32) % 10)}
    write_pack(tmp_path / "p.h5", splits, tuple("0123456789"), {})
    (folder := tmp_path / "a#b").mkdir()
    pack = str(tmp_path / "p.h5")
    peers.train(TrainingJob("digits", pack, 16, 1, 1, mode="ddp", folder=str(folder)))
    assert {path.name for path in tmp_path.iterdir()} == {"p.h5", "a#b"}
    assert json.loads((folder / "rank0.json").read_text())["rows"] == 16
