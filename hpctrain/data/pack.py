"""The pack format, version 4: one HDF5 file whose samples are read by byte offset.

Root attributes: ``format``, ``version``, ``classes`` (UTF-8 strings), ``image_shape`` (H, W, C),
``fit`` (of JPEG files: "stretch" to that size, or first "crop" to its proportions, centred; else
empty), ``mean`` and ``std`` (per channel of train, of values divided as ``Scale`` says),
``provenance`` (JSON), ``targets`` (JSON, their kind: {"kind": "class"}, {"kind": "classes"} or
{"kind": "values", "columns": [names]}; then ``classes`` is empty) and ``scale``
(JSON: ``dtype`` of the images, ``max_value`` that becomes 1.0 or null, the ``nodata`` value, "nan"
or null, and the statistics of train by channel, without nodata, as stored: ``count``, ``low``,
``high``, and exactly, as texts, ``sum`` and ``sum_of_squares``). The root's dataset ``identity``,
(36,) uint8, is a UUID made from all of this and from the checksums. Each split is a group of
contiguous datasets:

    images      (N, H, W, C) uint8, uint16, int16 or float32; or of JPEG files, which are gray or
                YCbCr and upright,
    bytes       (B,) uint8, the files one after another, and
    offsets     (N + 1,) int64: file i is bytes[offsets[i]:offsets[i + 1]]
    targets     (N,) int32, the class; or (N, K) uint8, whether it has each class: 0, 1, or 255 for
                unknown; or (N, T) float32 values, NaN for unknown
    crc32       (N,) uint32: zlib.crc32(image, class), of the image's bytes, seeded by its class;
                or zlib.crc32(image, zlib.crc32(target))
    names, name_offsets   likewise uint8 and int64: where each sample comes from, if it is kept

``read_pack`` checks on rank 0 everything that reading by offset relies on. With its result, which
is small and picklable, ``Split`` reads without HDF5.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shlex
import uuid
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hpctrain.data.file_set import is_pattern
from hpctrain.data.scale import BYTES, FULL, Scale, read_type, usual_maximum
from hpctrain.data.statistics import ChannelStatistics
from hpctrain.data.stored import Stored
from hpctrain.data.targets import TargetKind, Targets
from hpctrain.errors import UsageError
from hpctrain.text import counted, listed, listed_names

if TYPE_CHECKING:
    import h5py

    from hpctrain.data.file_set import FileSet
    from hpctrain.data.target_rows import ExternalTargets

FORMAT = "hpctrain-pack"
VERSION = 4
TYPES = ("uint8", "uint16", "int16", "float32")  # of images in packs; little endian
WIDENED = {"bool": "uint8", "int8": "int16", "float16": "float32"}  # others, without a loss
ALIASES = {  # common names of splits
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing"),
}
DEFAULT_SPLIT = "0.9,0.1"  # of an external file
SPLITS = tuple(ALIASES)  # others are allowed and follow, sorted by name
HASHED = 1 << 20  # checksums that are read at a time
FILES_NAMED = 3  # of each split
MOST_CHANNELS = 4  # images usually have no more
LAYOUTS = {  # axes of images in an external file -> which of them is N, H, W and, if any, C
    "NHWC": (0, 1, 2, 3),
    "NCHW": (0, 2, 3, 1),
    "NHW": (0, 1, 2),
    "NCWH": (0, 3, 2, 1),  # (H, W, C, N) and (H, W, N) in MATLAB, which is column-major
    "NWH": (0, 2, 1),
}
ONE_SAMPLE = ("HWC", "CHW", "HW", "CWH", "WH")  # layouts of files that are one sample each


class SplitInfo(NamedTuple):
    """The samples of a split: where they are stored."""

    path: str  # the file with all these arrays
    samples: int
    images: Stored  # pixels, or the bytes of JPEG files
    targets: Stored | np.ndarray | ExternalTargets  # (N, ...), as `Pack.targets` says; an array, or
    # where they are stored if they are long: of an external file
    crc32: Stored | None = None
    offsets: Stored | None = None  # in a pack of JPEG files
    names: Stored | None = None  # bytes
    name_offsets: Stored | None = None
    rows: np.ndarray | None = None  # (N,) of `images`, in the order of the split; None = all
    probe: int | None = None  # CRC-32 of `Split.read_probe`, in an external file
    files: FileSet | None = None  # those with the rows of `images`, if `path` is a pattern


#: What to do with images that differ in attributes of netCDF such as scale_factor.
WRITE_PHYSICAL = (
    "these attributes are not applied, so write files of physical values, as 'ncpdq -U old.nc"
    " new.nc' does"
)


class ExternalOptions(NamedTuple):
    """How an HDF5 file of another program is read: its datasets, layout, splits and scale.

    It is saved with networks.
    """

    images: str  # path of a dataset; may contain "{split}": then each split has its own
    labels: str  # likewise; "" = labels are not read
    layout: str | None = None  # one of LAYOUTS; None = the usual one of so many dimensions;
    # one of ONE_SAMPLE: each file is a sample
    split: str | None = None  # shares as for the packer; None = 0.9,0.1
    seed: int = 0
    block_rows: int | None = None  # samples drawn together; 0 = one by one, stratified by class;
    # None = a number that suits the file. Chunks are never divided.
    max_value: float | None = None  # images are divided by it; None = as `Scale` says
    group: str | None = None  # "file": all samples of a file are in one split
    nodata: float | None = None  # stored value, possibly NaN, that is no data
    kind: TargetKind = "class"  # of targets; others may name several datasets, separated by commas

    def as_json(self) -> dict[str, Any]:
        """Return them as they are saved, without the kind of targets where an image has a class."""
        saved = self._asdict()
        if self.kind == "class":
            del saved["kind"]
        return saved


@dataclass(frozen=True)
class Pack:
    """A description of a pack, or of an external HDF5 file (without statistics)."""

    path: str
    uuid: str
    image_shape: tuple[int, int, int]  # (H, W, C)
    targets: Targets
    splits: dict[str, SplitInfo]
    sizes: dict[str, int]  # bytes of all files, by path
    mean: tuple[float, ...] = ()  # (C,) of train, divided as `scale` says
    std: tuple[float, ...] = ()  # (C,)
    statistics: ChannelStatistics | None = None  # of train, as stored
    max_value: float | None = None  # what becomes 1.0, if it was said when the pack was made
    provenance: dict[str, Any] = field(default_factory=dict)
    identity: Stored | None = None  # the UUID in the file of a pack
    fit: str = ""  # in a pack of JPEG files: stretch or crop
    layout: str = "NHWC"  # axes of stored images: one of LAYOUTS
    scale: Scale = BYTES
    block_rows: int = 0  # samples that lie together in an external file; 0 = in random order
    external: dict[str, Any] | None = None  # fields of `ExternalOptions`, if it is no pack
    staged: bool = False  # whether this is a copy on the host's own disk (``staging.py``)

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes, () of a pack of values."""
        return self.targets.classes

    @property
    def dtype(self) -> np.dtype:
        """Type of the images that are read, in native byte order: `read_type` of the stored one."""
        return read_type(self.splits["train"].images.dtype)

    def with_max_value(self, max_value: float) -> Pack:
        """Return this pack with values divided by `max_value`, and mean and std of these."""
        assert self.statistics is not None
        mean, std = self.statistics.mean_and_std(max_value)
        scale = scale_of(self.scale.dtype, max_value, self.statistics)
        return replace(self, mean=mean, std=std, scale=scale, max_value=max_value)

    @property
    def image_bytes(self) -> int:
        return math.prod(self.image_shape) * self.dtype.itemsize

    @property
    def sample_bytes(self) -> int:
        """Bytes of a sample in the read buffer: its image, and its target unless that is held."""
        return self.image_bytes + self.targets.buffered_bytes

    @property
    def planned_bytes(self) -> int:
        """Bytes of a sample of which a plan makes the windows of --shuffle blocks.

        Where values are divided, they count as float32 at least, so that the order of samples does
        not follow from how they are stored.
        """
        itemsize = self.dtype.itemsize
        if self.scale.is_divided:
            itemsize = max(4, itemsize)
        return math.prod(self.image_shape) * itemsize + self.targets.buffered_bytes


