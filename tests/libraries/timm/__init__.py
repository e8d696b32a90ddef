"""Stands in for timm: its registry, and networks of one family."""

from types import SimpleNamespace

from timm.models import tiny

__version__ = "0.0"
SIZE = (3, 16, 16)
TAGS = {"tiny_vit": {"tiny_vit": 0.5, "tiny_vit.clip": 0.25}}


def list_models(filter="", module=""):
    return list(tiny.NETWORKS) if module in ("", "tiny") else []


def get_pretrained_cfg(name):
    base, _, tag = name.partition(".")
    if tag and name not in TAGS.get(base, {}):
        raise RuntimeError(f"Invalid pretrained tag ({tag}) for {base}.")
    mean = TAGS.get(base, {}).get(name, 0.125)
    fixed = base not in ("tiny_net", "tiny_net_wide")
    return SimpleNamespace(
        architecture=base,
        input_size=SIZE,
        fixed_input_size=fixed,
        mean=(mean, 0.5, 0.75),
        std=(0.25, 0.5, 1.0),
        classifier="head",
    )


def create_model(name, pretrained=False, num_classes=1000, in_chans=3, **options):
    assert not pretrained and ":" not in name
    model = tiny.NETWORKS[name.partition(".")[0]](num_classes, in_chans, **options)
    model.pretrained_cfg = vars(get_pretrained_cfg(name))
    return model
