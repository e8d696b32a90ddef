"""The digest at the end of deterministic runs: the same when repeated, on any number of ranks that
share a GPU, with and without CUDA graphs, with and without overlap; another one with another seed.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from scripts.benchmarks.gpu.case import Case, made_pack, train
from scripts.benchmarks.gpu.result import Result, attempt, shown

SHARDS = 4
SAME = ("--reduce", "host", "--deterministic", "--shards", str(SHARDS))
GRAPHS, OVERLAP = ("--graphs",), ("--overlap", "3")
WAYS = tuple((ranks, flags) for flags in ((), GRAPHS, OVERLAP) for ranks in (1, 4, 2))
FEW_WAYS = (WAYS[2], WAYS[3], WAYS[7])  # in a rehearsal


def measure(case: Case) -> Iterator[Result]:
    """A line per way to run; the first run is what all others are compared with."""
    flags = workload(case)
    first = digest(case, *flags)
    other = digest(case, *flags, "--seed", "1")
    what, target = "digest of another seed (control)", f"not {first[:12]}"
    yield shown(what, other != first, other[:12], target, n=1)
    for ranks, more in case.size(WAYS, FEW_WAYS):
        start = "again on 1 rank" if ranks == 1 else f"on {ranks} ranks"
        yield attempt(
            what := " ".join(("digest", start, *more)),
            partial(compared, case, what, first, *flags, *more, ranks=ranks),
        )


def workload(case: Case) -> list[str]:
    """ResNet-18 on images of noise, with a ragged end; the digits network in a rehearsal."""
    pack = made_pack(case, case.size(413, 101), case.size((64, 64, 3), (28, 28, 1)))
    network = case.size("resnet18", "digits")
    flags = ["--data", pack, "--model", network, "--batch-size", "32", "--flip", "--shift", "2"]
    return [*flags, "--epochs", "1", "--digest-every", "5", *SAME]


def digest(case: Case, *flags: str, ranks: int = 1) -> str:
    """At the end of one run."""
    return str(train(case, *flags, ranks=ranks)[-1]["digest"])


def compared(case: Case, what: str, first: str, *flags: str, ranks: int) -> Result:
    """Whether a run ends with the digest of the first."""
    found = digest(case, *flags, ranks=ranks)
    return shown(what, found == first, found[:12], first[:12], n=1)