def ordered(names: Iterable[str]) -> list[str]:
    """Return split names in order of use: train, validation, test, then others by name."""
    places = {name: place for place, name in enumerate(SPLITS)}
    return sorted(names, key=lambda name: (places.get(name, len(SPLITS)), name))


def checksum(image: bytes | memoryview, seed: int) -> int:
    """Return the CRC-32 of a sample, whose target gives the `seed` (`Targets.seeds`).

    Equal images with different classes always differ in it.
    """
    return zlib.crc32(image, seed)


def make_uuid(facts: Mapping[str, Any], checksums: Mapping[str, np.ndarray | h5py.Dataset]) -> str:
    """Return the UUID of a pack with these attributes (`read_facts`) and checksums.

    `checksums` (N,) uint32 are by the names of the splits, as `ordered`.
    """
    digest = hashlib.sha256(json.dumps([FORMAT, VERSION, dict(facts)], sort_keys=True).encode())
    for name, values in checksums.items():
        digest.update(json.dumps(name).encode())
        for start in range(0, len(values), HASHED):
            digest.update(np.ascontiguousarray(values[start : start + HASHED], "<u4").data)
    return str(uuid.UUID(bytes=digest.digest()[:16]))


def read_pack(path: str | os.PathLike[str]) -> Pack:
    """Open a pack and check everything but its samples.

    Raises UsageError if the file is missing, not a pack, truncated, corrupt, incomplete or of
    another format.
    """
    from hpctrain.data.hdf5 import Unusable, locate_dataset, open_hdf5  # imports h5py

    path = os.path.abspath(path)
    if is_pattern(path):
        raise UsageError(f"{path} stands for HDF5 files that are no packs: it needs --images")
    with open_hdf5(path) as file:
        if file.attrs.get("format") != FORMAT.encode():
            raise Unusable(
                "it is not a pack: make one with hp.write_pack, or train on it with --images and"
                f" --labels; it holds {listed(file)}"
            )
        version = int(file.attrs["version"])
        if version != VERSION:
            raise Unusable(
                f"its format version is {version}, not {VERSION}: make it again,"
                f" {packing_command(path, file.attrs)}"
            )
        facts = read_facts(file)
        names = ordered(name for name in file if name != "identity")
        identity = bytes(file["identity"][:]).decode()
        if make_uuid(facts, {name: file[f"{name}/crc32"] for name in names}) != identity:
            raise Unusable(
                "it is corrupt: its attributes or checksums are not those of its identity; copy or"
                " pack it again"
            )
        scale = facts["scale"]
        targets = Targets.from_json(facts["targets"], facts["classes"])
        if scale["dtype"] not in TYPES or targets is None:
            raise Unusable(
                f"it holds {scale['dtype']} images with targets {facts['targets']}, which this"
                " version does not know: install a later one"
            )
        nodata = scale["nodata"]
        statistics = ChannelStatistics.from_json(scale, None if nodata is None else float(nodata))
        return Pack(
            path=path,
            uuid=identity,
            image_shape=tuple(facts["image_shape"]),
            targets=targets,
            splits={name: _read_split(path, file[name], facts, targets) for name in names},
            sizes={path: os.path.getsize(path)},
            mean=tuple(facts["mean"]),
            std=tuple(facts["std"]),
            statistics=statistics,
            max_value=scale["max_value"],
            scale=scale_of(scale["dtype"], scale["max_value"], statistics),
            provenance=facts["provenance"],
            identity=locate_dataset(file["identity"], {}),
            fit=facts["fit"],
        )


