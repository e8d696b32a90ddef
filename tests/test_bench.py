"""scripts/benchmarks: arithmetic on made figures, tiny real runs."""

import itertools
import json
import os
import sys

import numpy as np
import pytest
from rich.console import Console

from hpctrain import cli
from hpctrain.data.pack import write_pack
from hpctrain.errors import RunError, UsageError
from hpctrain.launch import ROOT
from scripts.benchmarks import against, cases, data, harness
from scripts.benchmarks.cases import DDP, HPCTRAIN, LIMIT, LOADER
from scripts.benchmarks.harness import Options
from scripts.benchmarks.peers import TrainingJob
from tests.support.launch import ALLOWED

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
    assert cases.training_rate(tmp_path, 2, 71) == 61 / 4


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
    jobs = cases.make_commands(WORK, 3)
    forms = {who: [name for name in jobs if name.startswith(f"{who}, ")] for who in (LIMIT, DDP)}
    assert [len(found) for found in forms.values()] == [3, 3] and len(jobs) == 3 + 6 + 2
    for name, command in jobs.items():
        who, _, form = name.rpartition(", ")
        assert command[1:5] == ["-n", "3", sys.executable, "-m"]
        if who == HPCTRAIN:
            _, settings = cli.parse(command[6:])
            assert (settings.threads, settings.device) == (1, "cpu")
        else:
            assert command[5] == "scripts.benchmarks.peers"
            settings = TrainingJob(**json.loads(command[6]))
            workers = 2 if "2 workers" in name else 0
            assert (settings.mode, settings.workers) == (cases.MODES[who], workers)
        assert (settings.precision, settings.channels_last) == cases.FORMATS[form]
        found = settings.data, settings.model, settings.batch_size, settings.epochs
        assert found == ("pack.h5", "digits", 128, 3)


def test_a_job_that_fails_says_why(capsys):
    program = "print('first', flush=True); raise SystemError('the cause')"
    with pytest.raises(RunError, match=r"^the job failed \(1\): SystemError: the cause\nfirst\n"):
        harness.run_job([sys.executable, "-c", program], "the job")
    with pytest.raises(UsageError, match=r"^--lr is 0$"):
        harness.run_job([sys.executable, "-c", "print('hpctrain: --lr is 0'); exit(2)"], "the job")
    capsys.readouterr()
    harness.run_job([sys.executable, "-c", "print('Error')"], "the job")
    assert capsys.readouterr().err == "running the job ...\n"


@pytest.mark.slow
def test_training_is_measured_against_the_limit_and_ddp(alone, monkeypatch, tmp_path):
    """From the command line to the table."""
    pack = make_pack(tmp_path / "p.h5", 101)
    work = TrainingJob("digits", str(pack), 14, epochs=2, warm=8)
    monkeypatch.setattr(cases, "make_job", lambda options, folder: work)
    shown, all_jobs, chosen = [], cases.make_commands, (HPCTRAIN, LIMIT, LOADER)
    names = [f"{who}, {form}" for who in chosen for form in cases.FORMATS]

    def some(*words):
        jobs = all_jobs(*words)
        return {name: jobs[name] for name in (names[1], names[4], names[6])}

    monkeypatch.setattr(cases, "make_commands", some)
    rates = cases.compare_training(Options("digits", rounds=1), tmp_path, shown.append)
    assert all(len(values) == 1 and 10 < values[0] < 1e6 for values in rates.values())
    found, _ = cells(shown[-1])
    assert list(found) == list(rates) == [names[1], names[4], names[6]]
    ratios = [[bool(cell) for cell in found[name][2:]] for name in rates]  # DataLoader, DDP, limit
    assert ratios == [[True, False, True], [True, False, False], [False, False, False]]
    assert not (tmp_path / "job").exists()


def test_every_reader_reads_every_image(tmp_path, monkeypatch):
    """All of them, on a few images: whole epochs, and the rate from them."""
    monkeypatch.setattr(data, "FILES", 40)
    monkeypatch.setattr(data, "BATCH", 16)
    monkeypatch.setattr(data, "SECONDS", 0.001)
    raw, jpeg = data.make_files(tmp_path, None)
    assert raw.splits["train"].samples == 40 * data.COPIES
    assert jpeg.splits["train"].samples == 40
    for name, reader in data.READERS.items():
        epochs = reader(tmp_path / "raw.h5")
        rows = 40 if name == data.PILLOW or "JPEG" in name else 80
        assert [next(epochs), next(epochs)] == [rows, rows], name
    assert data.images_rate(itertools.repeat(3)) > 0
    assert data.pack_rate(tmp_path) > 0
    assert {who for name, _, other in data.GOALS for who in (name, other)} - {""} <= {
        *data.READERS,
        data.PACK,
    }


def test_every_goal_is_about_something_measured():
    for goals in cases.GOALS.values():
        assert {who for name, _, other in goals for who in (name, other)} <= {
            *cases.make_commands(WORK, 2)
        }
    assert harness.goal_line(0.949, 0.95, "a") == "MISSED 0.949  a >= 0.95"
    assert harness.goal_line(0.95, 0.95, "a").startswith("met ")
    assert harness.goal_line(6.1, 6.0, "a", at_most=True) == "MISSED 6.100  a <= 6.0"


def test_a_package_gets_settings_under_its_own_names(tmp_path):
    (tmp_path / "hpctrain/config").mkdir(parents=True)
    file = tmp_path / "hpctrain/config/train.py"
    package = against.Package("new", tmp_path, tmp_path)
    for name in ("validate", "evaluate"):
        file.write_text(f"class Config:\n    {name}_every: int = 1\n")
        assert package.flags("--validate-every", "0") == [f"--{name}-every", "0"]


def test_a_job_of_a_package_imports_it_and_reports_its_costs(tmp_path):
    (tmp_path / "hpctrain").mkdir()
    (tmp_path / "hpctrain/__init__.py").write_text("open('used', 'w').write(__file__)")
    program = "import hpctrain; n = sum(range(10_000_000)); x = bytearray(50 << 20)"
    package = against.Package("old", tmp_path, tmp_path)
    seconds, memory, _ = package.run(sys.executable, "-c", program)
    assert (tmp_path / "used").read_text() == str(tmp_path / "hpctrain/__init__.py")
    assert 0.05 < seconds < 20 and 50 < memory < 200


def test_a_commit_that_does_not_exist_is_refused(tmp_path):
    with pytest.raises(UsageError, match="--against nosuch: there is no such commit"):
        against.compare_packages(Options("digits"), "nosuch", tmp_path, print)
    with pytest.raises(UsageError, match="is for digits, resnet50, tree, data, not sweep"):
        against.compare_packages(Options("sweep"), "HEAD", tmp_path, print)


@pytest.mark.slow
def test_two_packages_are_measured_in_turn(alone, monkeypatch, tmp_path):
    monkeypatch.setattr(against, "extract", lambda commit: ROOT)
    monkeypatch.setattr(against, "DIGITS_EPOCHS", 2)
    shown = []
    against.compare_packages(Options("digits", rounds=1), "old", tmp_path, shown.append)
    rows, _ = cells(shown[-1])
    assert [name.rpartition(" ")[2] for name in rows] == ["new", "old"]
    assert [row[-1] != "" for row in rows.values()] == [True, False]
