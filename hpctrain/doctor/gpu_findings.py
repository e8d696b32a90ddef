"""What doctor thinks of GPUs and of CuPy: from all ranks' facts to findings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from hpctrain.doctor.facts import RankFacts
from hpctrain.doctor.finding import GIB, Finding, numbered, row
from hpctrain.parallel.places import Place, choose, sharing


def gpu_findings(ranks: Sequence[RankFacts]) -> Iterable[Finding]:
    """What GPUs there are, and which rank uses which."""
    for number, rank in enumerate(ranks):
        if rank.gpu_devices and not rank.gpus and not rank.torch_error:
            found = f"{rank.gpu_devices} in {rank.host}, but torch on rank {number} sees none"
            why = rank.gpu_problem or "CUDA_VISIBLE_DEVICES hides them, or the job was given none"
            why = why if rank.torch_cuda else "install a torch that is built for CUDA"
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
    elif shared := sharing([place(rank) for rank in ranks]):
        yield Finding("GPU of rank", found, "note", f"{shared}: {start} gives each its own")
    else:
        idle = len(seen) - len(used)
        advice = f"{idle} of {len(seen)} GPUs idle: {start} would use all"
        yield row("GPU of rank", found, "note", advice, when=idle > 0)


def cupy_findings(ranks: Sequence[RankFacts]) -> Iterable[Finding]:
    """Whether CuPy is there where it is needed, and fits torch."""
    first = max(ranks, key=lambda rank: (bool(rank.gpus), bool(rank.cupy_problem)))
    packages, major = first.cupy_packages, first.torch_cuda.split(".")[0]
    right = f"pip install cupy-cuda{major}x" if major else "install the one for torch's CUDA"
    if not packages:
        advice = f"the message of a GPU is a CuPy array: {right}"
        found = "not installed" + ("" if first.gpus else ", nor needed without a GPU")
        yield row("CuPy", found, "fail", advice, when=bool(first.gpus))
        return
    found = f"{first.versions.get('cupy', 'unknown version')} ({', '.join(packages)})"
    if len(packages) > 1:
        advice = f"only one may be installed: pip uninstall {' '.join(packages)}; then {right}"
        yield Finding("CuPy", found, "fail", advice)
    elif first.cupy_cuda and major and str(first.cupy_cuda) != major:
        advice = f"torch is built for CUDA {major}: pip uninstall {packages[0]}; then {right}"
        yield Finding("CuPy", found, "fail", advice)
    elif first.gpus:
        yield row("CuPy", found, "fail", first.cupy_problem, when=bool(first.cupy_problem))
        yield Finding("NCCL", first.nccl or "not available through CuPy")
    else:
        yield Finding("CuPy", found, "note", "not used: torch sees no GPU")


def transport_findings(ranks: Sequence[RankFacts]) -> Iterable[Finding]:
    """How the messages of GPUs would travel."""
    if all(rank.gpus for rank in ranks):
        choice = choose([place(rank) for rank in ranks])
        yield Finding("messages", f"--reduce auto is {choice.name}: {choice.reason}")


def place(rank: RankFacts) -> Place:
    """Where a rank would compute."""
    if not rank.gpus:
        return Place(rank.host, "cpu")
    major, minor, patch = (int(part) for part in (rank.nccl or "0.0.0").split("."))
    version = 10000 * major + 100 * minor + patch
    return Place(rank.host, "cuda", rank.gpus[rank.gpu].uuid, version)
