"""The judge of --augment: transforms of Kornia and torchvision, tried with random images.

A transform is accepted if it passes the tests that a run makes before its first step
(hpctrain/data/transform_checks.py), changes images, and draws random numbers. A class without
random numbers would change the images of the training alone, and all in the same way.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch import Tensor

from hpctrain.config.parts import Part
from hpctrain.data.partition import random_key
from hpctrain.data.transform_checks import check_part
from hpctrain.data.transforms import LibraryTransform, always_applied, build_transform
from hpctrain.errors import UsageError
from hpctrain.text import brief
from scripts.parts import Verdict, part_of

SIDE = 64  # pixels
ROWS = 64
#: Arguments by which a class that needs some is tried, or changes images.
ARGUMENTS: dict[str, str] = {
    "kornia:CenterCrop": "size=64",
    "kornia:ColorJiggle": "brightness=0.4, contrast=0.4, saturation=0.4, hue=0.1",
    "kornia:ColorJitter": "brightness=0.4, contrast=0.4, saturation=0.4, hue=0.1",
    "kornia:LongestMaxSize": "max_size=64",
    "kornia:PadTo": "size=(64, 64)",
    "kornia:RandAugment": "n=2, m=9",
    "kornia:RandomAffine": "degrees=15",
    "kornia:RandomAutoContrast": "p=0.5",
    "kornia:RandomBrightness": "brightness=(0.5, 1.5)",
    "kornia:RandomContrast": "contrast=(0.5, 1.5)",
    "kornia:RandomCrop": "size=(64, 64), padding=8",
    "kornia:RandomGamma": "gamma=(0.5, 1.5)",
    "kornia:RandomGaussianBlur": "kernel_size=3, sigma=(0.1, 2.0)",
    "kornia:RandomHue": "hue=(-0.3, 0.3)",
    "kornia:RandomMotionBlur": "kernel_size=5, angle=30.0, direction=0.5",
    "kornia:RandomResizedCrop": "size=(64, 64)",
    "kornia:RandomRotation": "degrees=15",
    "kornia:RandomRotation90": "times=(-3, 3)",
    "kornia:RandomSaturation": "saturation=(0.5, 1.5)",
    "kornia:RandomShear": "shear=10",
    "kornia:RandomSnow": "snow_coefficient=(0.2, 0.8)",
    "kornia:RandomTranslate": "translate_x=(-0.2, 0.2)",
    "kornia:Resize": "size=64",
    "kornia:SmallestMaxSize": "max_size=64",
    "torchvision:CenterCrop": "size=64",
    "torchvision:ColorJitter": "brightness=0.4, contrast=0.4, saturation=0.4, hue=0.1",
    "torchvision:GaussianBlur": "kernel_size=3",
    "torchvision:Grayscale": "num_output_channels=3",
    "torchvision:Pad": "padding=2",
    "torchvision:RandomAdjustSharpness": "sharpness_factor=2.0",
    "torchvision:RandomAffine": "degrees=15",
    "torchvision:RandomCrop": "size=64, padding=8",
    "torchvision:RandomPosterize": "bits=3",
    "torchvision:RandomResize": "min_size=48, max_size=80",
    "torchvision:RandomResizedCrop": "size=64",
    "torchvision:RandomRotation": "degrees=15",
    "torchvision:RandomShortestSize": "min_size=(48, 80)",
    "torchvision:RandomSolarize": "threshold=0.5",
    "torchvision:Resize": "size=64",
    "torchvision:ScaleJitter": "target_size=(64, 64)",
}
SEVERAL = "it takes other transforms: repeat --augment in their order"
OTHER_TARGETS = "it is for boxes, masks or keypoints"
TYPES = "it converts types, which hpctrain does"
MIXES = "it mixes samples"
TENSORS = "its arguments are tensors"
#: Classes that are refused untried, and why.
REFUSED: dict[str, str] = {
    **dict.fromkeys(
        (
            *("kornia:AugmentationSequential", "kornia:ImageSequential", "kornia:PatchSequential"),
            *("kornia:ManyToManyAugmentationDispather", "kornia:ManyToOneAugmentationDispather"),
            "kornia:PolicySequential",
            *("kornia:VideoSequential", "torchvision:Compose", "torchvision:RandomApply"),
            *("torchvision:RandomChoice", "torchvision:RandomOrder"),
        ),
        SEVERAL,
    ),
    **dict.fromkeys(
        (
            *("torchvision:ClampBoundingBoxes", "torchvision:ClampKeyPoints"),
            *("torchvision:ConvertBoundingBoxFormat", "torchvision:RandomIoUCrop"),
            *("torchvision:SanitizeBoundingBoxes", "torchvision:SanitizeKeyPoints"),
            "torchvision:SetClampingMode",
        ),
        OTHER_TARGETS,
    ),
    **dict.fromkeys(
        (
            *("torchvision:ConvertImageDtype", "torchvision:PILToTensor", "torchvision:ToDtype"),
            *("torchvision:ToImage", "torchvision:ToPILImage", "torchvision:ToPureTensor"),
            "torchvision:ToTensor",
        ),
        TYPES,
    ),
    **dict.fromkeys(
        (
            *("kornia:RandomTransplantation", "kornia:RandomMosaic", "kornia:RandomMixUpV2"),
            *("kornia:RandomCutMixV2", "kornia:PatchMix"),
            *("torchvision:MixUp", "torchvision:CutMix"),
        ),
        MIXES,
    ),
    **dict.fromkeys(
        ("kornia:Normalize", "kornia:Denormalize", "torchvision:Normalize"),
        "--normalize does this, in evaluations, too",
    ),
    **dict.fromkeys(("kornia:RandomFisheye", "torchvision:LinearTransformation"), TENSORS),
    "kornia:RandomDissolving": "it downloads a network",
    "torchvision:FiveCrop": "it returns several images",
    "torchvision:TenCrop": "it returns several images",
    "torchvision:JPEG": "it takes uint8 values alone; there is kornia:RandomJPEG",
    "torchvision:Lambda": "it calls a function: name that as module:function",
    "torchvision:UniformTemporalSubsample": "it is for videos",
}


def candidates() -> dict[str, Any]:
    """Return all transforms of the libraries by name, without abstract classes."""
    import kornia.augmentation as kornia
    from kornia.augmentation import auto
    from torchvision.transforms import v2

    named = {f"kornia:{name}": getattr(kornia, name) for name in kornia.__all__}
    named |= {f"kornia:{name}": getattr(auto, name) for name in auto.__all__}
    named |= {f"torchvision:{name}": kind for name, kind in vars(v2).items()}
    return {
        name: kind
        for name, kind in sorted(named.items())
        if inspect.isclass(kind) and is_transform(name, kind)
    }


def is_transform(name: str, kind: type) -> bool:
    """Whether a class of a library is a transform that can be used."""
    from torchvision.transforms import v2

    if name.startswith("torchvision:"):
        return issubclass(kind, v2.Transform) and kind is not v2.Transform
    return issubclass(kind, torch.nn.Module) and "Base" not in name


def judge(name: str) -> Verdict:
    """Try a transform. Returns why it is refused, if it is."""
    if name in REFUSED:
        return Verdict(REFUSED[name])
    if name.endswith("3D"):
        return Verdict("it is for volumes")
    torch.set_num_threads(1)  # small operations: quicker where others compute, too
    part = make_part(name)
    try:
        transform = build_transform(part)
        always = build_transform(always_applied(part) or part)
        images = draw_images(ROWS)
        for tested in {always, transform}:
            check_part(tested, images, 1)
    except UsageError as error:
        return Verdict(short_reason(str(error).removeprefix(part.flag).strip()))
    if torch.equal(always(images, 1), images):
        return Verdict("it changes the size of images, or nothing")
    if all(torch.equal(transform(images, key), transform(images, 1)) for key in range(2, 8)):
        return Verdict("it draws no random numbers, and evaluations are without transforms")
    return Verdict()


def short_reason(text: str) -> str:
    """Return why a test of a run has refused a transform, in a few words."""
    if text.startswith("mixes images"):
        return MIXES
    if text.startswith("returned torch."):
        return "it changes the size or the channels of images"
    return brief(text, 80)


def sample(name: str) -> Tensor:
    """Make a transform and call it once, as a run does."""
    return build_transform(make_part(name))(draw_images(4), 1)


def make_part(name: str) -> Part:
    """Return the part of a name, with the arguments by which it is tried."""
    arguments = ARGUMENTS.get(name, "")
    kwargs = eval(f"dict({arguments})", {"dict": dict})
    return part_of("augment", name, kwargs, f"{name}({arguments})")


@functools.cache
def draw_images(rows: int) -> Tensor:
    """Return images (n, 3, H, W) in [0.1, 0.9], smooth but for some noise."""
    generator = torch.Generator().manual_seed(random_key("images to judge transforms"))
    coarse = torch.rand((rows, 3, 8, 8), generator=generator)
    smooth = torch.nn.functional.interpolate(coarse, SIDE, mode="bilinear")
    noise = torch.rand(smooth.shape, generator=generator)
    return 0.1 + 0.7 * smooth + 0.1 * noise


def build(name: str) -> LibraryTransform:
    """Build a transform that is applied to each image, where it takes a probability."""
    part = make_part(name)
    return build_transform(always_applied(part) or part)
