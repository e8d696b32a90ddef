"""All processes of a team decode: look at headers, agree on size and channels, fill the rows."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from hpctrain.data.images import Fit
from hpctrain.data.pack_format import JPEG
from hpctrain.data.packing import report
from hpctrain.data.packing.decode import (
    Decoded,
    Wish,
    choose_fit,
    decode_all,
    descriptors,
    first_rows,
    look,
    row_bytes,
    shared_counter,
)
from hpctrain.data.packing.jobs import Run, worker_threads, workers
from hpctrain.data.packing.settings import bytes_of, check_room
from hpctrain.data.packing.shared import Work, flush
from hpctrain.data.packing.team import Team


def decode_shared(
    work: Work, wish: Wish, encoding: str, jobs: int, output: Path, team: Team
) -> tuple[Fit, list[Decoded]]:
    """Decode all images; what they became, and on the root what each process knows of its own."""
    mine, store, total = work.mine, work.store, sum(work.counts)
    own = len(mine.items)
    counting = shared_counter(team.rank, team.size) if encoding == JPEG else nullcontext()
    with counting as counter, _workers(jobs, descriptors(mine, store, counter), team) as run:
        seen = team.gather(team.call_on_all(lambda: look(mine, wish, run)))

        def plan() -> Fit:
            assert work.source
            fit = choose_fit(work.source, wish, seen)
            check_room(output, bytes_of(work.source, fit, encoding))
            return fit

        fit = team.call_on_root(plan)
        first = first_rows(work.counts, row_bytes(fit))[team.rank]
        with report.progress("decoding", total, own, team) as advance:
            decoded = team.call_on_all(
                lambda: decode_all(mine, fit, store, first, run, advance, counter)
            )
        team.call_on_all(lambda: flush(store, team))
    return fit, team.gather(decoded)


def _workers(jobs: int, files: list[int], team: Team) -> AbstractContextManager[Run]:
    """Processes; threads where MPI runs, beside which no process should be forked."""
    return workers(jobs, files) if team.size == 1 else worker_threads(jobs)
