"""A trained network in Python, without MPI, and the files, arrays and images of Pillow for it."""

from __future__ import annotations

import glob
import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from hpctrain.cluster import launched_local_rank
from hpctrain.config import Config, from_table, require_trust
from hpctrain.data.file_set import is_pattern
from hpctrain.data.formats import open_image, states_white
from hpctrain.data.images import (
    CHANGES,
    LOSSES,
    OTHER_SIZE,
    BadImage,
    Change,
    Changes,
    Fit,
    decode_threads,
    few_gray_levels,
)
from hpctrain.data.listing import is_archive, is_hdf5, list_folder
from hpctrain.data.pipeline import Pipeline
from hpctrain.data.scale import FULL, Scale, channel_ranges, present_values, unit_values
from hpctrain.data.slices import read_file
from hpctrain.data.split import Bad
from hpctrain.data.values import decode_reduced, decode_stored, is_npy, load_array
from hpctrain.errors import RunError, UsageError, first_line, one_line
from hpctrain.inference.network import Inference, find_model
from hpctrain.inference.rows import Dataset, Part, Rows, find_unusable, list_parts
from hpctrain.models import build, input_like, load_weights, read_model
from hpctrain.models.init import normalization_of
from hpctrain.models.memory_format import move_model
from hpctrain.numerics import torch_flags
from hpctrain.parallel.device import choose_device
from hpctrain.report.find import SETTINGS_FILE
from hpctrain.report.settings import read_settings
from hpctrain.tasks.facts import all_settings
from hpctrain.tasks.task import make_task, task_class
from hpctrain.text import MOST_NAMED, brief, counted, listed, printable, say
from hpctrain.torch_errors import explain_errors

PICTURE_CHANNELS = (1, 3)  # gray, RGB


def load(
    run: str | os.PathLike[str],
    *,
    trust_code: bool = False,
    runs_dir: str | os.PathLike[str] = "runs",
    device: str | torch.device = "auto",
    best: bool = False,
) -> TrainedNetwork:
    """Load a trained network, in this process alone and without MPI.

    `run` is the name or the folder of a run, a .safetensors file, or with `best` a sweep, of which
    the best network is loaded. With `trust_code`, functions of your own that the files of the run
    name are imported, such as its network. `device` is "auto", "cpu", "cuda", "cuda:N" or a
    torch.device. Raises UsageError, or for a device that is not there what torch raises.
    """
    path = find_model(os.fspath(run), os.fspath(runs_dir), best)
    if str(device) in ("auto", "cpu", "cuda"):
        device = choose_device(str(device), launched_local_rank())
    return TrainedNetwork(path, torch.device(device), trust_code)


NUMBERS = (float, int)  # types of a number in JSON
#: Types of the metadata that a file of weights must hold; None stands for null.
METADATA: dict[str, tuple[type | None, ...]] = {
    **dict.fromkeys(("model", "task", "precision", "pack"), (str,)),
    "loss": (str, None),
    "metric": (str, list, None),
    **dict.fromkeys(("classes", "image_shape"), (list,)),
    **dict.fromkeys(("mean", "std", "class_weights"), (list, None)),
    **dict.fromkeys(("small_stem", "channels_last"), (bool,)),
    **dict.fromkeys(("scale", "provenance"), (dict,)),
    "external": (dict, list, None),
    "evaluation_rows": (int,),
    **{name: NUMBERS if kind is float else (kind,) for name, kind in all_settings().items()},
}
#: Types of what stands in its ``scale``.
SCALE: dict[str, tuple[type, ...]] = {
    "dtype": (str,),
    **dict.fromkeys(("divisor", "low", "high"), NUMBERS),
    "nodata": (*NUMBERS, type(None)),
}


