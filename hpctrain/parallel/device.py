"""The device of a rank, its memory, generators and flags of torch, and what determines the bits.

GPUs can round the factors of products to TF32, 10 bits of mantissa. "default" is torch's default:
cuDNN's convolutions may use TF32, matrix products do not
(https://docs.pytorch.org/docs/stable/notes/cuda.html). With "tf32" both may, with "fp32" neither.
Unless bits must be reproducible, cuDNN times its algorithms for each shape and uses the fastest.

With ``--deterministic`` torch uses algorithms with bitwise reproducible results and refuses
operations that have none (https://docs.pytorch.org/docs/stable/notes/randomness.html), and cuDNN
does not choose by timing. TF32 is reproducible on the same kind of GPU, which is all that is
promised there, so "default" keeps its meaning. The number of CPU threads is set too, because oneDNN
and MKL split their sums by it.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import re
import socket
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from hpctrain.cluster import gpu_files
from hpctrain.errors import DeviceFailure, Failure, RunError, UsageError, first_line
from hpctrain.streams import record_event
from hpctrain.text import brief, counted, listed

DTYPES = {torch.float32: np.float32, torch.float64: np.float64}  # of messages


def built_for() -> str:
    """Return torch's GPU platform, such as "CUDA 12.8" or "ROCm 7.0.51831"; empty if none."""
    if torch.version.hip:
        return f"ROCm {torch.version.hip.partition('-')[0]}"
    return f"CUDA {torch.version.cuda}" if torch.version.cuda else ""


def choose_device(requested: str, local_rank: int) -> torch.device:
    """Return the device of a rank, and make it the current one; the CPU if the rank sees no GPU.

    It is the GPU of the local rank modulo the number of GPUs: the first one if the launcher shows
    each rank only its own. Raises UsageError if CUDA is requested and missing, or if a GPU cannot
    be used.
    """
    _choose_slice(local_rank)
    count = torch.cuda.device_count() if requested != "cpu" else 0
    if requested == "cuda" and count == 0:
        why = "" if built_for() else " (this torch was built without GPUs)"
        raise UsageError(f"--device cuda, but torch {torch.__version__} sees no GPU{why}")
    if count == 0:
        return torch.device("cpu")
    device = torch.device("cuda", local_rank % count)
    try:
        torch.cuda.set_device(device)
        record_event(device).synchronize()  # first use of the GPU, unlike set_device
    except RuntimeError as error:  # an old driver, a GPU that another process holds
        text = f"GPU {device.index} of {count} cannot be used ({first_line(error)})"
        raise UsageError(f"{text}: python -m hpctrain doctor shows more") from error
    return device


def unused_gpus_note(requested: str, device: torch.device) -> str:
    """Return a note if this host has GPUs and `device`, chosen for --device, is none; else ""."""
    files = gpu_files()
    if requested != "auto" or device.type != "cpu" or not files:
        return ""
    return (
        f"training runs on the CPU: this host has {listed(files, 1)}, but torch sees no GPU"
        " (python -m hpctrain doctor shows why; --device cpu, if that is meant)"
    )


def _choose_slice(local_rank: int) -> None:
    """Leave this rank's slice alone in CUDA_VISIBLE_DEVICES, if it lists slices of GPUs (MIG).

    A process can use one slice, and CUDA would take the first of the list in each.
    """
    names = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if all(name.strip().startswith("MIG-") for name in names):
        os.environ["CUDA_VISIBLE_DEVICES"] = names[local_rank % len(names)]


class RankDevice(NamedTuple):
    """The device of one rank."""

    host: str
    gpu: str = ""  # its UUID; empty: computes on the CPU
    nccl: str = ""  # torch's, such as "NCCL 2.29.7"; empty = none that can be called
    bus: str = ""  # its PCI address, which slices of one GPU (MIG) share

    @classmethod
    def find(cls, device: torch.device) -> RankDevice:
        """Return that of this rank, which computes on `device`.

        NCCL compares PCI addresses (ncclCommInitRank), RCCL tells partitions of a GPU apart.
        """
        host = socket.gethostname()
        if device.type == "cpu":
            return cls(host)
        gpu: Any = torch.cuda.get_device_properties(device)  # torch's stub lacks the address
        uuid = str(gpu.uuid)
        bus = f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}"
        return cls(host, uuid, nccl_version(), uuid if torch.version.hip else bus)


