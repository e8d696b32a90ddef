"""What doctor thinks of GPUs and of their messages: from all ranks' facts to findings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from hpctrain.doctor.facts import RankFacts
from hpctrain.doctor.finding import GIB, Finding, numbered, row
from hpctrain.parallel.topology import RankDevice, choose_transport, describe_sharing


def gpu_findings(ranks: Sequence[RankFacts]) -> Iterable[Finding]:
    """What GPUs there are, and which rank uses which."""
    for number, rank in enumerate(ranks):
        if rank.gpu_devices and not rank.gpus and not rank.torch_error:
            found = f"{rank.gpu_devices} in {rank.host}, but torch on rank {number} sees none"
            why = rank.gpu_problem or "CUDA_VISIBLE_DEVICES hides them, or the job was given none"
            why = why if rank.built_for else "install a torch that is built for CUDA or ROCm"
            yield Finding("GPUs", found, "warn", why)
            return
    seen = {(rank.host, gpu.uuid): gpu for rank in ranks for gpu in rank.gpus}
    if not seen:
        yield Finding("GPUs", "none: training runs on the CPU")
        return
    kinds = Counter(f"{gpu.name}, {gpu.memory / GIB:.0f} GiB" for gpu in seen.values())
    yield Finding("GPUs", "; ".join(f"{count} x {kind}" for kind, count in kinds.items()))
    without = [number for number, rank in enumerate(ranks) if not rank.gpus]
    pairs = [f"{n} -> {rank.gpu}" for n, rank in enumerate(ranks) if rank.gpus]
    found = "rank -> GPU: " + ", ".join(pairs[:8]) + (", ..." if len(pairs) > 8 else "")
    used = {(rank.host, rank.gpus[rank.gpu].uuid) for rank in ranks if rank.gpus}
    mpirun = "srun" if ranks[0].launcher == "srun" else "mpirun"
    start = f"{mpirun} -n {len(seen)} python -m hpctrain"
    if without:
        advice = f"{numbered(without)} without GPU, which train refuses: {start}, or --device cpu"
        yield Finding("GPU of rank", found, "fail", advice)
    elif shared := describe_sharing([place(rank) for rank in ranks]):
        yield Finding("GPU of rank", found, "note", f"{shared}: {start} gives each its own")
    else:
        idle = len(seen) - len(used)
        advice = f"{idle} of {len(seen)} GPUs idle: {start} would use all"
        yield row("GPU of rank", found, "note", advice, when=idle > 0)


def memory_findings(ranks: Sequence[RankFacts]) -> Iterable[Finding]:
    """Whose memory the messages of GPUs lie in, and the NCCL that torch brought."""
    with_gpus = [rank for rank in ranks if rank.gpus]
    if not with_gpus:
        return
    first = max(with_gpus, key=lambda rank: bool(rank.memory_problem))
    problem = first.memory_problem
    yield row("message memory", first.memory or "none", "fail", problem, when=bool(problem))
    yield Finding("NCCL", first.nccl or "none: torch was built without it")


def transport_findings(ranks: Sequence[RankFacts]) -> Iterable[Finding]:
    """How the messages of GPUs would travel."""
    if all(rank.gpus for rank in ranks):
        choice = choose_transport([place(rank) for rank in ranks])
        yield Finding("messages", f"--reduce auto is {choice.name}: {choice.reason}")


def place(rank: RankFacts) -> RankDevice:
    """Where a rank would compute."""
    if not rank.gpus:
        return RankDevice(rank.host, "cpu")
    return RankDevice(rank.host, "cuda", rank.gpus[rank.gpu].uuid, rank.nccl)