def check_metadata(metadata: Mapping[str, Any]) -> None:
    """Raise KeyError, TypeError or ValueError for metadata that is not as in `METADATA`."""
    for name, types in METADATA.items():
        value = metadata[name]
        if (None if value is None else type(value)) not in types:
            raise TypeError(f"{name} is {brief(value, 40)}")
    if any(type(text) is not str for text in metadata["metric"] or ()):
        raise TypeError(f"metric is {brief(metadata['metric'], 40)}")
    if metadata["evaluation_rows"] < 1:
        raise ValueError(f"evaluation_rows is {metadata['evaluation_rows']}")
    _, _, channels = metadata["image_shape"]
    lengths = {"mean": channels, "std": channels}
    task_class(metadata["task"]).check_metadata(metadata)
    for name, length in lengths.items():
        if metadata[name] and len(metadata[name]) != length:
            raise ValueError(f"{name} has {len(metadata[name])} values, not {length}")
    if metadata.get("normalization", "image") != "image":
        raise ValueError(f"normalization is {brief(metadata['normalization'], 40)}")
    scale = metadata["scale"]
    for name, types in SCALE.items():
        if type(scale[name]) not in types:
            raise TypeError(f"{name} of its scale is {brief(scale[name], 40)}")
    np.dtype(scale["dtype"])  # or it raises TypeError
    for name in ("lows", "highs"):
        values = scale.get(name, ())  # () in files of earlier versions, too
        if len(values) not in (0, channels) or any(type(value) not in NUMBERS for value in values):
            raise ValueError(f"{name} of its scale is {brief(values, 40)}")
    if bool(metadata["mean"]) != bool(metadata["std"]):
        raise ValueError("there is a mean without std, or std without mean")


