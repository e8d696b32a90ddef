"""What a step reports through its message: whether it was sound, and where its seconds went."""

from __future__ import annotations

from collections.abc import Callable

from hpctrain.errors import RunError
from hpctrain.parallel.message import Totals
from hpctrain.parallel.mpi import agreed


class CannotContinue(RunError):
    """Training cannot go on; all ranks hold the sound state of the last step that was recorded."""


class NonFinite(CannotContinue):
    """Loss or gradient became NaN or infinite; the weights are those of the step before."""


def check(
    totals: Totals,
    rows: int,
    step: int,
    epoch: int,
    skips_rows: bool = False,
    bad_image: Callable[[], str | None] = lambda: None,
) -> None:
    """Look at what `step` of `rows` rows, or fewer where bad ones are left out, reported; all ranks
    see the same and raise the same. `bad_image` finds the image that a result is due to which is
    not finite; collective.

    Raises NonFinite, or RunError for what must not happen.
    """
    if not totals.finite:
        what = "the loss" if totals.nonfinite else "the gradient"
        ranks = ", ".join(map(str, totals.nonfinite))
        where = f" on rank {ranks}" if totals.nonfinite else ""
        raise agreed(
            NonFinite(
                f"{what} of step {step} (epoch {epoch}) is not finite{where}; the weights of step"
                f" {step - 1} are kept. {bad_image() or 'A lower --lr or --clip-norm may help'}"
            )
        )
    if totals.irregular:
        raise agreed(
            RunError(f"a batch-norm layer did not run exactly once in step {step} (epoch {epoch})")
        )
    if skips_rows and totals.rows == 0:
        raise agreed(RunError(f"step {step} (epoch {epoch}): none of its {rows} rows can be used"))
    if totals.rows != rows and not (skips_rows and totals.rows < rows):
        raise agreed(RunError(f"step {step} summed {totals.rows} rows, but the plan has {rows}"))


def time_shares(totals: Totals, reducing: float) -> tuple[dict[str, float], int]:
    """Where the seconds of a step went on its slowest rank, and which rank that was.

    What rank 0 spent in the reduction waiting for the slowest rank is that rank's computation.
    """
    busy = [data + compute for data, compute in zip(totals.data, totals.compute, strict=True)]
    slowest = busy.index(max(busy))
    return {
        "data": totals.data[slowest],
        "compute": totals.compute[slowest],
        "reduce": max(0.0, reducing - (busy[slowest] - busy[0])),
        "idle": max(busy) - sum(busy) / len(busy),
    }, slowest