def _read_split(
    path: str, group: h5py.Group, facts: Mapping[str, Any], targets: Targets
) -> SplitInfo:
    """Read where the datasets of a split are stored. Raises Unusable."""
    from hpctrain.data.hdf5 import locate_in_one_piece

    samples = locate_in_one_piece(group, "crc32", "<u4").shape[0]
    if facts["fit"]:
        images = locate_in_one_piece(group, "bytes", "u1")
    else:
        dtype = np.dtype(facts["scale"]["dtype"]).newbyteorder("<").str
        images = locate_in_one_piece(group, "images", dtype, (samples, *facts["image_shape"]))
    split = SplitInfo(
        path=path,
        samples=samples,
        images=images,
        targets=locate_in_one_piece(group, "targets", targets.dtype.str, (samples, *targets.shape)),
        crc32=locate_in_one_piece(group, "crc32", "<u4", (samples,)),
    )
    if facts["fit"]:
        split = split._replace(offsets=locate_in_one_piece(group, "offsets", "<i8", (samples + 1,)))
    if "names" in group:
        split = split._replace(
            names=locate_in_one_piece(group, "names", "u1"),
            name_offsets=locate_in_one_piece(group, "name_offsets", "<i8", (samples + 1,)),
        )
    return split


def read_facts(file: h5py.File) -> dict[str, Any]:
    """Read the attributes of which the UUID is made."""
    attributes = file.attrs
    names = np.atleast_1d(attributes["classes"]).tolist()
    return {
        "image_shape": [int(n) for n in attributes["image_shape"]],
        "classes": [name.decode("utf-8", "surrogateescape") for name in names],
        "fit": attributes["fit"].decode(),
        "mean": [float(value) for value in attributes["mean"]],
        "std": [float(value) for value in attributes["std"]],
        "provenance": json.loads(attributes["provenance"]),
        "targets": json.loads(attributes["targets"]),
        "scale": json.loads(attributes["scale"]),
    }


