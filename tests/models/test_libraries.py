"""Networks of other libraries: timm and segmentation-models-pytorch."""

from __future__ import annotations

import importlib.util
import sys

import pytest
import torch

import hpctrain as hp
from tests.support.api import check_forward, load_init

SHAPE = (32, 32, 3)


def refusal(name, shape=SHAPE, output=(5,)):
    """The one line with which a network is refused."""
    with pytest.raises(hp.UsageError) as caught:
        check_forward(hp.build(name, shape, 5, output=output), shape, output)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("timm:resnet18", "needs timm: pip install 'hpctrain[timm]'"),
        ("smp:Unet", "needs segmentation_models_pytorch: pip install 'hpctrain[smp]'"),
    ],
)
def test_without_a_library_the_command_that_installs_it_is_named(monkeypatch, name, said):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert refusal(name) == f"--model {name} {said}"


@pytest.fixture
def timm_of(monkeypatch):
    """A function that puts a folder with a timm first on the path, and forgets the imported."""

    def put(folder, content):
        folder.mkdir(parents=True)
        (folder / "timm.py").write_text(content)
        for name in [n for n in sys.modules if n.partition(".")[0] == "timm"]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.syspath_prepend(str(folder))

    return put


def test_a_timm_for_another_torch_is_refused(timm_of, tmp_path):
    timm_of(tmp_path / "site-packages", "raise RuntimeError('operator nms does not\\nexist')")
    line = refusal("timm:a")
    assert line == (
        "--model timm:a: timm cannot be imported: RuntimeError: operator nms does not exist"
    )


def test_a_timm_that_is_not_installed_is_not_imported(timm_of, monkeypatch, tmp_path):
    """A module beside a file that names the library, for example."""
    timm_of(tmp_path / "a", "raise SystemExit('imported')")
    assert f"{tmp_path}/a/timm.py is not the installed timm" in refusal("timm:test_resnet")
    timm_of(tmp_path / "site-packages", "raise SystemExit('imported')")
    monkeypatch.chdir(tmp_path / "site-packages")
    assert "is not the installed timm" in refusal("timm:test_resnet")


@pytest.mark.parametrize(
    ("name", "shape", "mean"),
    [
        ("timm:test_byobnet", (16, 16, 3), 0.485),
        ("timm:test_convnext(drop_path_rate=0.1)", (36, 44, 7), 0.5),
        ("timm:test_vit", (32, 32, 1), 0.5),
        ("timm:test_vit.r160_in1k", (32, 16, 3), 0.5),
    ],
)
def test_networks_are_made_for_the_images(name, shape, mean):
    model = hp.build(name, shape, 5)
    check_forward(model, shape, (5,))
    assert model.pretrained_cfg["mean"][0] == mean
    assert tuple(model.pretrained_cfg["input_size"]) == (3, 160, 160)
    torch.manual_seed(0)
    first = hp.build(name, shape, 5)
    torch.manual_seed(0)
    second = hp.build(name, shape, 5)
    assert all(map(torch.equal, first.parameters(), second.parameters()))


def test_arguments_reach_the_network():
    for drop_rate in (0.0, 0.25):
        model = hp.build(f"timm:test_resnet(drop_rate={drop_rate})", SHAPE, 5)
        assert model.drop_rate == drop_rate
    model = hp.build("smp:Unet(resnet18, encoder_depth=3, decoder_channels=(8, 8, 4))", SHAPE, 5)
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 5, 32, 32)


@pytest.mark.parametrize(
    ("name", "shape", "said"),
    [
        ("timm:test_vot", SHAPE, "has no such network, did you mean 'test_vit'?"),
        ("timm:hf-hub:someone/x", SHAPE, "write timm:Name(argument=value, ...)"),
        ("timm:test_vit.dino", SHAPE, "RuntimeError: Invalid pretrained tag (dino)"),
        ("timm:nest_tiny", (20, 24, 3), "published for 224x224: pack with --size 224x224"),
        (
            "timm:test_vit",
            (18, 16, 3),
            "(16). (layer patch_embed, PatchEmbed); published for",
        ),
        ("timm:test_resnet(5)", SHAPE, "give arguments by name"),
        ("timm:test_resnet(num_classes=5)", SHAPE, "hpctrain gives num_classes: leave it out"),
        ("timm:test_resnet(in_chans=3)", SHAPE, "hpctrain gives in_chans: leave it out"),
        ("timm:test_resnet(drop=3)", SHAPE, "unexpected keyword argument 'drop'"),
        ("smp:Unet(classes=5)", SHAPE, "hpctrain gives classes: leave it out"),
        ("smp:Unet(resnet18, 5, imagenet)", SHAPE, "encoder_weights is refused"),
        ("smp:Unet(decoder_chanels=3)", SHAPE, "no argument decoder_chanels, did you mean"),
        ("smp:Unet(encoder_name=resnet19)", SHAPE, "Wrong encoder name `resnet19`"),
        (
            "smp:Unet(encoder_name='tu-test_resnet')",
            SHAPE,
            "are for --task denoise, and the data",
        ),
    ],
)
def test_what_a_library_cannot_make_is_refused(name, shape, said):
    assert said in refusal(name, shape)


@pytest.mark.parametrize("name", ["timm:test_vit", "timm:test_resnet"])
def test_weights_of_timm_are_adapted(tmp_path, name):
    timm = pytest.importorskip("timm")
    size = {"img_size": 64} if "vit" in name else {}
    source = timm.create_model(name.partition(":")[2], **size)
    torch.save({"state_dict_ema": source.state_dict()}, tmp_path / "m")
    model = hp.build(name, (64, 64, 1), 5)
    check_forward(model, (64, 64, 1), (5,))
    found = load_init(model, tmp_path / "m", 5, 1)
    assert max(found.fresh.values()) == 1000 and len(found.adapted) == 1
