"""All transforms that --augment accepts, one by one, as a run uses them; cheats among real ones."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch

from hpctrain.config.parts import accepted_names
from scripts.parts.transforms import draw_images, make_part
from tests.support.api import transforms

NAMES = [
    f"{library}:{name}"
    for library in ("kornia", "torchvision")
    for name in accepted_names("augment", library)
]
ROWS = 8


def build(name, always=False):
    part = make_part(name)
    if always:
        part = transforms.always_applied(part) or part
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the libraries
        return transforms.build_transform(part)


def states():
    return torch.get_rng_state().numpy().tobytes(), str(np.random.get_state())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", NAMES)
def test_a_transform_draws_by_its_key_alone_and_sample_by_sample(name):
    images = draw_images(ROWS)
    row = transforms.Transforms([build(name)])
    always = build(name, always=True)
    before = states()
    result = always(images, 5)
    changed = (result != images).flatten(1).any(1)
    assert changed.any() and result.isfinite().all()
    keys = [row(images, key) for key in range(6)]  # of other seeds, steps and shards
    assert not all(torch.equal(keys[0], other) for other in keys[1:])
    assert all(torch.equal(row(images, key), keys[key]) for key in (3, 0))
    other = images.clone()
    other[0] = 0.3
    assert torch.equal(always(other, 5)[1:], result[1:])
    torch.testing.assert_close(always(images[:1], 5), result[:1], rtol=1e-3, atol=1e-4)
    assert states() == before
    wide = always(images[:2].double(), 5)
    assert wide.dtype == torch.float64 and wide.isfinite().all()
    nhwc = images[:2].contiguous(memory_format=torch.channels_last)
    assert always(nhwc, 5).stride() == nhwc.stride()


def test_a_batch_of_samples_that_are_alike_becomes_different_ones():
    """Not one of which all samples get the same numbers: then it is called by sample."""
    alike = draw_images(1).repeat(32, 1, 1, 1)
    for name in ("kornia:RandomAffine", "torchvision:TrivialAugmentWide", "kornia:AutoAugment"):
        found = build(name)(alike, 1)
        assert len({sample.numpy().tobytes() for sample in found}) > 8, name
