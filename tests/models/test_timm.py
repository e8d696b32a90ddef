"""Networks of timm, with a stand-in where it is not installed."""

from __future__ import annotations

import importlib.util
import sys

import pytest
import torch

import hpctrain as hp
from tests import libraries
from tests.support.api import check_forward, load_init

SHAPE = (16, 16, 3)


@pytest.fixture
def timm_stand_in(monkeypatch):
    with libraries.timm_stand_in(monkeypatch):
        yield


def refusal(name, shape=SHAPE):
    """The one line with which a network is refused."""
    with pytest.raises(hp.UsageError) as caught:
        check_forward(hp.build(name, shape, 5), shape, (5,))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_without_timm_the_command_that_installs_it_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    said = "--model timm:resnet18 needs timm: pip install timm"
    assert refusal("timm:resnet18") == said


def test_a_timm_for_another_torch_is_refused(monkeypatch, tmp_path):
    (tmp_path / "timm.py").write_text("raise RuntimeError('operator nms does not\\nexist')")
    for name in [n for n in sys.modules if n.partition(".")[0] == "timm"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert refusal("timm:a").endswith("RuntimeError: operator nms does not exist")
    monkeypatch.chdir(tmp_path)  # a module beside a file that names the library is not imported
    assert "timm.py is not the installed timm: move it away" in refusal("timm:a")


@pytest.mark.parametrize(
    ("name", "shape", "mean"),
    [
        ("timm:tiny_net", (16, 16, 3), 0.125),
        ("timm:tiny_net", (20, 28, 7), 0.125),
        ("timm:tiny_vit", (16, 16, 1), 0.5),
        ("timm:tiny_vit.clip", (24, 12, 3), 0.25),
        ("timm:tiny_fixed", (16, 16, 3), 0.125),
        ("timm:tiny_rigid", (16, 16, 3), 0.125),
    ],
)
def test_networks_are_made_for_the_images(timm_stand_in, name, shape, mean):
    model = hp.build(name, shape, 5)
    check_forward(model, shape, (5,))
    assert model.pretrained_cfg["mean"][0] == mean
    assert tuple(model.pretrained_cfg["input_size"]) == (3, 16, 16)
    torch.manual_seed(0)
    first = hp.build(name, shape, 5)
    torch.manual_seed(0)
    second = hp.build(name, shape, 5)
    assert all(map(torch.equal, first.parameters(), second.parameters()))


@pytest.mark.parametrize(
    ("name", "shape", "said"),
    [
        ("timm:tiny_vot", SHAPE, "timm 0.0 has no such network, did you mean 'tiny_vit'?"),
        ("timm:hf-hub:someone/x", SHAPE, "timm 0.0 has no such network"),
        ("timm:tiny_vit.dino", SHAPE, "RuntimeError: Invalid pretrained tag (dino)"),
        ("timm:tiny_fixed", (20, 24, 3), "published for 16x16: pack with --size 16x16"),
        ("timm:tiny_rigid", (20, 24, 3), "published for 16x16: pack with --size 16x16"),
        ("timm:tiny_vit", (18, 16, 3), "of the patches; published for 16x16: pack with --size"),
    ],
)
def test_what_timm_cannot_make_is_refused(timm_stand_in, name, shape, said):
    assert said in refusal(name, shape)


def test_classifier_and_channels_are_found_in_networks_of_timm(timm_stand_in, tmp_path):
    torch.save(hp.build("timm:tiny_net", SHAPE, 1000).state_dict(), tmp_path / "m")
    found = load_init(hp.build("timm:tiny_net", (16, 16, 1), 5), tmp_path / "m", 5, 1)
    assert found.fresh == {"head.weight": 1000, "head.bias": 1000}  # not the last layer
    assert found.adapted == {"stem.weight": 3}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["timm:vit_tiny_patch16_224", "timm:resnet18"])
def test_timm_itself(tmp_path, name):
    timm = pytest.importorskip("timm")
    size = {"img_size": 64} if "vit" in name else {}
    source = timm.create_model(name.partition(":")[2], **size)
    torch.save({"state_dict_ema": source.state_dict()}, tmp_path / "m")
    model = hp.build(name, (64, 64, 1), 5)
    check_forward(model, (64, 64, 1), (5,))
    found = load_init(model, tmp_path / "m", 5, 1)
    assert max(found.fresh.values()) == 1000 and len(found.adapted) == 1
