"""scripts/scaling.py: limits of the model, a step computed by hand, published runs."""

import math
import re

import numpy as np
import pytest

from scripts.scaling import efficiency, main, ring, slowest, tree

HOROVOD = ((9.6e-6 + 3 * 5.7e-6) / 4, 25e9 / 8), 0.007, ring
SUMMIT = (5e-6, 2 * 100e9 / 8), 0.024, tree
RESNET_101 = 64 * (1 / 219 + 1 / 91.8) / 2, 44_549_160
# Machine, seconds of a step, parameters, ranks, efficiency: see docs/benchmarks.md.
PUBLISHED = [
    (HOROVOD, *RESNET_101, 128, 0.90),
    (HOROVOD, *RESNET_101, 512, 0.90),
    (HOROVOD, 64 / 142, 23_834_568, 128, 0.90),
    (HOROVOD, 64 / 142, 23_834_568, 512, 0.90),
    (HOROVOD, 64 / 154, 138_357_544, 128, 0.79),
    (HOROVOD, 64 / 154, 138_357_544, 512, 0.68),
    (SUMMIT, 1.0, 40_000_000, 27_360, 0.907),
]


@pytest.mark.parametrize(("machine", "seconds", "parameters", "ranks", "published"), PUBLISHED)
def test_the_model_gives_published_efficiencies(machine, seconds, parameters, ranks, published):
    link, spread, way = machine
    segments = math.ceil(4 * parameters / 64 / 2**20)  # buffers of 64 MiB
    found = efficiency(seconds, spread, link, way(parameters, ranks), ranks, segments)
    assert found == pytest.approx(published, abs=0.03)


def test_the_efficiency_of_a_step_computed_by_hand():
    link, traffic = (1e-3, 1e6), (10, 90_000)  # 10 ms and 90 ms
    assert efficiency(0.3, 0.0, link, traffic, 8) == pytest.approx(0.75)
    # Backward takes 200 ms. Two segments take 110 ms in all: the second remains.
    assert efficiency(0.3, 0.0, link, traffic, 8, 2) == pytest.approx(0.3 / 0.355)


@pytest.mark.parametrize("ranks", [1, 2, 8, 1000])
def test_the_slowest_rank_is_the_expected_maximum(ranks):
    draws = np.random.default_rng(0).normal(10, 1, (2000, ranks)).max(1).mean()
    assert slowest(10, 0.1, ranks) == pytest.approx(draws, abs=0.05)


def test_the_table_of_the_documentation(capsys):
    main(["--step-time", "0.2", "--latency", "2", "--bandwidth", "25"])
    last = capsys.readouterr().out.splitlines()[-1]
    cells = re.split(r"\s{2,}", last.strip())
    ways = ["71.0 % (32,766, 205 MB)", "72.0 %", "92.5 % (28, 205 MB)", "94.3 %"]
    assert cells == ["16,384", "0.2079", *ways, "72.1 % (32,766, 102 MB)"]


def test_a_wrong_option_is_refused(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["--step-time", "0", "--latency", "2", "--bandwidth", "25"])
    assert "--step-time, " in capsys.readouterr().err
