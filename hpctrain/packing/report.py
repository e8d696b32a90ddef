"""Output of ``pack``: progress, lists of files, notes, provenance, the table of a pack.

The table is written to standard output, everything else to standard error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import PIL
from rich.progress import Progress
from rich.table import Table

import hpctrain
from hpctrain.config import PackConfig
from hpctrain.console import Console
from hpctrain.data.images import Fit
from hpctrain.data.pack import Pack
from hpctrain.data.split import Split
from hpctrain.errors import UsageError
from hpctrain.packing.assign import TRAIN
from hpctrain.packing.sources import Source
from hpctrain.text import counted
from hpctrain.watchdog import doing

CLASSES_SHOWN, GROUPS_SHOWN = 40, 10
SKIPPED_NAMED = 100  # most names of skipped files in the provenance
PRINTED = ("source", "split_by", "split", "fold", "seed", "groups", "hpctrain")  # of the provenance
WIDTH = 100  # of a table that is not printed on a terminal


def say(text: str) -> None:
    """Print one line on standard error."""
    Console(stderr=True).print(text, soft_wrap=True)


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show a progress bar over `total` images on a terminal, nothing elsewhere.

    Gives a function that advances it by a number of images.
    """
    console = Console(stderr=True)
    done = 0

    def advance(images: int) -> None:
        nonlocal done
        done += images
        doing(f"{what} image {done:,} of {total:,}")
        bar.update(task, completed=done)

    with Progress(console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=total)
        yield advance


def say_unreadable(files: Iterable[tuple[str, str]]) -> None:
    """List files that cannot be read, with their reasons."""
    for name, why in sorted(files):
        say(f"unreadable: {name}: {why}")


def check_readable(source: Source, skip_bad: bool) -> None:
    """Raise UsageError if no image is left, or if some cannot be read and may not be skipped."""
    bad, total = len(source.bad), len(source.bad) + len(source)
    if bad == total:
        raise UsageError(f"source {source.name}: none of its {total:,} files can be read")
    if bad and not skip_bad:
        raise UsageError(
            f"{bad:,} of {total:,} files cannot be read, they are listed above: repair or remove"
            " them, or leave them out with --skip-bad"
        )


def say_chosen(source: Source, config: PackConfig, rows: Mapping[str, np.ndarray]) -> None:
    """Print notes for the user on what is packed, and how it was divided into splits."""
    if source.ignored:
        say(f"{source.ignored} image files outside the class folders were ignored")
    if source.bad:
        total = len(source.bad) + len(source)
        say(f"{len(source.bad):,} of {total:,} files left out, they cannot be read")
    if (source.splits > TRAIN).any():
        say(f"{source.name} says which images are for testing or validation: kept")
    if "validation" not in rows and config.split == PackConfig.split:
        say(
            f"splits are {' and '.join(rows)}: --final best and --patience need validation, too,"
            " as drawn by --split 0.8,0.1,0.1"
        )
    groups, left_out = equal_files(source), len(source) - sum(map(len, rows.values()))
    for group in groups[:GROUPS_SHOWN]:
        classes = " (in different classes)" if len({*source.labels[group]}) > 1 else ""
        say(f"equal files{classes}: {' = '.join(source.names[row] for row in group)}")
    if groups:
        kept = "each group in one split"
        if left_out:
            kept = f"{left_out:,} left out, as a later split has one of their group"
        say(f"{sum(map(len, groups)):,} files in {len(groups):,} groups are equal: {kept}")


def equal_files(source: Source) -> list[np.ndarray]:
    """Return the rows of each group of equal files."""
    _, numbers, counts = np.unique(source.duplicate_of, return_inverse=True, return_counts=True)
    rows = np.flatnonzero(counts[numbers] > 1)
    rows = rows[np.argsort(numbers[rows], kind="stable")]
    starts = np.flatnonzero(np.diff(numbers[rows])) + 1
    return np.split(rows, starts) if len(rows) else []


def provenance(
    source: Source, config: PackConfig, fit: Fit, rows: Mapping[str, np.ndarray]
) -> dict[str, Any]:
    """Return what the pack was made of and how, without paths or times."""
    equal, skipped = equal_files(source), sorted(name for name, _ in source.bad)
    return {
        "source": source.name,
        "kind": source.kind,
        "size": f"{fit.width}x{fit.height}",
        "fit": "as is" if fit.exact else "crop" if fit.crop else "stretch",
        "channels": fit.channels,
        "split_by": source.split_by if (source.splits > TRAIN).any() else "seed",
        "split": config.split,
        "fold": config.fold or "",
        "seed": config.seed,
        "groups": len(np.unique(source.groups[source.groups >= 0])),
        "hpctrain": hpctrain.__version__,
        "pillow": PIL.__version__,
        "skipped": {"files": len(skipped), "names": skipped[:SKIPPED_NAMED]},
        "images": {name: len(part) for name, part in rows.items()},
        "duplicates": {
            "groups": len(equal),
            "images": sum(map(len, equal)),
            "left_out": len(source) - sum(map(len, rows.values())),
        },
    }


def print_table(pack: Pack) -> None:
    """Print the number of images by class and split, and the properties of the pack."""
    console = Console()
    if not console.is_terminal:
        console.width = WIDTH
    counts: dict[str, np.ndarray] = {}
    for name in pack.splits:
        with Split(pack, name, threads=1) as split:
            counts[name] = split.count_classes()
    table = Table(title=pack.path)
    table.add_column("class")
    columns = [*counts.values(), np.sum([*counts.values()], axis=0)]
    for name in [*counts, "all"]:
        table.add_column(name, justify="right")
    if len(pack.classes) <= CLASSES_SHOWN:
        for name, row in zip(pack.classes, np.transpose(columns).tolist(), strict=True):
            table.add_row(name, *(f"{part:,}" for part in row))
    else:
        for what, smallest in (("smallest", np.min), ("largest", np.max)):
            table.add_row(f"{what} class", *(f"{smallest(column):,}" for column in columns))
    table.add_section()
    table.add_row("total", *(f"{np.sum(column):,}" for column in columns))
    console.print(table)
    height, width, channels = pack.image_shape
    lines = {"images": f"{width} x {height} pixels, {counted(channels, 'channel')}"}
    if pack.fit:
        stored = sum(split.images.shape[0] for split in pack.splits.values())
        how = "stretched" if pack.fit == "stretch" else "cut"
        size = stored / np.sum(columns[-1]) / 2**10
        lines["images"] += f", {how} from JPEG files of {size:,.1f} KiB on average"
    lines["classes"] = f"{len(pack.classes):,}"
    lines["file"] = f"{pack.sizes[pack.path] / 2**20:,.1f} MiB"
    lines["mean"] = " ".join(f"{value:.4f}" for value in pack.mean) + " of train, in [0, 1]"
    lines["std"] = " ".join(f"{value:.4f}" for value in pack.std)
    lines["uuid"] = pack.uuid
    if made := [f"{key} {pack.provenance[key]}" for key in PRINTED if pack.provenance.get(key)]:
        lines["made"] = ", ".join(made)
    for key, value in lines.items():
        console.print(f"{key:<8}{value}", soft_wrap=True)
