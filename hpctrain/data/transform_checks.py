"""Tests of transforms before their first use, with the first training images.

What a transform makes of an image must follow from the image and the key alone, or runs would
depend on ranks, on time, or on what was done before. Each test is one line when it fails. They can
miss what happens rarely.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hpctrain.config.functions import Imported
from hpctrain.data.partition import random_key
from hpctrain.data.transforms import LibraryTransform, Transforms, augment_by, key_of_step
from hpctrain.errors import UsageError
from hpctrain.numerics import fork_rng, seed_torch, watch_generators

CHECKED_ROWS = 64  # images with which parts are tested
KEYS = 32  # with which two batches that differ in one image are compared
BESIDE = 3  # images beside that one
#: Images of a small batch. torch draws the last 16 normal numbers of a tensor otherwise than those
#: before, so those of an image alone may not be those of the first one.
FEW = 2
#: Tolerances of an image in a small batch, for which kernels round otherwise than in a batch
RELATIVE = 1e-3
ABSOLUTE = 1e-4


def check_transforms(
    transforms: Transforms, always: dict[int, LibraryTransform], images: Tensor, key: int
) -> None:
    """Test the transforms of a run in their order with images (n, C, H, W). Raises UsageError.

    `always` has parts that are applied to each image, in place of those at these places in the row.
    """
    for place, step in enumerate(transforms.steps):
        key_here = key_of_step(key, place)
        if isinstance(step, LibraryTransform):
            if place in always:
                check_part(always[place], images, key_here)
            check_part(step, images, key_here)
        else:
            divided = images
            if transforms.range is not None:
                divided = transforms.range.from_unit(images)
            check_augment(step, divided, key_here)
        images = transforms.apply(place, images, key)


def check_part(transform: LibraryTransform, images: Tensor, key: int) -> None:
    """Test that images (n, C, H, W) are transformed one by one, by numbers of the key alone."""
    flag = transform.flag
    with watch_generators(images.device) as changed:
        result = transform(images, key)
        mixes = mixes_images(transform, images[: 1 + BESIDE], key)
        is_repeated = torch.equal(transform(images, key), result)
        transform(images[:1], key)  # a shard may have one
        few = result[:FEW]
        if images.device.type == "cpu":  # a GPU draws in an order that depends on the batch
            few = transform(images[:FEW], key)
    if changed:
        raise UsageError(
            f"{flag} draws random numbers from {changed[0]}, which other code draws from, too: its"
            " results would not repeat"
        )
    if mixes:
        raise UsageError(
            f"{flag} mixes images: with another first image, the rest of the batch changes. What is"
            " made of an image must depend on that image alone"
        )
    if not is_repeated:
        raise UsageError(
            f"{flag} returned other images for the same images and random numbers: it keeps"
            " something of earlier calls, or draws from elsewhere than torch"
        )
    if not torch.allclose(few[:1], result[:1], RELATIVE, ABSOLUTE):
        raise UsageError(
            f"{flag} returned another image for the same image and random numbers in batches of"
            " other sizes: what it makes of an image must not depend on others"
        )


def mixes_images(transform: LibraryTransform, images: Tensor, key: int) -> bool:
    """Whether images (n, C, H, W) change when the first one is another, with one of `KEYS`."""
    if transform.is_called_by_sample:  # one that keeps something of earlier calls does not repeat
        return False
    others = images.clone(memory_format=torch.preserve_format)
    others[0] = 1 - others[0].flip(-1)
    keys = [random_key(key, number) for number in range(KEYS)]
    return any(not torch.equal(transform(images, k)[1:], transform(others, k)[1:]) for k in keys)


def check_augment(function: Imported, images: Tensor, key: int) -> None:
    """Test that images (n, C, H, W) are augmented by the generator alone. Raises UsageError."""
    augmented = []
    with fork_rng(images.device):
        for seed, part in enumerate((images, images, images[:1])):
            seed_torch(seed, images.device)
            augmented.append(augment_by(function, part.clone(), key))
    if images.isfinite().all() and not augmented[0].isfinite().all():
        raise UsageError(f"{function.setting} returned an image with NaN or infinity")
    if not torch.equal(augmented[0], augmented[1]):
        raise UsageError(
            f"{function.setting} returned other images for the same images and a generator of the"
            " same seed: all random numbers must come from the generator"
        )
