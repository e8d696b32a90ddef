"""Exact distributed evaluation: every sample once, the same figures on any number of ranks.

    mpirun -n 4 python -m hpctrain evaluate RUN --data flowers.h5

The split is divided into fixed blocks of samples; each rank computes a contiguous run of blocks.
The sums of all blocks are gathered and added exactly, by math.fsum: the order has no effect.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from hpctrain.config import EvaluateConfig, NetworkConfig, require_trust
from hpctrain.config.functions import source_files
from hpctrain.cores import check_threads
from hpctrain.data.file_set import is_pattern
from hpctrain.data.pack import ExternalOptions, Pack, is_pack, read_pack
from hpctrain.data.scale import Scale, is_nodata, unit_values
from hpctrain.data.split import Bad, Split, describe_first
from hpctrain.errors import RunError, UsageError
from hpctrain.files import write_whole, writing
from hpctrain.inference.network import ImageSource, Inference, find_model, require_split
from hpctrain.inference.rows import check_nodata, check_scale_attributes, range_of
from hpctrain.memory import keep_memory
from hpctrain.models import input_like
from hpctrain.numerics import torch_flags
from hpctrain.packing.find import find_pack_path
from hpctrain.parallel import mpi
from hpctrain.parallel.device import choose_device
from hpctrain.parallel.hosts import share_cores
from hpctrain.parallel.mpi import Comm, agreed, allgather, on_all, on_root
from hpctrain.report import results
from hpctrain.report.find import NETWORK_FILE
from hpctrain.report.outputs import check_not_read, check_picture, output_name
from hpctrain.report.record import value_in, without_nonfinite
from hpctrain.tasks.confusion import Confusion
from hpctrain.tasks.forward import network_output
from hpctrain.tasks.functions import check_names
from hpctrain.tasks.measures import Measures, load_measures
from hpctrain.tasks.tally import Tally, find_tally
from hpctrain.tasks.task import Caption, Task
from hpctrain.text import brief, listed, say, short_number
from hpctrain.torch_errors import explain_errors
from hpctrain.watchdog import started

if TYPE_CHECKING:
    from hpctrain.inference.trained import TrainedNetwork

CONTRAST = 2.0  # standard deviations from the mean, of black and white in pictures


@dataclass(frozen=True)
class Evaluation:
    """The results over one split."""

    rows: int
    means: dict[str, float | None]  # the task's figures; None: not for this task
    metrics: dict[str, float | None]  # figures of --metric
    tallies: list[Tally]  # merged; the figures follow from them
    classes: tuple[str, ...]  # names of the K classes

    @property
    def loss(self) -> float:
        """The mean loss."""
        loss = self.means["loss"]
        assert loss is not None
        return loss

    @property
    def accuracy(self) -> float | None:
        """The share of correct answers; None without classes."""
        return self.means.get("accuracy")

    @property
    def balanced_accuracy(self) -> float | None:
        """The mean recall of the classes that have samples in the split; None without classes."""
        return self.means.get("balanced_accuracy")

    @property
    def confusion(self) -> np.ndarray | None:
        """The matrix (K, K) int64: class i predicted as class j; None for over 2,048 classes."""
        tally = find_tally(self.tallies, Confusion)
        return tally.matrix if tally else None

    @property
    def mistakes(self) -> list[Any]:
        """The worst answers, the worst first, if they were asked for.

        Each is an `Answer` or, of several classes, an `Entry`, both by their probability; of
        values it is an `Estimate`, by its error.
        """
        return [answer for tally in self.tallies for answer in tally.worst]

    def value(self, name: str) -> float | None:
        """Return a figure, of --metric, too; None if it has none of this name."""
        return value_in(self.figures(), name)

    def figures(self, without: Collection[str] = ()) -> dict[str, Any]:
        """Return the figures as they are recorded and written, but those `without`."""
        figures: dict[str, Any] = {"rows": self.rows, **self.means}
        if self.metrics:
            figures["metrics"] = self.metrics
        return {name: value for name, value in figures.items() if name not in without}


def evaluate(
    inference: Inference,
    split: Split,
    comm: Comm,
    go_on: Callable[[], bool] = lambda: True,
    mistakes: int = 0,
    has_plot: bool = False,
    most: int | None = None,
) -> Evaluation | None:
    """Evaluate a network in its task over all samples of a split. Collective.

    The result includes the `mistakes` worst answers, of equal ones the first rows, and with
    `has_plot` what `Task.plot` draws. It is that of at most `most` blocks, if they are limited.
    `go_on` is called before each block; if it returns False on any rank, that rank's other blocks
    are skipped, and all ranks return None. Raises RunError on all ranks for samples that are
    corrupt or not finite, and UsageError if the metric did not name the same figures for all
    blocks.
    """
    task = inference.task
    blocks = inference.blocks(len(split))
    if most is not None:
        blocks = min(blocks, most)
    numbers = range(blocks * comm.rank // comm.size, blocks * (comm.rank + 1) // comm.size)
    tallies = task.tallies(mistakes)
    if has_plot:
        tallies += task.plot_tallies()
    bad = Bad()
    blocks_done = 0

    def measure(inputs: Tensor, targets: Tensor) -> dict[tuple[int, str], Tensor]:
        outputs = network_output(inference.model, inputs, task.precision)
        return {
            (number, name): value
            for number, tally in enumerate(tallies)
            for name, value in tally.measure(outputs, inputs, targets).items()
        }

    with on_all(comm):
        for block, measured in inference.outputs(split, numbers, measure, go_on):
            bad |= block.bad
            blocks_done += 1
            for number, tally in enumerate(tallies):
                tally.add(
                    block,
                    {name: value for (owner, name), value in measured.items() if owner == number},
                )
    gathered = allgather(comm, (bad, blocks_done, [tally.part() for tally in tallies]))
    bad_of_ranks, done_by_ranks, parts_of_ranks = zip(*gathered, strict=True)
    if text := describe_first(bad_of_ranks):
        raise agreed(RunError(text))
    if sum(done_by_ranks) < blocks:
        return None
    for tally, parts in zip(tallies, zip(*parts_of_ranks, strict=True), strict=True):
        tally.merge(parts, comm)
    means: dict[str, float | None] = {}
    metrics: dict[str, float | None] = {}
    names: list[str] = []
    for tally in tallies:
        if not tally.is_metric:
            means |= tally.figures()
            continue
        metrics |= tally.figures()
        names += tally.figures()
    try:
        check_names(names)
    except UsageError as error:
        raise agreed(error) from None
    return Evaluation(
        rows=len(split),
        means=means,
        metrics=metrics,
        tallies=tallies,
        classes=split.pack.classes,
    )


# The subcommand


def main(config: EvaluateConfig, comm: Comm) -> int:
    """``hpctrain evaluate``: loss, accuracy, per-class table, confusion matrix. Collective."""
    started("reading the network")
    evaluate_saved(config, comm, printed=True)
    return 0


@contextmanager
def open_network(config: NetworkConfig, comm: Comm) -> Iterator[TrainedNetwork]:
    """Load the network that the settings name onto this rank's device. Collective.

    In the block, torch has the settings of its precision.
    """
    from hpctrain.inference.trained import TrainedNetwork  # imports Pillow

    path = on_root(comm, find_model, config.run, config.runs_dir, config.best)
    keep_memory()
    cores = share_cores(comm)
    threads = config.threads or cores.threads
    torch.set_num_threads(threads)  # launchers set 1 or all
    with on_all(comm):
        check_threads(threads)
        device = choose_device(config.device, mpi.comm_of_host(comm).rank)
        network = TrainedNetwork(path, device, config.trust_code)
    network.decoders = cores.decoding_threads(device.type)
    if code := source_files({"model": network.metadata["model"]}):
        mpi.check_equal_on_all(comm, code)
    inference = network.inference
    task = replace(inference.task, precision=config.precision or inference.task.precision)
    rows = config.batch_size or inference.rows
    network.inference = inference._replace(task=task, rows=rows)
    # With algorithms chosen by timing, the figures would depend on the ranks.
    smaller = explain_errors(RunError, "a smaller --batch-size needs less")
    with torch_flags(task.precision, benchmark=False), smaller:
        yield network


def open_split(network: TrainedNetwork, config: NetworkConfig, comm: Comm) -> Split:
    """Open the split of --data, by default of the pack of training. Collective.

    Raises UsageError if there is none, or if the pack is not like the one of training.
    """

    def find_pack() -> Pack:
        metadata = network.metadata
        trained_on = Path(metadata["pack"])
        if not config.data and not (trained_on.is_file() or is_pattern(trained_on)):
            raise UsageError(
                f"the pack that {network.path} was trained on, {metadata['pack']}, is gone: give"
                " --data"
            )
        advice = "" if config.data else "; give --data"
        path = find_pack_path(
            config.data or metadata["pack"],
            config.cache_dir,
            metadata["task"],
        )
        pack = read_in_scale(path, metadata["external"], network.scale, config.cache_dir)
        require_split(pack, config.split)
        kind = network.inference.task.facts.targets
        check_scale_attributes(pack, metadata)
        for name, value, trained in (
            ("images of shape", pack.image_shape, network.image_shape),
            ("classes", pack.classes, network.classes),
            ("columns", pack.targets.columns, network.columns),
            ("targets of kind", pack.targets.kind, kind or pack.targets.kind),
            ("uuid", pack.uuid, pack.uuid if config.data else metadata["pack_uuid"]),
        ):
            if value != trained:
                raise UsageError(
                    f"{pack.path} is not the pack that {network.path} was trained on, nor like it:"
                    f" {name} {brief(value)}, not {brief(trained)}{advice}"
                )
        if config.data:
            say_share(pack, config.split)
        return pack

    pack = on_root(comm, find_pack)
    with on_all(comm):
        return Split(pack, config.split, network.decoders)


def say_share(pack: Pack, split: str) -> None:
    """Print a line on how many images of an external file a split has, if splits were drawn."""
    if pack.external is None or "{split}" in pack.external["images"]:
        return
    total = sum(info.samples for info in pack.splits.values())
    say(
        f"{pack.path}: {pack.splits[split].samples:,} of {total:,} images are its split {split},"
        " drawn as in the training; predict RUN FILES takes all",
        sys.stderr,
    )


def read_in_scale(
    path: Path, external: dict[str, Any] | None, scale: Scale, cache_dir: str
) -> Pack:
    """Open a pack, or an `external` file, so that its values are scaled as those of a network.

    Raises UsageError if their scale cannot be known.
    """
    options = None
    if external is None or is_pack(path):
        pack = read_pack(path)
    else:
        from hpctrain.data.external_files import open_external  # imports h5py

        options = ExternalOptions(**external)
        if not is_pattern(path):  # one file has no groups of files
            options = options._replace(group=None)
        try:
            pack = open_external(path, options, cache_dir)
        except UsageError as error:
            read_as = f"images {options.images}, labels {options.labels}, layout {options.layout}"
            raise UsageError(f"{error}; it is read as in the training: {read_as}") from None
    check_nodata(pack, scale)
    try:
        divisor = scale.divisor_for(pack.scale.dtype, *range_of(pack))
    except UsageError as error:
        raise UsageError(f"{pack.path}: {error}") from None
    if divisor != pack.scale.divisor:
        if options is None:
            pack = pack.with_max_value(divisor)
        else:
            pack = open_external(path, options._replace(max_value=divisor), cache_dir)
    if (options or not pack.scale.is_bytes) and pack.scale.is_unlike(scale):
        say(f"{pack.path} holds {pack.scale}; the training was on {scale}", sys.stderr)
    elif unlike := pack.scale.unlike_channels(scale):
        say(f"{pack.path}: {listed(unlike, separator='; ')} as in the training", sys.stderr)
    return replace(pack, scale=pack.scale._replace(nodata=scale.nodata))


def evaluate_saved(config: EvaluateConfig, comm: Comm, printed: bool = False) -> Evaluation:
    """Evaluate a saved network, and write the files that the settings ask for. Collective.

    Tables are `printed` before, so that a full disk does not lose what was computed.
    """
    with open_network(config, comm) as network:
        task = network.inference.task
        if config.mistakes and not task.has_mistakes:
            raise agreed(
                UsageError(f"--mistakes shows wrong answers, and this network {task.facts.use}")
            )
        if config.plot and not task.plotted:
            raise agreed(
                UsageError(f"--plot shows classes or values, and this network {task.facts.use}")
            )
        if config.plot:
            from hpctrain.report.figures import check_name

            on_root(comm, check_name, Path(config.plot), "--plot")
            if config.mistakes and Path(config.plot) == mistakes_path(network, config):
                raise agreed(
                    UsageError(f"--plot {config.plot} is the picture of --mistakes: name another")
                )
        with open_split(network, config, comm) as split:
            on_root(comm, check_outputs, network, config, split)
            measures = import_measures(network, config, comm)
            task = replace(task, **measures._asdict(), has_all_figures=True)
            inference = network.inference._replace(task=task)
            result = evaluate(
                inference, split, comm, mistakes=config.mistakes, has_plot=config.plot is not None
            )
            assert result is not None  # no block was skipped

            def write() -> None:
                if printed:
                    print_evaluation(result, task, config.split)
                if config.mistakes:
                    picture = mistakes_path(network, config)
                    draw_mistakes(picture, result, task, split, network)
                if config.plot:
                    plot_answers(Path(config.plot), result, task, split, network.path)
                if config.output:
                    output = Path(config.output)
                    if output.exists() and printed:
                        say(f"{output}: replaced")
                    write_evaluation(output, result, split.pack, network.path, config.split)

            on_root(comm, write)
    return result


def check_outputs(network: TrainedNetwork, config: EvaluateConfig, split: Split) -> None:
    """Raise UsageError if files that the settings ask for would replace others; see outputs.py."""
    outputs = [Path(output) for output in (config.output, config.plot) if output]
    if config.mistakes:
        picture = mistakes_path(network, config)
        check_picture(picture)
        outputs.append(picture)
    check_not_read(outputs, [network.path, *split.pack.sizes])


def mistakes_path(network: TrainedNetwork, config: EvaluateConfig) -> Path:
    """Return the name of the picture of --mistakes."""
    return picture_path(config.output, network.path.with_name("mistakes.png"))


def import_measures(network: TrainedNetwork, config: EvaluateConfig, comm: Comm) -> Measures:
    """Import --loss and --metric, by default those of the network's file, by name. Collective."""
    of_file = {
        name: network.metadata[name] for name in ("loss", "metric") if not getattr(config, name)
    }
    named = {"loss": config.loss, "metric": config.metric, **of_file}
    names = network.columns or network.classes
    like = input_like(network.inference.model)
    with on_all(comm):
        require_trust(of_file, network.path, config.trust_code)
        measures = load_measures(named, network.inference.task.name(), names, like)
    if code := source_files(named):
        mpi.check_equal_on_all(comm, code)
    return measures


