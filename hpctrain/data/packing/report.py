"""What ``pack`` shows: progress, the table of a pack, and lists of files.

The table goes to standard output, everything else to standard error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from hpctrain.console import Console
from hpctrain.data.pack_format import Pack
from hpctrain.data.split import Split
from hpctrain.text import printable
from hpctrain.watchdog import doing

ASK = -1  # columns: the console finds out itself whether it is a terminal
CLASSES_SHOWN, GROUPS_SHOWN = 40, 10
WIDTH = 100  # of a table that is not shown on a terminal


def say(text: str) -> None:
    """One line on standard error."""
    Console(stderr=True).print(printable(text, newlines=False), soft_wrap=True)


def _console(columns: int | None, stderr: bool = False) -> Console:
    """A console of so many columns; None = no terminal, ASK = it finds out."""
    console = Console(stderr=stderr)
    if columns == ASK and console.is_terminal:
        return console
    columns = None if columns == ASK else columns
    return Console(stderr=stderr, width=columns or WIDTH, force_terminal=columns is not None)


@contextmanager
def progress(
    what: str, total: int, own: int, columns: int | None
) -> Iterator[Callable[[int], None]]:
    """A bar over `total` images on a terminal, nothing elsewhere; gives the way to advance it by
    some of this process's `own` images, which stand for as many of all."""
    console = _console(columns, stderr=True)
    done = 0

    def advance(images: int) -> None:
        nonlocal done
        done += images
        doing(f"{what} image {done:,} of {own:,}")
        bar.update(task, completed=done * total // max(own, 1))

    fields = (
        TextColumn("{task.description:<8}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("images"),
        TimeRemainingColumn(),
    )
    with Progress(*fields, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=total)
        yield advance


def say_bad(bad: list[tuple[str, str]]) -> None:
    """Every file that could not be read, with the reason."""
    for name, why in bad:
        say(f"unreadable: {name}: {why}")


def say_duplicates(
    names: Mapping[int, str], labels: np.ndarray, groups: list[np.ndarray], left_out: int
) -> None:
    """Images of equal pixels: `groups` of positions in `labels`, with `names` of the first ones."""
    for group in groups[:GROUPS_SHOWN]:
        classes = " (in different classes)" if len(set(labels[group].tolist())) > 1 else ""
        say(f"equal pixels{classes}: {' = '.join(names[row] for row in group.tolist())}")
    if len(groups) > GROUPS_SHOWN:
        say(f"… and {len(groups) - GROUPS_SHOWN:,} more groups of images with equal pixels")
    if groups:
        images = sum(len(group) for group in groups)
        kept = f"{left_out:,} left out, in test already" if left_out else "each group in one split"
        say(f"{images:,} images in {len(groups):,} groups have equal pixels: {kept}")


def print_table(pack: Pack, columns: int | None = ASK) -> None:
    """Images by class and split, and what the pack says of itself."""
    console = _console(columns)
    counts = {name: _class_counts(pack, name) for name in pack.splits}
    table = Table(title=pack.path)
    table.add_column("class")
    for name in [*counts, "all"]:
        table.add_column(name, justify="right")
    by_class = list(zip(*(count.tolist() for count in counts.values()), strict=True))
    if len(by_class) <= CLASSES_SHOWN:
        for name, row in zip(pack.classes, by_class, strict=True):
            table.add_row(name, *(f"{part:,}" for part in (*row, sum(row))))
    else:
        sums = [*counts.values(), sum(counts.values())]
        for what, smallest in (("smallest", np.min), ("largest", np.max)):
            table.add_row(f"{what} class", *(f"{smallest(column):,}" for column in sums))
    table.add_section()
    totals = [split.rows for split in pack.splits.values()]
    classes = f"{len(pack.classes):,} classes" if len(pack.classes) > 1 else "1 class"
    table.add_row(classes, *(f"{total:,}" for total in (*totals, sum(totals))))
    console.print(table)
    for key, value in _facts(pack):
        console.print(f"{key:<7}{value}", soft_wrap=True)


def _class_counts(pack: Pack, split: str) -> np.ndarray:
    with Split(pack, split, threads=1) as rows:
        return np.bincount(rows.labels, minlength=len(pack.classes))


def _files(pack: Pack) -> str:
    """What there is to say of a pack's files."""
    splits = pack.splits.values()
    mean = sum(split.files_bytes for split in splits) / sum(split.rows for split in splits)
    how = "stretched" if pack.fit == "stretch" else "cut"
    return f"{how} from JPEG files of {mean / 2**10:,.1f} KiB on average"


def _facts(pack: Pack) -> list[tuple[str, str]]:
    height, width, channels = pack.image_shape
    made = pack.provenance
    size = f"{width} x {height} pixels, {channels} channel{'s' if channels > 1 else ''}"
    facts = [
        ("images", size + (f", {_files(pack)}" if pack.encoded else "")),
        ("file", f"{pack.file_size / 2**20:,.1f} MiB"),
        ("mean", " ".join(f"{value:.4f}" for value in pack.mean) + " of train, in [0, 1]"),
        ("std", " ".join(f"{value:.4f}" for value in pack.std)),
        ("uuid", pack.uuid),
    ]
    if "source" in made:
        source = [str(made["source"])]
        source += [f"{key} {made[key]}" for key in ("seed", "hpctrain") if key in made]
        facts.append(("source", ", ".join(source)))
    if division := _division(made):
        facts.append(("split", division))
    return facts


def _division(made: dict[str, Any]) -> str:
    """What really divided the images into splits."""
    by, shares = str(made.get("split_by", "")), made.get("split")
    groups = ", no group divided" if made.get("groups") else ""
    fold = f", fold {made['fold']} of the others" if "fold" in made else ""
    if by in ("", "seed"):
        if fold:
            return f"drawn: fold {made['fold']}, stratified{groups}"
        return f"drawn: {shares} of each class{groups}" if shares else ""
    drawn = " but for validation, which was drawn" if made.get("validation_drawn") else ""
    return f"given by the {by}{drawn}{fold}{groups}"