class TrainedNetwork:
    """A trained network, as `load` returns it."""

    def __init__(self, path: Path, device: torch.device, trust_code: bool = False) -> None:
        """Read the network of a file.

        Raises UsageError for a file not written by hpctrain, and if it names a function of the
        user's own without `trust_code`.
        """
        state, metadata = read_model(path)
        try:
            check_metadata(metadata)
            scale = Scale(**metadata["scale"])
            shape = tuple(metadata["image_shape"])
            classes = tuple(metadata["classes"])
            names = tuple(metadata.get("columns", classes))
            require_trust({"model": metadata["model"]}, path, trust_code)
            with torch.random.fork_rng(devices=[]):  # first weights are drawn, and replaced
                task_of_file = task_class(metadata["task"])
                model = build(
                    metadata["model"],
                    shape,
                    task_of_file.outputs(len(names)),
                    metadata["small_stem"],
                    output=task_of_file.output_shape(shape, len(names)),
                )
        except (KeyError, TypeError, ValueError) as error:
            raise UsageError(
                f"{path} holds weights but not the network they belong to ({one_line(error)}): it"
                " was not written at the end of a run of this hpctrain"
            ) from error
        load_weights(model, state, path)
        channels_last = metadata["channels_last"]
        self.path = path
        self.device = device
        self._trust_code = trust_code
        self.model: nn.Module = move_model(model.eval(), device, channels_last)  # plain torch
        self.classes: tuple[str, ...] = classes
        self.columns: tuple[str, ...] = tuple(metadata.get("columns", ()))  # of values
        self.image_shape: tuple[int, int, int] = shape  # (H, W, C)
        self.scale: Scale = scale  # how the images of the training were scaled
        #: All that the file holds: names of the network and the pack, step, figures and so on.
        self.metadata: dict[str, Any] = metadata
        self.decoders: int | None = None  # threads that decode files; None: as `Split` does
        like = input_like(model)
        task = make_task(metadata, names, like)
        self.inference = Inference(
            model=model,
            task=task,
            pipeline=Pipeline(
                device=device,
                dtype=like.dtype,
                channels_last=channels_last,
                normalization=normalization_of(metadata),
                nodata=scale.nodata,
                stage=task.stage,
            ),
            rows=metadata["evaluation_rows"],
        )

    def __repr__(self) -> str:
        height, width, channels = self.image_shape
        model = f"{self.metadata['model']}, images {width}x{height}x{channels}"
        targets = f"{len(self.classes)} classes"
        if self.columns:
            targets = f"values {listed(self.columns, 3)}"
        return f"<TrainedNetwork {self.path}: {model}, {targets}, {self.device}>"

    @cached_property
    def config(self) -> Config | None:
        """The settings of the run; None for a file that does not lie in the folder of a run.

        Raises UsageError if they cannot be read, or name functions of the user's own without
        `trust_code`: ``train`` would import them.
        """
        path = self.path.with_name(SETTINGS_FILE)
        if not path.is_file():
            return None
        config = from_table(read_settings(path.parent), Config(), str(path))
        require_trust(vars(config), path, self._trust_code)
        return config

    def preprocess(self, images: Any) -> Tensor:
        """Return images as the input of `model`, (N, C, H, W) on its device.

        They are resized as for the pack of the training, and scaled as in the training. `images`
        are files, folders, patterns or HDF5 files of images, or an array (N, H, W, C) of uint8,
        (N, H, W) of gray images, one image (H, W, C) or (H, W), an image of Pillow, or a list of
        images of any sizes. Arrays of other types must have the network's size: stored values of
        the training, or floats in [0, 1].
        Raises UsageError if their scale is another or cannot be known, and RunError for files that
        cannot be used.
        """
        bad = Bad()
        with closing(open_images(self, images)) as opened:
            pixels = np.empty((len(opened), *self.image_shape), opened.dtype)
            opened.gather(np.arange(len(opened)), pixels, bad=bad)
        refuse_unusable(bad, len(opened))
        say_range(opened, self.scale, *opened.ranges)
        say_losses(opened, opened.count_losses())
        return self.inference.pipeline.inputs(torch.from_numpy(pixels), divisor=opened.divisor)

    def predict(
        self, images: Any, *, batch_size: int | None = None, skip_bad: bool = False
    ) -> Predictions:
        """Return the class probabilities of images, computed as by ``python -m hpctrain predict``.

        `images` are given as to `preprocess`. `batch_size` images pass through the network at a
        time, by default as many as in the run's own test. Raises RunError for images that cannot be
        used, and UsageError for HDF5 files; with `skip_bad` they are left out, and listed in the
        result. Raises UsageError.
        """
        task = self.inference.task
        if task.gives_images:
            raise UsageError(f"this network {task.facts.use}: call model(preprocess(images))")
        if batch_size is not None and batch_size < 1:
            raise UsageError(f"batch_size {batch_size}: give 1 or more")
        files: dict[str, str] = {}  # that cannot be used
        inference = self.inference._replace(rows=batch_size or self.inference.rows)
        smaller = explain_errors(RunError, "a smaller batch_size needs less")
        flags = torch_flags(inference.task.precision, benchmark=False)
        opening = closing(open_images(self, images, files if skip_bad else None))
        with opening as opened, flags, smaller:
            blocks = range(inference.blocks(len(opened)))
            answered = list(inference.answers(opened, blocks))
            rows = [row for block, _ in answered for row in block.rows.tolist()]
            columns = {
                name: np.array([*map(text, rows)], str) for name, text in opened.columns.items()
            }
        bad = Bad()
        for block, _ in answered:
            bad |= block.bad
        if not skip_bad:
            refuse_unusable(bad, len(opened), ": skip_bad=True leaves them out")
        say_range(opened, self.scale, *opened.ranges)
        say_losses(opened, opened.count_losses())
        if "row" in columns:
            columns["row"] = columns["row"].astype(np.int64)
        outputs = task.outputs(len(self.columns or self.classes))
        none = np.empty((0, outputs), np.float32)
        numbers = np.concatenate([none, *(answers for _, answers in answered)])
        unusable = files | {opened.source_of(row): bad[row] for row in sorted(bad)}
        return Predictions(columns | task.table(numbers), numbers, unusable)