def print_evaluation(result: Evaluation, task: Task, split: str) -> None:
    """Print the tables and the figures of a split."""
    metrics = "".join(f", {name} {short_number(value)}" for name, value in result.metrics.items())
    results.print_tables(
        (table for tally in result.tallies for table in tally.tables()),
        f"{split}: {result.rows:,} images, {task.describe(result.means)}{metrics}",
    )


def draw_mistakes(
    path: Path, result: Evaluation, task: Task, split: Split, network: TrainedNetwork
) -> None:
    """Write a picture of the most confident mistakes, and print a line for each of them."""
    captions, total = task.mistakes(result.tallies)
    if not captions:
        say(f"{split.name}: no mistakes to draw")
        return
    name = output_name(path)
    lines = draw_answers(path, split, captions, network)
    last = f"{name}: the {len(lines):,} {task.worst.format(total=f'{total:,}')}"
    say("\n".join([*lines, last]))


def plot_answers(path: Path, result: Evaluation, task: Task, split: Split, model: Path) -> None:
    """Write the figure of an evaluation, and print a line."""
    from hpctrain.report.figures import save  # which training does not need

    run = model.parent.name if model.name == NETWORK_FILE else model.name
    figure = task.plot(result.tallies, f"{run}, split {split.name}, {result.rows:,} images")
    if figure is None:
        say(f"{split.name}: nothing to plot, as no class has samples of both kinds")
        return
    name = output_name(path)
    save(figure, path)
    say(f"{name}: {task.plotted}")


