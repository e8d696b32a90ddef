"""Settings of ``hpctrain train`` for its data: what to read, and how."""

from __future__ import annotations

from dataclasses import dataclass

from hpctrain.config.option import POSITIVE, Bounds, byte_count, option, split_shares

COMMON, DATA = "Common options", "Data"  # headings in --help
CACHE_DIR = ("data", "keep built-in sets in this folder")


@dataclass(frozen=True)
class DataSettings:
    """Settings of a training run for its data: the first fields of Config."""

    data: str = option(
        "digits",
        "train on this pack, on a built-in set (digits, flowers), or on any HDF5 file (give"
        " --images and --labels)",
        COMMON,
    )
    cache_dir: str = option(*CACHE_DIR, DATA)
    normalize: str = option(
        "auto",
        "scale inputs: unit = to [0, 1]; pack = by the pack's mean and std; imagenet = by those of"
        " ImageNet; auto = as the file of --init says or, for files of other programs, ImageNet's;"
        " else as a network of timm says; else unit",
        DATA,
        choices=("auto", "unit", "pack", "imagenet"),
    )
    flip: bool = option(False, "augment by random horizontal flips", DATA)
    shift: int = option(0, "augment by random shifts of up to this many pixels in x and y", DATA)
    random_crop: float = option(
        0.0,
        "augment by random resized crops of at least this share of the area, such as 0.08, at"
        " aspect ratios from 3/4 to 4/3; for packs of JPEG files; 0 = whole images",
        DATA,
        Bounds(0, 1, "[]"),
    )
    augment: str | None = option(
        None,
        "augment by your own function, too: package.module:function, called with a batch of input"
        " images (n, C, H, W) and a torch.Generator",
        DATA,
    )
    images: str | None = option(
        None, "read images from this dataset, such as x, {split}/x or FILE:x, of an HDF5 file", DATA
    )
    labels: str | None = option(
        None, "read labels, whole numbers (mapped to 0 ... K-1) or one-hot, from this dataset", DATA
    )
    layout: str | None = option(
        None,
        "axes of --images; default: NHWC for 4 dimensions, NHW for 3, for MATLAB NCWH and NWH",
        DATA,
        choices=("NHWC", "NCHW", "NHW", "NCWH", "NWH"),
    )
    max_value: float | None = option(
        None, "divide values of --images by this; default: 65535 for uint16", DATA, POSITIVE
    )
    split: str | None = option(
        None,
        "split --images at random into these shares of train,test or train,validation,test;"
        " default: 0.9,0.1",
        DATA,
        split_shares,
    )
    shuffle: str | None = option(
        None,
        "shuffle samples: partition = in each shard; global = over all; blocks = 4 MiB blocks in"
        " a window, for slow disks; default: partition, for chunked datasets blocks",
        DATA,
        choices=("partition", "global", "blocks"),
    )
    balanced_sampling: bool = option(
        False,
        "draw all classes equally often: images of rare classes repeat within an epoch, of frequent"
        " ones some are left out; not with --shuffle blocks",
        DATA,
    )
    read_buffer: str = option(
        "256M",
        "buffer at most this much data per rank; a partition that fits is read only once (with"
        " --random-crop, files are read again in every epoch)",
        DATA,
        byte_count,
    )
    stage: str | None = option(
        None, "copy this host's part of the pack to a folder on its own disk first", DATA
    )
    verify: bool = option(True, "compare the checksum of each sample when it is first read", DATA)
