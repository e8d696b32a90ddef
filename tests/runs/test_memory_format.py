"""Where oneDNN crashes in NHWC, a run is computed in NCHW, and so it goes on."""

from __future__ import annotations

import tomllib
from functools import partial

import pytest
from torch import nn

from tests.support import nets
from tests.support.api import cluster
from tests.support.launch import run_cli
from tests.support.launches import launch, run_of
from tests.support.short import records, short_run

MODEL = "tests.support.nets:strided"


@pytest.fixture
def settings(tmp_path):
    return short_run(tmp_path, (32, 32, 3)) | {"model": MODEL, "test": False, "epochs": 1}


def has_avx2_only_on(*ranks):
    def pretend(patch):
        found = "AVX2" if cluster.launched_rank() in ranks else "AVX512"
        patch.setattr("torch.backends.cpu.get_cpu_capability", lambda: found)

    return pretend


def is_nhwc(settings):
    return tomllib.loads((run_of(settings) / "config.toml").read_text())["channels_last"]


def test_a_network_that_crashes_in_nhwc_is_trained_in_nchw(settings):
    """In a process of its own, in which oneDNN uses AVX2: the crash is signal 11."""
    words = ["--data", settings["data"], "--runs-dir", settings["runs_dir"], "--run", "a"]
    words += ["--model", MODEL, "--batch-size", "50", "--epochs", "2", "--threads", "1"]
    ended = run_cli(words, env={"ONEDNN_MAX_CPU_ISA": "AVX2"})
    assert ended.returncode == 0, ended
    (note,) = [n["text"] for n in records(settings, "note") if "NCHW" in n["text"]]
    assert note.startswith("computed in NCHW: oneDNN") and "layer 0 (a 1x1" in note
    assert not is_nhwc(settings)


def test_one_rank_of_such_a_cpu_is_enough_and_the_run_goes_on_anywhere(settings):
    assert launch(settings, first=has_avx2_only_on(2)).code == 0
    assert not is_nhwc(settings)
    assert launch(settings, epochs=2, first=has_avx2_only_on()).code == 0
    assert not is_nhwc(settings)


def test_a_run_that_began_in_nhwc_does_not_go_on_where_it_crashes(settings):
    assert launch(settings, first=has_avx2_only_on()).code == 0
    assert is_nhwc(settings)
    refused = launch(settings, epochs=2, first=has_avx2_only_on(1))
    assert refused.code == 2 and "the run was begun in NHWC" in refused.error
    assert "gradient of layer 0" in refused.error
    assert launch(settings, epochs=2, first=has_avx2_only_on()).code == 0


@pytest.mark.parametrize(
    ("layer", "crashes"),
    [
        (partial(nn.Conv2d, 2, 5, 1, stride=2), True),
        (partial(nn.Conv2d, 7, 1, 1, stride=(1, 3), dilation=2, padding="valid"), True),
        (partial(nn.Conv2d, 1, 8, 1, stride=2), False),
        (partial(nn.Conv2d, 8, 8, 1, stride=2), False),
        (partial(nn.Conv2d, 3, 8, 1), False),
        (partial(nn.Conv2d, 3, 8, 1, stride=2, padding=1), False),
        (partial(nn.Conv2d, 3, 8, (1, 3), stride=2), False),
        (partial(nn.Conv2d, 6, 8, 1, stride=2, groups=2), False),
        (partial(nn.ConvTranspose2d, 3, 8, 1, stride=2), False),
    ],
)
def test_such_layers_are_those_with_which_it_was_seen(settings, layer, crashes):
    def network(image_shape, classes):
        first = nn.Conv2d(image_shape[2], layer.args[0], 3)
        pooled = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.LazyLinear(classes)
        return nn.Sequential(first, layer(), *pooled)

    def pretend(patch):
        has_avx2_only_on(0)(patch)
        patch.setattr(nets, "strided", network)

    assert launch(settings, 1, first=pretend).code == 0
    assert is_nhwc(settings) == (not crashes)
