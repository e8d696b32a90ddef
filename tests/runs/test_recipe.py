"""A recipe, a TOML file, that names parts of other libraries: no --trust-code, the same bits."""

from __future__ import annotations

import pytest

from tests.support.launch import as_flags
from tests.support.ranks import command
from tests.support.short import records, short_run

RECIPE = """
augment = [
    "kornia:RandomAffine(degrees=15, padding_mode=reflection)",
    "torchvision:RandomPerspective(distortion_scale=0.2, interpolation=bilinear)",
    "kornia:RandomGaussianBlur(kernel_size=(3, 3), sigma=(0.1, 2.0))",
    "torchvision:RandomErasing(p=0.5)",
    "kornia:RandomGaussianNoise(std=0.05)",
]
optimizer = "timm:lamb"
lr = 0.01
"""


@pytest.fixture(scope="module")
def pack(tmp_path_factory):
    return {
        **short_run(tmp_path_factory.mktemp("recipe")),
        **{"shards": 6, "epochs": 1, "deterministic": True},
    }


@pytest.mark.slow
def test_a_recipe_of_five_transforms_has_the_same_bits_on_any_ranks(pack, tmp_path):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(RECIPE)
    digests = []
    for n in (1, 3):
        settings = pack | {"runs_dir": str(tmp_path), "run": f"on-{n}", "config": str(recipe)}
        ended = command(n, "train", *as_flags(settings))
        assert ended.code == 0, ended.err
        digests.append(records(settings)[-1]["digest"])
        facts = records(settings)[0]
        assert len(facts["settings"]["augment"]) == 5
        assert "kornia 0." in facts["key"] and "torchvision 0." in facts["key"]
    assert digests[0] == digests[1]


def test_a_recipe_that_names_a_function_too_needs_trust(pack, tmp_path):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(RECIPE.replace("]\n", '    "tests.support.own_functions:darken"]\n'))
    settings = pack | {"runs_dir": str(tmp_path), "config": str(recipe)}
    ended = command(1, "train", *as_flags(settings))
    said = "recipe.toml names tests.support.own_functions:darken: a function that a file names"
    assert ended.code == 2 and said in ended.err
