"""The figure of ``hpctrain bench scale``: published runs and the model, and the user's network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hpctrain.bench.step_model import HOROVOD, PUBLISHED, PublishedRun
from hpctrain.report.figures import BLUE, VERMILLION, empty_figure

COLOURS = (BLUE, VERMILLION, "#009e73", "#cc79a7")  # of the same palette
GAP = 0.055  # between labels, as a share of the vertical axis
MOST = {HOROVOD: 2048}  # ranks at which the curves of a machine end; otherwise 2^15


def plot_scale(
    ranks: Sequence[int], curves: Mapping[str, Sequence[float]], lines: Sequence[str]
) -> Any:
    """Return a figure of two panels.

    `curves` are efficiencies by reduction, one for each of `ranks`; `lines` describe the inputs.
    """
    figure = empty_figure(10.4, 4.4)
    left, right = figure.subplots(1, 2, sharey=True)
    published: dict[str, tuple[Sequence[int], Sequence[float]]] = {}
    dots: dict[str, list[PublishedRun]] = {}
    for run in PUBLISHED:
        last = MOST.get(run.machine, 2**15)
        places = [2**n for n in range(3, 16) if 2**n <= last]
        published[run.network] = (places, [run.predict(place) for place in places])
        dots.setdefault(run.network, []).append(run)
    here = {way: (ranks, shares) for way, shares in curves.items()}
    found = [y for drawn in (published, here) for _, shares in drawn.values() for y in shares]
    low = max(0, 10 * int(10 * min(found) - 0.8))  # room for labels below the last line
    for axes, drawn in ((left, published), (right, here)):
        axes.set_xscale("log", base=2)
        axes.set_xlim(8, 2**15)
        axes.set_ylim(low, 100)
        axes.set_xticks([2**n for n in range(3, 16, 2)], [f"{2**n:,}" for n in range(3, 16, 2)])
        axes.minorticks_off()
        axes.set_xlabel("ranks")
        axes.grid(color="0.88", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        _draw(axes, drawn, 100 - low)
    for number, (colour, runs) in enumerate(zip(COLOURS, dots.values(), strict=False)):
        for run in runs:  # larger dots for the first network, which the second would hide
            inside, size = "white" if run.fitted else colour, 6 if number else 11
            y = 100 * run.published
            left.plot(run.ranks, y, "o", color=colour, markerfacecolor=inside, markersize=size)
    left.set_ylabel("efficiency (%)")
    left.set_title(
        "Horovod on 25 GbE, and DeepLabv3+ on Summit\n"
        "lines: the model; dots: published; rings: published, used for the fit",
        loc="left",
    )
    right.set_title("\n".join(("a model, not a measurement", *lines)), loc="left")
    return figure


def _draw(axes: Any, drawn: Mapping[str, tuple[Sequence[int], Sequence[float]]], high: int) -> None:
    """Draw curves with names at their ends that do not overlap; `high` is the axis' range."""
    ends = []
    for colour, (name, (places, shares)) in zip(COLOURS, drawn.items(), strict=False):
        axes.plot(places, [100 * share for share in shares], color=colour, linewidth=1.4)
        ends.append((100 * shares[-1], places[-1], name, colour))
    free = float("inf")
    for y, x, name, colour in sorted(ends, reverse=True):
        free = min(free - GAP * high, y)
        axes.annotate(
            name,
            (x, free),
            xytext=(5, 0),
            textcoords="offset points",
            color=colour,
            va="center",
            parse_math=False,
            annotation_clip=False,
        )