class Predictions(dict[str, np.ndarray]):
    """Answers to images: columns of equal length by name, which pandas.DataFrame takes as they are.

    ``file`` or ``row``, or of HDF5 files both, name the image, ``prediction`` is the name of its
    most probable class, ``label`` that class as a number, ``probability`` its probability. Then
    each class has a column with its probability. ``probabilities`` holds these together, (N, K)
    float32, and ``unusable`` the reason for each image that was left out, by its name.

    Of several classes, ``prediction`` names those that are present, as in "cat;dog", without label
    and probability. Of values, each column has one, in the unit of the data, and ``probabilities``
    holds them, (N, T).
    """

    def __init__(
        self,
        columns: dict[str, np.ndarray],
        probabilities: np.ndarray,
        unusable: dict[str, str],
    ) -> None:
        super().__init__(columns)
        self.probabilities = probabilities
        self.unusable = unusable


# Images that are no split of a pack


class Images:
    """Images in the size of a network, read by row as the samples of a `Split`.

    Their values are stored values, which the pipeline divides by `divisor`: those of the training,
    those of arrays of another type, or those of files of any type in units of the training's.
    """

    name = "images"

    def __init__(
        self,
        network: TrainedNetwork,
        images: Sequence[Path | Image.Image | np.ndarray | Part],
        threads: int | None = None,
    ) -> None:
        """Take what `list_files` returns, or arrays of `as_array` and images of Pillow. Raises
        UsageError.

        Files are decoded by `threads` threads, by default as those of a `Split`.
        """
        self._threads = threads
        self.image_shape = network.image_shape
        self._rows: Rows | None = None
        parts = [part for part in images if isinstance(part, Part)]
        if parts:
            self._rows = Rows(parts, threads)
        self._images = [image for image in images if not isinstance(image, Part)]
        count = len(self)
        self._scale = network.scale
        self._fit = fit_of(network)
        arrays = [
            image
            for image in self._images
            if isinstance(image, np.ndarray) and image.shape == self.image_shape
        ]
        self._are_stored = len(arrays) == len(self._images)  # as arrays, or rows, of one type
        self.dtype = self._scale.file_type
        self.divisor = self._scale.divisor
        if self._rows is not None:
            self.dtype = self._scale.array_type(self._rows.dtype)
            self.divisor = self._scale.divisor_of_type(self._rows.dtype)
        elif arrays and self._are_stored:
            self.dtype = self._scale.array_type(arrays[0].dtype)
            self.divisor = self._scale.divisor_of(arrays)
        self.are_files = any(isinstance(image, Path) for image in self._images)
        self._kinds = np.zeros(count, np.uint32)  # bits of Change, once images are read
        channels = self.image_shape[2]
        self._lows = np.full((count, channels), np.inf, np.float32)  # as stored for the training
        self._highs = np.full((count, channels), -np.inf, np.float32)
        provenance = network.metadata["provenance"]
        changed = provenance.get("changed", {})
        self._are_resized_in_training = provenance.get("fit") in ("stretch", "crop")
        self._has_gray_in_training = Change.GRAY_TO_COLOUR.name.lower() in changed
        self._had_16_bits = (  # in `pack`, which has compared their values
            Change.SIXTEEN_BITS.name.lower() in changed
        )

    def __len__(self) -> int:
        return len(self._images) if self._rows is None else len(self._rows)

    def source_of(self, index: int) -> str:
        """Return the name of the file, that of the row, or the number of the image."""
        if self._rows is not None:
            return self._rows.name_of(index)
        if self.are_files:
            return str(self._images[index])
        return f"image {index}"

    @property
    def columns(self) -> dict[str, Callable[[int], str]]:
        """What a table says of an image, by the name of the column."""
        if self._rows is not None:
            return self._rows.columns()
        return {"file": self.source_of} if self.are_files else {"row": str}

    def close(self) -> None:
        """Close the HDF5 files."""
        if self._rows is not None:
            self._rows.close()

    @property
    def ranges(self) -> tuple[np.ndarray, np.ndarray]:
        """The smallest and the largest value of each channel, (C,), as stored for the training.

        They are inf and -inf if no image was read, and of bytes.
        """
        return self._lows.min(axis=0, initial=np.inf), self._highs.max(axis=0, initial=-np.inf)

    def count_losses(self) -> dict[str, int]:
        """Return how many of the images read so far have lost something, by what it is."""
        texts = {
            change: text.format(background=self._fit.background) for change, text in LOSSES.items()
        }
        if not self._are_resized_in_training:
            texts[Change.RESIZED] = OTHER_SIZE
        if not self._has_gray_in_training:
            texts[Change.GRAY_TO_COLOUR] = CHANGES[Change.GRAY_TO_COLOUR]
        return {text: int(np.count_nonzero(self._kinds & change)) for change, text in texts.items()}

    def read_targets(self, indices: np.ndarray, bad: Bad) -> None:
        """Return None: no targets are known."""

    def gather(self, indices: np.ndarray, out: np.ndarray, *, bad: Bad) -> None:
        """Read rows (n,) in several threads into `out` (n, H, W, C); describe unusable ones."""
        nodata = self._scale.nodata
        images: Iterable[Path | Image.Image | np.ndarray]
        if self._rows is not None:
            images = self._rows.read(indices, bad)
        else:
            images = [self._images[row] for row in indices.tolist()]

        def read(image: np.ndarray, row: int, given: Path | Image.Image | np.ndarray) -> None:
            if row in bad:
                return
            try:
                values, changes = self._read(given)
            except (BadImage, OSError) as error:
                bad[row] = f"{self.source_of(row)} cannot be read as an image: {error}"
            except UsageError as error:
                bad[row] = f"{self.source_of(row)}: {error}"
            else:
                with np.errstate(over="ignore", invalid="ignore"):
                    image[:] = values
                self._kinds[row] = changes.kinds
                unit = unit_values(present_values(image, nodata), self.divisor)
                if not unit.size:
                    bad[row] = f"{self.source_of(row)} holds no data, only {nodata:g}"
                elif not (is_finite(present_values(values, nodata)) and is_finite(unit)):
                    bad[row] = f"{self.source_of(row)} holds NaN or infinite values"
                elif not self._scale.is_bytes:
                    lows, highs = channel_ranges(image, nodata)
                    units = self._scale.divisor / self.divisor
                    self._lows[row] = np.multiply(lows, units)
                    self._highs[row] = np.multiply(highs, units)

        with decode_threads(self._threads) as threads:
            list(threads.map(read, out, indices.tolist(), images))

    def _read(self, image: Path | Image.Image | np.ndarray) -> tuple[np.ndarray, Changes]:
        """Return the stored values (H, W, C) of an image, and what was changed in it.

        Raises BadImage, OSError, and UsageError if its scale cannot be known.
        """
        if self._are_stored and isinstance(image, np.ndarray):
            if self._rows is not None:  # of arrays, all values have been compared
                self._scale.require_room(image)
            return image, Changes()
        values, changes = self._decode(image)
        if not self._scale.is_bytes:
            return self._scale.as_stored(values), changes
        if values.dtype != np.uint8:
            raise UsageError(f"{values.dtype} values in a file: give 8 bits, or arrays to hp.load")
        return values, changes

    def _decode(self, image: Path | Image.Image | np.ndarray) -> tuple[np.ndarray, Changes]:
        """Return the values (H, W, C) of an image in the size of the network, of its own type.

        Those of more than 8 bits are reduced for a network of bytes. Raises what `_read` raises.
        """
        if isinstance(image, np.ndarray) and image.shape == self.image_shape:
            return image, Changes()
        source: bytes | Image.Image
        if isinstance(image, np.ndarray):
            source = Image.fromarray(image[..., 0] if image.shape[2] == 1 else image)
        elif isinstance(image, Path):
            source = read_file(os.fspath(image))
        else:
            source = image
        if isinstance(source, bytes) and is_npy(source):
            return self._decode_array(source)
        if self._scale.is_bytes and (self._scale.nodata is None or self._had_16_bits):
            values, changes = decode_reduced(source, self._fit)
            self._check_16_bits(source, changes)
        else:
            values, changes = decode_stored(source, self._fit)
            self._check_white(source, values)
        return values, changes

    def _decode_array(self, data: bytes) -> tuple[np.ndarray, Changes]:
        """Return the values of a .npy file, of any type if they have the size of the network."""
        values = load_array(data)
        if values.ndim == 2:
            values = values[..., None]
        if values.shape != self.image_shape or not is_number(values.dtype):
            return decode_stored(data, self._fit)
        return values.astype(values.dtype.newbyteorder("="), copy=False), Changes()

    def _check_16_bits(self, source: bytes | Image.Image, changes: Changes) -> None:
        """Raise UsageError for an image that was reduced to 8 bits if too little of it is left."""
        if not changes.kinds & Change.SIXTEEN_BITS or self._had_16_bits:
            return
        largest = changes.largest
        if not largest:  # of the upper bytes
            values, _ = decode_stored(source, self._fit)
            largest = int(values.max())
        loss = few_gray_levels(largest)
        if loss and largest > 0:
            raise UsageError(f"its largest value is {loss}: give images of 8 bits")

    def _check_white(self, source: bytes | Image.Image, values: np.ndarray) -> None:
        """Raise UsageError for a file of fewer than 16 bits in whose scale the training was not."""
        scale = self._scale
        if (
            values.dtype == np.uint16
            and values.max() < FULL["uint16"] / 2
            and scale.is_full
            and scale.is_bright
            and isinstance(source, bytes)
            and states_white(open_image(source), source)
        ):
            raise UsageError("it says itself which value is white: give an array of its values")