def load_nccl(path: str = "") -> ctypes.CDLL:
    """Return the NCCL or RCCL at `path`, or that which torch has loaded. Raises OSError."""
    if path:
        return ctypes.CDLL(path)
    name = "libtorch_hip.so" if torch.version.hip else "libtorch_cuda.so"  # or what it depends on
    return ctypes.CDLL(name, os.RTLD_NOLOAD)


def nccl_version() -> str:
    """Return name and version of torch's NCCL, such as "NCCL 2.29.7".

    It is empty if torch was built without NCCL, or with one whose functions nobody else can call.
    """
    try:
        found = ".".join(map(str, torch.cuda.nccl.version()[:3]))
        if not hasattr(load_nccl(), "ncclAllReduce"):
            return ""
    except (AttributeError, OSError, RuntimeError):
        return ""
    return f"{'RCCL' if torch.version.hip else 'NCCL'} {found}"


def choose_transport(ranks: Sequence[RankDevice], wanted: str = "auto") -> tuple[str, str, str]:
    """Choose the transport for all ranks from their devices: NCCL where every rank can use it.

    Returns its name, the reason, and a note if ranks share GPUs or NCCL cannot be used. Raises
    UsageError if the `wanted` one is not possible, and if only some ranks have a GPU: these round
    differently, so weights that each rank updates would drift apart.
    """
    without = [f"rank {rank} ({place.host})" for rank, place in enumerate(ranks) if not place.gpu]
    if wanted in ("nccl", "mpi-gpu") and without:
        raise UsageError(f"--reduce {wanted} is for GPUs: {without[0]} has none")
    if len(without) == len(ranks):
        return "mpi", "all ranks compute on CPUs", ""
    if without:
        raise UsageError(
            f"{len(without)} of {len(ranks)} ranks see no GPU, such as {without[0]}:"
            " weights would differ; give every rank a GPU, or all --device cpu"
        )
    against = note = ""
    for host in reversed(dict.fromkeys(place.host for place in ranks)):
        gpus = [place.gpu for place in ranks if place.host == host]
        buses = {place.bus for place in ranks if place.host == host}
        if len(set(gpus)) < len(gpus):
            against = note = f"{len(gpus)} ranks share {counted(len(set(gpus)), 'GPU')} of {host}"
        elif len(buses) < len(gpus):
            whole = counted(len(buses), "GPU")
            against = (
                f"{len(gpus)} ranks have slices of {whole} of {host} (MIG), which NCCL refuses"
            )
    for rank, place in enumerate(ranks):
        if not place.nccl:
            against = f"torch on rank {rank} ({place.host}) has no NCCL, or hides its functions"
        elif place.nccl != ranks[0].nccl:
            against = f"{ranks[0].nccl} on rank 0, {place.nccl} on rank {rank} ({place.host})"
    if wanted == "nccl" and against:
        raise UsageError(f"--reduce nccl: {against}")
    if wanted != "auto":
        return wanted, "asked for", note
    if len(ranks) == 1:
        return "none", "one rank", note
    if against:
        return "host", against, note or f"{against}: sums pass through host memory"
    return "nccl", "every rank has a GPU of its own", note


def place(model: nn.Module, device: torch.device, channels_last: bool) -> nn.Module:
    """Move a model to the device and its 4-d weights to the memory format, NHWC or NCHW."""
    model.to(device)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    for parameter in model.parameters():
        if parameter.dim() == 4:  # those of 3-d convolutions have no NHWC
            parameter.data = parameter.data.contiguous(memory_format=layout)
    return model


def crashing_in_nhwc(model: nn.Module) -> str:
    """Return the name of the first convolution that must not be trained in NHWC; "" if none.

    On CPUs with AVX2 and without AVX-512, oneDNN's weight gradient of a 1x1 convolution that has a
    stride, and fewer input channels than a vector has values, writes beyond its memory
    (https://github.com/uxlfoundation/oneDNN/issues/6035): the process crashes, hangs, or computes
    wrong gradients. Convolutions with padding or groups use other code.
    """
    for name, module in model.named_modules():
        if not isinstance(module, nn.Conv2d) or module.kernel_size != (1, 1):
            continue
        plain = module.groups == 1 and module.padding in ((0, 0), "valid")
        if plain and max(module.stride) > 1 and 1 < module.in_channels < 8:
            return name or type(module).__name__
    return ""


