"""scripts/fuzz: mutated inputs are refused in one line or do no harm, and faults are found."""

import sys

import pytest

from tests.fuzz_faults import FAULTS, SOUND
from tests.support.launch import ROOT, run

FUZZ = [sys.executable, str(ROOT / "scripts/fuzz")]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_mutated_inputs_do_no_harm(tmp_path):
    done = run([*FUZZ, "--inputs", "300", "--launches", "2"], 290, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("300 mutated inputs, 0 wrong\n")


def test_every_kind_of_fault_is_found(tmp_path):
    words = ["--only", "tests.fuzz_faults:Faults", "--inputs", str(len(SOUND) + len(FAULTS))]
    done = run([*FUZZ, *words, "--hang", "15"], 110, cwd=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("trial ")]
    assert [int(line.split()[1]) for line in lines] == list(range(2, 11))
    said = "".join(lines)
    for words in (
        "the process ended (-11)",
        "MiB more memory",
        "MemoryError at",
        "KeyError at",
        "more than one line",
        "names none of input.h5",
        "another result without an error: other",
        "SystemExit at",
        "no answer for 15 s",
    ):
        assert said.count(words) == 1, (words, done.stdout)
    assert "11 mutated inputs, 9 wrong" in done.stdout


def test_sound_inputs_must_be_taken(tmp_path):
    done = run([*FUZZ, "--only", "tests.fuzz_faults:NotSound", "--inputs", "2"], 60, cwd=tmp_path)
    assert done.returncode == 1 and "nothing mutated: input: Outcome(kind='refused'" in done.stdout