def is_finite(values: np.ndarray) -> bool:
    """Whether there is neither NaN nor infinity."""
    return values.dtype.kind != "f" or bool(np.isfinite(values).all())


def is_number(dtype: np.dtype) -> bool:
    """Whether values are integers or floats of at most 64 bits."""
    return dtype.kind in "iuf" and dtype.itemsize <= 8


def fit_of(network: TrainedNetwork) -> Fit:
    """Return how files are decoded for a network: as `pack` did it for the training.

    If that was on arrays with other channels than pictures have, pages of a TIFF are channels, too.
    """
    provenance = network.metadata["provenance"]
    fit = Fit.of_pack(network.image_shape, provenance, network.scale.nodata)
    if "fit" not in provenance and fit.channels not in PICTURE_CHANNELS:
        return fit._replace(pages=True)
    return fit


def open_images(
    network: TrainedNetwork, images: Any, unusable: dict[str, str] | None = None
) -> Images:
    """Return `images`, which are given as to `TrainedNetwork.preprocess`. Raises UsageError.

    HDF5 files that cannot be used are left out as `list_files` says.
    """
    if isinstance(images, str | os.PathLike | Image.Image):
        images = [images]
    elif hasattr(images, "__array__"):  # also of torch and pandas
        array = to_numpy(images)
        images = array if is_batch(array, network.image_shape) else [array]
    try:
        images = list(images)
    except TypeError:
        raise UsageError(f"{brief(images)} is no image, and no list of images") from None
    are_files = [isinstance(image, str | os.PathLike) for image in images]
    if any(are_files):
        if not all(are_files):
            raise UsageError("files among arrays: give files only, or arrays only")
        return Images(network, list_files(network, images, Dataset(), unusable))
    arrays = [x if isinstance(x, Image.Image) else as_array(network, x) for x in images]
    types = {getattr(array, "dtype", np.dtype(np.uint8)) for array in arrays}
    if len(types) > 1:
        raise UsageError(f"images of several types: {listed(sorted(map(str, types)))}")
    return Images(network, arrays)