def has_avx2_only() -> bool:
    """Whether oneDNN uses AVX2, and no AVX-512, on this CPU."""
    most = os.environ.get("ONEDNN_MAX_CPU_ISA", "")
    return most.upper().startswith("AVX2") or torch.backends.cpu.get_cpu_capability() == "AVX2"


def empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Allocate an uninitialised tensor.

    On the CPU NumPy does, in huge pages: copies between processes are then twice as fast.
    """
    if device.type == "cpu":
        return torch.from_numpy(np.empty(shape, DTYPES[dtype]))
    return torch.empty(shape, dtype=dtype, device=device)


@functools.cache
def memory_of(device: torch.device) -> tuple[str, str]:
    """Return whose memory messages on this device use, "host", "cupy" or "torch", and why.

    On a GPU it is CuPy's, if CuPy is installed and fits torch. CuPy asks the runtime for it
    (cudaMalloc, hipMalloc), so that MPI and network cards can register it; torch's allocator may
    map memory in pieces (expandable segments), which cannot be registered.
    """
    if device.type == "cpu":
        return "host", "computes on the CPU"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # CuPy's advice on how it is installed
            import cupy
        runtime = cupy.cuda.runtime
        name, unit = ("ROCm", 10_000_000) if runtime.is_hip else ("CUDA", 1000)
        found = f"{name} {runtime.runtimeGetVersion() // unit}"
        if found != built_for().partition(".")[0]:
            return "torch", f"CuPy is built for {found}, torch for {built_for()}"
        _empty_of_cupy(1, torch.float32, device)
    except Exception as error:  # CuPy's own errors cannot be named without importing it
        return "torch", f"no CuPy ({type(error).__name__}: {first_line(error)})"
    return "cupy", f"CuPy and torch are built for {found}"


def zeros_for_messages(length: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Allocate a vector of zeros for messages. Raises UsageError for types that MPI cannot sum."""
    if dtype not in DTYPES:
        raise UsageError(f"a message of {dtype} cannot be summed by MPI: use float32 or float64")
    if device.type == "cpu":
        return torch.from_numpy(np.zeros(length, DTYPES[dtype]))
    if memory_of(device)[0] == "cupy":
        return _empty_of_cupy(length, dtype, device).zero_()
    return torch.zeros(length, dtype=dtype, device=device)


def _empty_of_cupy(length: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a new CuPy array outside of CuPy's memory pool, as a tensor that keeps it alive."""
    import cupy

    with cupy.cuda.Device(device.index), cupy.cuda.using_allocator(None):
        return torch.as_tensor(cupy.empty(length, DTYPES[dtype]))


def seed_torch(key: int, device: torch.device) -> None:
    """Seed the generators that a model on this device draws from (dropout).

    `torch.manual_seed` is not used: it spends 0.3 ms per call on devices that do not exist. Neither
    is `torch.cuda.manual_seed`, which seeds the current GPU of the thread, whichever that is.
    """
    torch.default_generator.manual_seed(key)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index].manual_seed(key)


def fork_rng(device: torch.device) -> AbstractContextManager[None]:
    """Return a context that restores the generators of `seed_torch` at its end."""
    return torch.random.fork_rng([device] if device.type == "cuda" else [])


def keep_memory() -> None:
    """Make glibc keep freed memory for the next step instead of returning it to the system.

    Every step frees and allocates the same blocks; if they are returned, every page faults again
    (700 to 1,400 faults per step of the digits network, a third of its time). Threads share one
    arena: glibc returns the memory of other arenas than the first regardless of the setting, which
    costs the loader's thread 1,300 faults per batch of 128 images of 100x100x3, and half its speed.
    See mallopt(3).
    """
    trim_threshold, mmap_threshold, arena_max = -1, -3, -8
    mallopt = ctypes.CDLL(None).mallopt
    # Older versions accept at most 32 MiB; each call disables the dynamic adjustment of both.
    if mallopt(mmap_threshold, 2**30) or mallopt(mmap_threshold, 2**25):
        mallopt(trim_threshold, 2**31 - 1)
        mallopt(arena_max, 1)


