"""Output of ``pack``: progress, lists of files, provenance, the table of a pack.

The table is written to standard output, everything else to standard error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import PIL
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

import hpctrain
from hpctrain.config import PackConfig
from hpctrain.console import Console
from hpctrain.data.images import Fit
from hpctrain.data.pack_format import SPLITS, Pack
from hpctrain.data.packing.layout import ImageSource
from hpctrain.data.packing.split import TRAIN, VALIDATION
from hpctrain.data.split import Split
from hpctrain.errors import UsageError
from hpctrain.watchdog import doing

CLASSES_SHOWN, GROUPS_SHOWN = 40, 10
SKIPPED_NAMED = 100  # most names of skipped files in the provenance
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


def check_decoded(source: ImageSource, good: int, skip_bad: bool) -> None:
    """List files that could not be read. Raises UsageError unless they may be skipped."""
    for name, why in sorted(source.bad):
        say(f"unreadable: {name}: {why}")
    count, total = len(source.bad), len(source.bad) + good
    if count == total:
        raise UsageError(f"source {source.name}: none of its {total:,} files can be read")
    if count and not skip_bad:
        raise UsageError(
            f"{count:,} of {total:,} files cannot be read, they are listed above: repair or remove"
            " them, or leave them out with --skip-bad"
        )
    if count:
        say(f"{count:,} of {total:,} files left out, they cannot be read")


def say_chosen(
    source: ImageSource, good: np.ndarray, equal: list[np.ndarray], rows: dict[str, np.ndarray]
) -> None:
    """Print notes for the user on how the images were divided into splits."""
    for note in source.notes:
        say(note)
    if (source.images["split"][good] > TRAIN).any():
        say(f"{source.name} says which images are for testing or validation: kept")
    labels, left_out = source.images["label"][good], len(good) - sum(map(len, rows.values()))
    named = {int(row): source.names[good[row]] for group in equal[:GROUPS_SHOWN] for row in group}
    say_duplicates(named, labels, equal, left_out)


def provenance(
    source: ImageSource,
    good: np.ndarray,
    equal: list[np.ndarray],
    config: PackConfig,
    fit: Fit,
    rows: dict[str, np.ndarray],
) -> dict[str, Any]:
    """Return what the pack was made of and how, without paths or times."""
    labels, given = source.images["label"][good], source.images["split"][good]
    skipped = sorted(name for name, _ in source.bad)
    facts: dict[str, Any] = {
        "source": source.name,
        "kind": source.kind,
        "size": f"{fit.width}x{fit.height}",
        "fit": "as is" if fit.exact else "crop" if fit.crop else "stretch",
        "channels": fit.channels,
        "split": config.split,
        "seed": config.seed,
        "hpctrain": hpctrain.__version__,
        "pillow": PIL.__version__,
        "skipped": {"files": len(skipped), "names": skipped[:SKIPPED_NAMED]},
        "split_by": source.split_by if (given > TRAIN).any() else "seed",
        "images": {name: len(part) for name, part in rows.items()},
        "duplicates": {
            "groups": len(equal),
            "images": sum(len(group) for group in equal),
            "across_classes": sum(len(set(labels[group].tolist())) > 1 for group in equal),
            "left_out": len(good) - sum(map(len, rows.values())),
        },
    }
    is_drawn = SPLITS[VALIDATION] in rows and not (given == VALIDATION).any()
    if (given > TRAIN).any() and is_drawn and not config.fold:
        facts["validation_drawn"] = True
    if groups := len(np.unique(source.images["group"][source.images["group"] >= 0])):
        facts["groups"] = groups
    if config.fold:
        facts["fold"] = config.fold
    return facts


def say_duplicates(
    names: Mapping[int, str], labels: np.ndarray, groups: list[np.ndarray], left_out: int
) -> None:
    """Print groups of images with equal pixels: `groups` hold indices into `labels`.

    `names` are those of the images in the first groups.
    """
    for group in groups[:GROUPS_SHOWN]:
        classes = " (in different classes)" if len(set(labels[group].tolist())) > 1 else ""
        say(f"equal pixels{classes}: {' = '.join(names[row] for row in group.tolist())}")
    if len(groups) > GROUPS_SHOWN:
        say(f"… and {len(groups) - GROUPS_SHOWN:,} more groups of images with equal pixels")
    if groups:
        images = sum(len(group) for group in groups)
        kept = f"{left_out:,} left out, in test already" if left_out else "each group in one split"
        say(f"{images:,} images in {len(groups):,} groups have equal pixels: {kept}")


def print_table(pack: Pack) -> None:
    """Print the number of images by class and split, and the properties of the pack."""
    console = Console()
    if not console.is_terminal:
        console.width = WIDTH
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
    totals = [split.samples for split in pack.splits.values()]
    classes = f"{len(pack.classes):,} classes" if len(pack.classes) > 1 else "1 class"
    table.add_row(classes, *(f"{total:,}" for total in (*totals, sum(totals))))
    console.print(table)
    for key, value in _facts(pack):
        console.print(f"{key:<7}{value}", soft_wrap=True)


def _class_counts(pack: Pack, split: str) -> np.ndarray:
    with Split(pack, split, threads=1) as rows:
        return rows.count_classes()


def _files(pack: Pack) -> str:
    """Describe the mean size of a pack's JPEG files, and how they are fitted."""
    splits = pack.splits.values()
    mean = sum(split.files_bytes for split in splits) / sum(split.samples for split in splits)
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
    """Describe what actually divided the images into splits."""
    by, shares = str(made.get("split_by", "")), made.get("split")
    groups = ", no group divided" if made.get("groups") else ""
    fold = f", fold {made['fold']} of the others" if "fold" in made else ""
    if by in ("", "seed"):
        if fold:
            return f"drawn: fold {made['fold']}, stratified{groups}"
        return f"drawn: {shares} of each class{groups}" if shares else ""
    drawn = " but for validation, which was drawn" if made.get("validation_drawn") else ""
    return f"given by the {by}{drawn}{fold}{groups}"
