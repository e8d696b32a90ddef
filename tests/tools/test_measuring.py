"""Scripts that measure or break hpctrain: one small whole run each, and that they find faults."""

from __future__ import annotations

import itertools
import os
import re
import sys
from argparse import Namespace
from pathlib import Path

import h5py
import pytest

from scripts.bench import harness, packing, reading
from scripts.bench.against import FIGURES
from tests.support.launch import LAUNCHER_PREFIXES, ROOT, VARIABLES, run

TRIALS = int(os.environ.get("HPCTRAIN_TEST_FAULTS", "20"))


def script(name, *words, timeout=100.0, cwd=None):
    return run([sys.executable, str(ROOT / "scripts" / name), *words], timeout, cwd=cwd)


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_a_machine_is_checked_with_mpirun(tmp_path):
    out = str(tmp_path / "out")
    done = script("cluster_check", "--launch", "mpirun -n 2", "--output", out, timeout=900)
    report = (tmp_path / "out/report.md").read_text()
    assert done.returncode == 0, done.stdout + report
    verdicts = [line.split("  ")[0] for line in done.stdout.splitlines()[:5]]
    assert verdicts == ["passed"] * 5
    assert re.search("resumed after step (15|20), the same digest as undisturbed", done.stdout)
    again = script("cluster_check", "--launch", "mpirun", "--output", out)
    assert again.returncode == 2 and again.stderr.count("\n") == 1 and out in again.stderr


@pytest.mark.slow
@pytest.mark.timeout(60 + 90 * TRIALS)
def test_broken_runs_end_as_unbroken_ones(tmp_path):
    words = ["--trials", str(TRIALS), "--seed", "0"]
    done = script("faults", *words, timeout=50 + 90 * TRIALS, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith(f"{TRIALS} trials, 0 problems\n")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_damage_of_files_is_found():
    """And damage of packs that are read without checksums is missed, which shows that it would be
    noticed.
    """
    done = script("fuzz", "--examples", "200", "--seed", "0", timeout=290)
    assert done.returncode == 0 and "WRONG" not in done.stdout, done.stdout + done.stderr
    assert done.stdout.count(" refused (") == 3
    done = script("fuzz", "--only", "packs", "--unverified", "--seed", "0", timeout=290)
    assert done.returncode == 1 and "packs: WRONG" in done.stdout
    assert "another result without an error" in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_packages_are_measured_in_turn():
    """In everything that a step costs; here they are one."""
    own = {name: os.environ[name] for name in os.environ if not name.startswith(LAUNCHER_PREFIXES)}
    words = ["-m", "scripts.bench", "tree", "--against", "HEAD", "--rounds", "1"]
    done = run([sys.executable, *words], 800, {**own, **VARIABLES}, ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line.split() for line in done.stdout.splitlines() if line.startswith("new ")]
    ratios = {unit: float(row[-1]) for unit, row in zip(FIGURES, rows, strict=True)}
    assert ratios["messages per step"] == ratios["bytes per step"] == 1
    assert all(0.5 < ratio < 2 for ratio in ratios.values()), ratios


def test_every_reader_reads_every_image(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "FILES", 40)
    monkeypatch.setattr(reading, "BATCH", 16)
    monkeypatch.setattr(reading, "SECONDS", 0.001)
    reading.make_files(tmp_path, None)
    for name, reader in reading.READERS.items():
        epochs = reader(Path(tmp_path, "raw.h5"))
        rows = 40 if "JPEG" in name else 80
        assert [next(epochs), next(epochs)] == [rows, rows], name
    assert reading.images_rate(itertools.repeat(3)) > 0


@pytest.fixture
def few_files(monkeypatch):
    """Packs of so few files as two processes share."""
    for name in ("TIFF_FILES", "PHOTOGRAPHS", "ICONS"):
        monkeypatch.setattr(packing, name, 32)
    monkeypatch.setattr(packing, "TIFF_SIDES", (24,))


def test_hpctrain_and_the_program_by_hand_pack_the_same_pixels(few_files, tmp_path, capsys):
    packing.measure_packing(Namespace(rounds=1), tmp_path)
    assert len(re.findall("^hpctrain pack .* / by hand [0-9]", capsys.readouterr().out, re.M)) == 4
    for work in tmp_path.iterdir():
        with h5py.File(work / "pack.h5") as pack, h5py.File(work / "by_hand.h5") as by_hand:
            packed = [*pack["train/images"], *pack["test/images"]]
            pixels = sorted(image.tobytes() for image in packed)
            assert len(pixels) == 32
            assert pixels == sorted(image.tobytes() for image in by_hand["images"])


@pytest.mark.slow
def test_two_packages_pack_in_turn(few_files, tmp_path, capsys):
    packing.compare_packing(Namespace(rounds=1), tmp_path, {"new": ROOT, "old": ROOT})
    rows = re.findall("^new .* new / old ([0-9.]+)$", capsys.readouterr().out, re.M)
    assert len(rows) == 4 and all(0.2 < float(ratio) < 5 for ratio in rows)


def test_rates_are_medians_and_steps_are_timed_from_the_end_of_the_warm_up():
    times = (1, 5, 7, 9.5)
    steps = [{"time": f"2026-01-01T00:00:{t:06.3f}Z", "rows": 64} for t in times]
    assert harness.steps_rate(steps, 2) == pytest.approx(128 / 4.5)
    assert harness.ratio({"a": [30.0, 90.0, 36.0], "b": [24.0, 1.0, 30.0]}, "a", "b") == 1.5