def list_files(
    network: TrainedNetwork,
    targets: Sequence[str | os.PathLike[str]],
    dataset: Dataset,
    unusable: dict[str, str] | None = None,
) -> list[Path] | list[Part]:
    """List image files as `list_images` does, or open HDF5 files. Raises UsageError.

    If `unusable` is given, HDF5 files that cannot be used are left out, and it says why, unless
    these are all.
    """
    files = list_images(targets)
    with decode_threads() as threads:
        are_hdf5 = list(threads.map(_begins_as_hdf5, files))
    if not any(are_hdf5):
        if dataset != Dataset():
            raise UsageError("--images and --layout are of HDF5 files, and these are none")
        return files
    if unusable is not None:
        leave_out_others(files, are_hdf5, unusable)
    if not all(are_hdf5):
        one = files[are_hdf5.index(True)]
        other = files[are_hdf5.index(False)]
        raise UsageError(
            f"{one} is an HDF5 file, and {other} is not: name files of one kind, as in 'new/*.h5'"
        )
    paths = [*map(str, files)]
    if unusable is not None and len(paths) > 1:
        reasons = find_unusable(paths, network.metadata, dataset)
        if len(reasons) == len(paths):
            raise UsageError(f"{reasons[paths[0]]} ({len(paths):,} of {len(paths):,} files)")
        unusable |= reasons
        paths = [path for path in paths if path not in reasons]
    return list_parts(paths, network.metadata, dataset)