def draw_answers(
    path: Path, source: ImageSource, captions: Sequence[Caption], network: TrainedNetwork
) -> list[str]:
    """Write a picture of images of `source`, drawn as `as_pictures` says, each above its caption.

    A caption is the image's name and the lines of its answer, of which the last two are red if it
    is wrong. Returns the captions, one line for each image.
    """
    rows = np.array([caption.row for caption in captions])
    images = np.empty((len(rows), *source.image_shape), source.dtype)
    source.gather(rows, images, bad=Bad())
    names = [source.source_of(row) or f"row {row}" for row in rows.tolist()]
    texts = [(name, *caption.lines) for name, caption in zip(names, captions, strict=True)]
    short = [(short_name(name), *lines) for name, *lines in texts]
    wrong = [number for number, caption in enumerate(captions) if caption.is_wrong]
    pictures, title = as_pictures(images, source.divisor, network)
    results.write_image(path, results.draw_captioned(pictures, short, wrong, title))
    return [", ".join(lines) for lines in texts]


def short_name(source: str) -> str:
    """Return the name of a sample without folders: in a set of HDF5 files "a.h5:/x[5]"."""
    file, colon, place = source.partition(":/")
    if colon:
        return f"{PurePath(file).name}:/{place}"
    return PurePath(source).name