def scale_of(dtype: str, max_value: float | None, statistics: ChannelStatistics) -> Scale:
    """Return the scale of a pack's images. Bytes that are divided by 255 may have any value."""
    divisor = max_value or FULL.get(dtype, 1.0)
    scale = Scale(dtype=dtype, divisor=divisor, nodata=statistics.nodata)
    if scale.is_bytes or not statistics.count.any():
        return scale
    return scale.with_ranges(statistics.low.tolist(), statistics.high.tolist())


def range_note(statistics: ChannelStatistics, scale: Scale, option: str) -> str:
    """Return a note on a largest value of integers far below what becomes 1.0, "" if there is none.

    `option` is what sets that value: "--max-value ", or "max_value=" in Python.
    """
    if scale.dtype not in FULL or not scale.is_full or not statistics.count.any():
        return ""
    dark = statistics.high < scale.divisor / 2
    most = statistics.high.max()
    if dark.all():
        bits, maximum = usual_maximum(most)
        return (
            f"the largest value is {most:,.0f} of {scale.divisor:,.0f}, as of"
            f" {counted(bits, 'bit')}: {option}{maximum} makes that 1.0"
        )
    if not dark.any():
        return ""
    channels = [f"{k} ({max(0, statistics.high[k]):,.0f})" for k in np.flatnonzero(dark)]
    return (
        f"of {scale.divisor:,.0f}, which becomes 1.0, the largest value is below a half in channel"
        f" {listed(channels)}: --normalize pack scales each channel by itself"
    )


