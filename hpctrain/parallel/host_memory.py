"""Memory of the host that this process may still use, with the limits of its control groups."""

from __future__ import annotations

import math
import re
from pathlib import Path


def free_memory(root: Path = Path("/")) -> float:
    """Return the bytes that are free on this host, or in the control group of this process."""
    found = re.search(r"MemAvailable:\s+(\d+) kB", (root / "proc/meminfo").read_text())
    free = [int(found[1]) * 1024] if found else []
    groups, mounted = (root / "proc/self/cgroup").read_text(), root / "sys/fs/cgroup"
    for _, controllers, path in (line.split(":", 2) for line in groups.splitlines()):
        if controllers == "":
            folder, names = mounted, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            folder = mounted / "memory"
            names = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
        else:
            continue
        own = folder / path.strip("/")
        for each in (own, *own.parents):
            if each.is_relative_to(folder):
                free += _free_in_group(each, *names)
    return float(min(free, default=math.inf))


def _free_in_group(folder: Path, limit: str, used: str, cached: str) -> list[int]:
    """Return [free bytes] of a control group, cached files included; [] if it has no limit."""
    try:
        most, now = (int((folder / name).read_text()) for name in (limit, used))
        found = re.search(rf"^{cached} (\d+)", (folder / "memory.stat").read_text(), re.MULTILINE)
    except (OSError, ValueError):  # no such group here, or the word "max"
        return []
    return [most - now + (int(found[1]) if found else 0)]
