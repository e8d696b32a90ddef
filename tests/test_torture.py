"""scripts/torture, with 20 trials or HPCTRAIN_TEST_TORTURE: broken runs end as unbroken ones."""

import os
import pkgutil
import sys

import pytest

from scripts.torture_rank import POINTS
from tests.support.launch import ROOT, run

TRIALS = int(os.environ.get("HPCTRAIN_TEST_TORTURE", "20"))


@pytest.mark.slow
@pytest.mark.timeout(60 + 90 * TRIALS)
def test_broken_runs_end_as_unbroken_ones(tmp_path):
    words = [str(ROOT / "scripts/torture"), "--trials", str(TRIALS), "--seed", "0"]
    done = run([sys.executable, *words], 50 + 90 * TRIALS, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{TRIALS} trials: 0 hangs, 0 with lost steps, 0 wrong digests" in done.stdout


@pytest.mark.parametrize("point", sorted(set(POINTS.values())))
def test_the_places_of_faults_are_there(point):
    assert callable(pkgutil.resolve_name(point))