def packing_command(path: str, attributes: Mapping[str, Any]) -> str:
    """Return what makes a pack of an earlier version again, as far as its attributes say it."""
    facts = json.loads(attributes["provenance"])
    words = ["python -m hpctrain pack"]
    if "styles" in facts:
        words.append("digits")
    elif "kind" in facts:
        words.append(shlex.quote(facts["source"]))
        words.append(f"--size {facts['size']} --channels {facts['channels']}")
    elif "task" in facts:
        words.append(f"shapes --task {facts['task']}")
    else:
        return "from its arrays, by hp.write_pack"
    if facts.get("fit") == "crop":
        words.append("--crop")
    if "encoding" in facts:
        words.append("--encoding jpeg")
    for name in ("background", "split", "fold", "seed"):
        if facts.get(name):
            words.append(f"--{name} {facts[name]}")
    words.append(f"--output {shlex.quote(path)} --overwrite")
    return " ".join(words)


def images_note(pack: Pack) -> str | None:
    """Return a note for the record on how images are understood, None for a pack of bytes."""
    images = pack.splits["train"].images
    scale = pack.scale
    height, width, channels = pack.image_shape
    shape = f"{height} rows x {width} columns x {counted(channels, 'channel')}"
    if pack.external is None:
        if scale == BYTES or pack.statistics is None:
            return None
        note = f"{os.path.basename(pack.path)} holds images of {shape}: {scale}"
        unused = range_note(pack.statistics, scale, "--max-value ")
        return "; ".join(filter(None, [note, unused]))
    files = pack.splits["train"].files
    where = images.dataset
    if files is not None:
        where += f" of {counted(len(files.names), 'file')}"
    targets = f"{len(pack.classes):,} classes: labels {listed(pack.classes, 5)}"
    if pack.targets.kind != "class":
        targets = f"{pack.targets.summary}: {listed(pack.targets.names, 5)}"
    note = f"{where} is read as {images.shape[0]:,} images of {shape} ({pack.layout}), of {targets}"
    if channels > min(height, width):
        note += f"; if {channels} is not the number of channels, give another --layout"
    is_usual = scale.dtype == "uint8" or scale.is_full
    if not is_usual or scale.nodata is not None:
        note += f"; a few images that were read have {scale}"
    if scale.dtype in FULL and scale.is_full and scale.high < scale.divisor / 2:
        bits, maximum = usual_maximum(scale.high)
        note += (
            f"; the largest value found is {scale.high:,.0f} of {scale.divisor:,.0f}, as of"
            f" {counted(bits, 'bit')}: --max-value {maximum} makes that 1.0"
        )
    return "; ".join([note, *describe_groups(pack), *pack.provenance["notes"]])


def describe_groups(pack: Pack) -> list[str]:
    """Return how many files, and which, each split of an external set has by --group file."""
    if pack.external is None or not pack.external["group"]:
        return []
    parts = []
    for split, info in pack.splits.items():
        assert info.files is not None and info.rows is not None
        numbers = np.unique(info.files.files_of(info.rows)).tolist()
        names = listed_names(map(info.files.name, numbers), FILES_NAMED)
        parts.append(f"{split} has {counted(len(numbers), 'file')} ({names})")
    every = "'predict RUN --split SPLIT' writes the file of each image"
    return [f"by --group file, {', '.join(parts)}; {every}"]


def describe_drawing(external: Mapping[str, Any]) -> str:
    """Return how the splits of an external file, with these `ExternalOptions`, were drawn.

    It is "" if the file has splits of its own.
    """
    if "{split}" in external["images"]:
        return ""
    text = f"by --split {external['split'] or DEFAULT_SPLIT} and --split-seed {external['seed']}"
    if external["block_rows"]:
        text += f" in blocks of {external['block_rows']:,} images"
    return text


def is_pack(path: str | os.PathLike[str]) -> bool:
    """Whether this is an HDF5 file with the format attribute of a pack; nothing else is checked."""
    import h5py

    try:
        with h5py.File(path, "r", locking=False) as file:
            return bool(file.attrs.get("format") == FORMAT.encode())
    except Exception:  # corrupt metadata raise many types
        return False