def as_pictures(
    images: np.ndarray, divisor: float, network: TrainedNetwork
) -> tuple[np.ndarray, str]:
    """Return stored images (n, H, W, C), divided by `divisor`, as pictures (n, H, W, 1 or 3), and
    the title of these.

    Of 2 channels the first is drawn, of more than 3 the first three. Where the network was not
    trained on bytes, black and white are the smallest and the largest value of its training. If it
    normalizes values of more than 8 bits, of which 1.0 is not the largest, they are `CONTRAST`
    standard deviations below and above the mean, as channels may have different units. Places
    without data are black. The title says what is drawn.
    """
    scale = network.scale
    pipeline = network.inference.pipeline
    channels = images.shape[3]
    drawn = channels
    parts = list[str]()
    if channels == 2:
        drawn = 1
        parts.append("channel 1 of 2")
    elif channels > 3:
        drawn = 3
        parts.append(f"channels 1, 2 and 3 of {channels} as red, green and blue")
    shown = images[..., :drawn]
    if scale.is_bytes:
        return unit_values(shown, divisor), ", ".join(parts)
    if pipeline.normalization and scale.dtype != "uint8" and not scale.is_full:
        inputs = pipeline.inputs(torch.from_numpy(images), divisor=divisor)[:, :drawn]
        values = inputs.permute(0, 2, 3, 1).double().cpu().numpy()
        low = -CONTRAST
        high = CONTRAST
        parts.append(f"normalized {scale.dtype} values from {low:g} (black) to {high:g} (white)")
    else:
        values = shown / np.float64(divisor)
        low = scale.low / scale.divisor
        high = scale.high / scale.divisor
        parts.append(f"{scale.dtype} values from {scale.low:,g} (black) to {scale.high:,g} (white)")
    values = ((values - low) / (high - low or 1.0)).clip(0, 1)
    if scale.nodata is not None:
        values[is_nodata(shown, scale.nodata)] = 0
    return values, ", ".join(parts)


def picture_path(output: str | None, default: Path) -> Path:
    """Return the name of the picture beside the file --output, or `default` if there is none."""
    if output in (None, "-"):
        return default
    path = Path(str(output))
    if path.suffix.lower() in (".csv", ".h5", ".hdf5", ".json"):
        return path.with_suffix(".png")
    return Path(f"{path}.png")


def write_evaluation(path: Path, result: Evaluation, pack: Pack, model: Path, split: str) -> None:
    """Write the results as JSON, for --output and for a run's folder. Raises RunError."""
    table: dict[str, Any] = {
        "model": str(model),
        "pack": pack.path,
        "pack_uuid": pack.uuid,
        "split": split,
        **result.figures(),
        "classes": list(result.classes),
        "confusion": None,
    }
    for tally in result.tallies:
        table |= tally.as_json()
    with writing(path):
        write_whole(path, json.dumps(without_nonfinite(table), indent=1) + "\n")