@contextmanager
def torch_settings(
    precision: str, deterministic: bool = False, benchmark: bool = True
) -> Iterator[None]:
    """Set torch's backend flags for this --precision in a context.

    Algorithms are `deterministic`, or chosen by timing (`benchmark`). At the end the flags, the
    number of threads and the random generators are restored.
    """
    cudnn = torch.backends.cudnn
    flags = (
        (torch.utils.deterministic, "fill_uninitialized_memory", False),
        (cudnn, "deterministic", deterministic),
        (cudnn, "benchmark", benchmark and not deterministic),
        (cudnn, "allow_tf32", precision in ("default", "tf32")),  # for "bf16", autocast does more
    )
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(gpus))
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        stack.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
        torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
        stack.callback(_set_debug_mode, torch.get_deterministic_debug_mode())
        if deterministic:
            # Read when cuBLAS starts; older torch refuses to be deterministic without it.
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        _set_debug_mode(2 * deterministic)  # refuse operations without a deterministic form
        for owner, name, value in flags:
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        yield


@contextmanager
def without_benchmark() -> Iterator[None]:
    """Let cuDNN choose its algorithms without timing them, for shapes that occur only once."""
    cudnn = torch.backends.cudnn
    before = cudnn.benchmark
    cudnn.benchmark = False
    try:
        yield
    finally:
        cudnn.benchmark = before


def _set_debug_mode(mode: int) -> None:
    """Set torch's deterministic mode: 0 = off, 1 = warn, 2 = error."""
    if "torch._inductor.config" in sys.modules:  # the compiler has a switch of its own
        torch.use_deterministic_algorithms(mode > 0, warn_only=mode == 1)
    else:  # the same without importing the compiler, which takes longer than importing torch
        torch.set_deterministic_debug_mode(mode)


NO_MEMORY = re.compile("can't allocate memory|out of memory|STATUS_ALLOC_FAILED")  # torch, CUDA
MORE_SHARDS = (
    "a new run with more --shards needs less, but batch norm then normalizes smaller groups of"
    " images"
)
REFUSAL = "does not have a deterministic implementation"  # torch's words
OF_DEVICE = re.compile(  # of torch, and of CuPy (cudaErrorAssert: ...)
    "(CUDA|HIP) error|(cuda|hip)Error|(CUDNN|CUBLAS|MIOPEN|HIPBLAS)_STATUS|miopenStatus"
)


@functools.cache
def processor_name() -> str:
    """Return the processor's name, family and model: "AMD EPYC 9654 96-Core Processor (25.17)"."""
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    found = dict(re.findall(r"^(model name|cpu family|model)\s*: (.*)$", text, re.MULTILINE))
    if "model name" not in found:
        return platform.processor() or platform.machine()
    return f"{found['model name']} ({found.get('cpu family', '?')}.{found.get('model', '?')})"


def hardware_key(device: torch.device) -> str:
    """Return what the bits of results depend on besides the plan: versions and hardware."""
    cpu = processor_name(), torch.backends.cpu.get_cpu_capability()
    parts = [f"torch {torch.__version__}", *cpu]
    if device.type == "cuda":
        name = "MIOpen" if torch.version.hip else "cuDNN"
        parts += [torch.cuda.get_device_name(device), built_for()]
        parts.append(f"{name} {torch.backends.cudnn.version()}")
    return ", ".join(parts)


def is_of_device(error: BaseException) -> bool:
    """Whether an error is none of the code that was running, but of memory, a GPU or a setting."""
    text = str(error)
    if isinstance(error, MemoryError) or NO_MEMORY.search(text) or REFUSAL in text:
        return True
    return bool(OF_DEVICE.search(text)) or type(error).__module__.startswith("torch._dynamo")


@contextmanager
def explain_errors(refused: type[Failure], advice: str = MORE_SHARDS) -> Iterator[None]:
    """Raise one line in place of three errors of torch.

    RunError if memory runs out, which `advice` says how to avoid. DeviceFailure if a GPU fails.
    `refused` if --deterministic lacks an operation, which is named.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        text = " ".join(str(error).split())
        line = first_line(error)
        if isinstance(error, MemoryError) or NO_MEMORY.search(text):
            needed = re.split("(?<= free)[.]", line)[0]  # then torch describes its allocator
            raise RunError(f"out of memory ({brief(needed)}): {advice}") from error
        if OF_DEVICE.search(text):
            which = "CUDA_LAUNCH_BLOCKING=1 in the environment shows which"
            raise DeviceFailure(
                f"a GPU or a kernel on it failed ({brief(line)}): {which}"
            ) from error
        if REFUSAL not in text:
            raise
        operation = text.partition(REFUSAL)[0].strip()
        raise refused(f"--deterministic: {operation} {REFUSAL} in torch") from error