def leave_out_others(files: list[Path], are_hdf5: list[bool], unusable: dict[str, str]) -> None:
    """Leave out files that are no HDF5 files, but are named as one of those is; say so."""
    suffixes = {file.suffix for file, is_such in zip(files, are_hdf5, strict=True) if is_such}
    for number in reversed(range(len(files))):
        file = files[number]
        if not are_hdf5[number] and file.suffix in suffixes:
            unusable[str(file)] = f"{file} is not an HDF5 file"
            del files[number], are_hdf5[number]


def is_batch(array: np.ndarray, image_shape: tuple[int, int, int]) -> bool:
    """Whether an array holds several images, or names of files."""
    if array.ndim > 3 or array.dtype.kind in "OU":
        return True
    if array.ndim < 3 or array.shape == image_shape:
        return False
    height, width, channels = image_shape
    if channels == 1 and array.shape[1:] == (height, width):
        return True
    # Gray images, unless (C, H, W)
    return array.shape[2] not in (1, 3, 4) and not array.shape[0] == channels == 3


def to_numpy(images: Any) -> np.ndarray:
    """Return an array of NumPy. Raises UsageError."""
    if isinstance(images, np.ma.MaskedArray):
        raise UsageError("a masked array: fill the masked values, as in images.filled(0)")
    try:
        return np.asarray(images)
    except Exception as error:  # torch raises others for tensors that are not on the CPU
        raise UsageError(f"images that are no array of NumPy: {first_line(error)}") from None


def as_array(network: TrainedNetwork, image: Any) -> np.ndarray:
    """Return (H, W, C): uint8 of any size, or stored values or floats of the network's size.

    Raises UsageError.
    """
    array = to_numpy(image)
    scale = network.scale
    shape = network.image_shape
    if array.ndim == 2 and array.shape[1] == math.prod(shape) and array.shape != shape[:2]:
        axes = ", ".join(map(str, shape))
        raise UsageError(f"flat images {array.shape}: reshape them to (N, {axes})")
    if array.ndim == 2:
        array = array[..., None]
    array = array.astype(array.dtype.newbyteorder("="), copy=False)
    name = array.dtype.name
    is_picture = array.ndim == 3 and array.shape[2] in PICTURE_CHANNELS and array.size
    is_resized = name == "uint8" and is_picture and shape[2] in PICTURE_CHANNELS
    if is_resized or (array.shape == shape and is_number(array.dtype)):
        return array
    if array.shape == shape and name == "bool" and not scale.is_full:
        return array.astype(np.uint8)
    if array.shape == (shape[2], *shape[:2]):
        raise UsageError(
            f"an image of {name} {array.shape}, channels first: numpy.moveaxis(images, -3, -1)"
            f" makes it {shape}"
        )
    values = "floats" if scale.is_bytes else f"floats or {scale.dtype} values"
    usable = f"uint8 (H, W, C) of any size, C = 1 (gray) or 3, or {values} of the network's size"
    if shape[2] not in PICTURE_CHANNELS:
        usable = f"uint8, {values} of the network's size"
    raise UsageError(f"an image of {name} {array.shape}: give {usable}, {shape}")


