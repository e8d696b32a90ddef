"""Which decoded images go into which split of a pack, in which order, and what it says of them."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import PIL

import hpctrain
from hpctrain.config import PackConfig
from hpctrain.data.images import Fit
from hpctrain.data.pack_format import JPEG, SPLITS
from hpctrain.data.packing import report
from hpctrain.data.packing.columns import Placed
from hpctrain.data.packing.decode import Decoded, row_bytes, scratch_rows
from hpctrain.data.packing.layout import Source
from hpctrain.data.packing.split import LEFT_OUT, TRAIN, assign, equal_pixels, rows_by_split
from hpctrain.data.packing.write import Content
from hpctrain.errors import UsageError

SKIPPED_NAMED = 100  # files left out that the provenance names


def check_decoded(source: Source, decoded: Decoded, skip_bad: bool) -> None:
    """Files that could not be read are listed, and refused unless they may be left out."""
    report.say_bad(decoded.bad)
    count, total = len(decoded.bad), len(decoded.bad) + int(decoded.good.sum())
    if count == total:
        raise UsageError(f"source {source.name}: none of its {total:,} files can be read")
    if count and not skip_bad:
        raise UsageError(
            f"{count:,} of {total:,} files cannot be read, they are listed above: repair or remove"
            " them, or leave them out with --skip-bad"
        )
    if count:
        report.say(f"{count:,} of {total:,} files left out, they cannot be read")


def choose(
    source: Source,
    decoded: Decoded,
    config: PackConfig,
    fit: Fit,
    shares: tuple[Fraction, Fraction, Fraction],
    counts: list[int],
) -> tuple[dict[str, Placed], Content]:
    """Of every split its images in final order, and what the pack says of itself. `counts`: how
    many images each process decoded."""
    good = np.flatnonzero(decoded.good)
    items = [source.items[row] for row in good.tolist()]
    labels = np.array([item.label for item in items], np.int64)
    given = np.array(
        [SPLITS.index(item.split) if item.split else LEFT_OUT for item in items], np.int8
    )
    groups, equal = equal_pixels(decoded.digests[good])
    splits = assign(labels, given, groups, shares, config.seed)
    by_source = bool((given > TRAIN).any())
    wanted = [name for name, share in zip(SPLITS, shares, strict=True) if share and not by_source]
    rows = rows_by_split(splits, labels, source.classes, wanted, config.seed)
    left_out = int((splits == LEFT_OUT).sum())
    for note in source.notes:
        report.say(note)
    if by_source:
        report.say(f"{source.name} says which images are for testing or validation: kept")
    report.say_duplicates([item.name for item in items], labels, equal, left_out)
    facts = _provenance(source, decoded, config, fit)
    facts["split_by"] = "source" if by_source else "seed"
    facts["images"] = {name: len(part) for name, part in rows.items()}
    facts["duplicates"] = {
        "groups": len(equal),
        "images": sum(len(group) for group in equal),
        "across_classes": sum(len(set(labels[group].tolist())) > 1 for group in equal),
        "left_out": left_out,
    }
    shape, files = (fit.height, fit.width, fit.channels), decoded.files
    content = Content(shape, source.classes, facts)
    if files is None:
        places = scratch_rows(counts, row_bytes(fit))
        return {name: Placed(labels[p], places[good[p]]) for name, p in rows.items()}, content
    kept, train = int(files.kept.sum()), good[rows["train"]]
    facts["encoding"] = {"name": JPEG, "kept": kept, "encoded_anew": len(good) - kept}
    moments = files.values[train].sum(axis=0), files.squares[train].sum(axis=0)
    content = content._replace(fit="crop" if fit.crop else "stretch", moments=moments)
    placed = {
        name: Placed(labels[p], files.places[good[p]], files.sizes[good[p]])
        for name, p in rows.items()
    }
    return placed, content


def _provenance(source: Source, decoded: Decoded, config: PackConfig, fit: Fit) -> dict[str, Any]:
    """What the pack was made of and how, without places or times."""
    skipped = [name for name, _ in decoded.bad]
    return {
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
    }