def list_images(targets: Sequence[str | os.PathLike[str]]) -> list[Path]:
    """List the given files, and all in the given folders as ``pack`` does. Raises UsageError.

    Notes on what is left out of a folder are printed on standard error.
    """
    files: list[Path] = []
    for target in chain.from_iterable(map(match_pattern, targets)):
        if target.is_dir():
            listing = list_folder(os.fspath(target))
            listing.note_hidden()
            for text in listing.notes:
                say(f"{target}: {text}", sys.stderr)
            if not listing.names:
                raise UsageError(f"{target} holds no image files")
            files += (target / name for name in listing.names)
        elif not target.exists():
            raise UsageError(f"{target}: no such file or folder")
        elif not target.is_file():
            raise UsageError(f"{target} is not a regular file")
        elif _begins_as_archive(target):
            raise UsageError(f"{target} is an archive: unpack it, or make a pack of it")
        else:
            files.append(target)
    return files


def match_pattern(target: str | os.PathLike[str]) -> list[Path]:
    """Return the files that match a pattern, in the order of their names, or the path that it is.

    Raises UsageError if no file matches.
    """
    if not is_pattern(target):
        return [Path(target)]
    names = sorted(glob.glob(os.fspath(target), recursive=True))
    if not names:
        raise UsageError(f"{target}: no file matches")
    return [*map(Path, names)]


def _begins_as_archive(path: Path) -> bool:
    return _begins(is_archive, path)


def _begins_as_hdf5(path: Path) -> bool:
    return _begins(is_hdf5, path)


def _begins(is_such: Callable[[str], bool], path: Path) -> bool:
    try:
        return is_such(os.fspath(path))
    except (BadImage, OSError):  # it is unusable, which reading it says
        return False


def say_range(images: Images, scale: Scale, lows: np.ndarray, highs: np.ndarray) -> None:
    """Print a line if images are unlike those of a training, by the range of each channel, (C,)."""
    if not (lows <= highs).any():
        return
    seen = scale.with_ranges(lows.tolist(), highs.tolist())
    start = counted(len(images), "image")
    unlike = seen.unlike_channels(scale)
    if seen.is_unlike(scale):
        say(f"{start} with values {seen.range_text}; the training was on {scale}", sys.stderr)
    elif unlike:
        say(f"{start} with {listed(unlike, separator='; ')} as in the training", sys.stderr)


def say_losses(images: Images, losses: Mapping[str, int]) -> None:
    """Print a line on what images have lost when they were read, if any has lost something."""
    text = ", ".join(f"{count:,} {loss}" for loss, count in losses.items() if count)
    if text:
        say(f"of {len(images):,} images: {text}", sys.stderr)


def refuse_unusable(bad: Mapping[int, str], total: int, ending: str = "") -> None:
    """Raise RunError if images, of `total`, are unusable; its first line ends with `ending`."""
    if bad:
        texts = [printable(bad[row], newlines=False) for row in sorted(bad)]
        reasons = listed(texts, MOST_NAMED, "\n  ")
        raise RunError(f"{len(bad):,} of {total:,} images cannot be used{ending}\n  {reasons}")
