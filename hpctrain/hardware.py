"""What this host is, from /proc."""

from __future__ import annotations

import platform


def processor_name() -> str:
    """The processor's name, family and model: "AMD EPYC 9654 96-Core Processor (25.17)"."""
    found: dict[str, str] = {}
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                name, _, value = line.partition(":")
                found.setdefault(name.strip(), value.strip())
    except OSError:
        pass
    if "model name" not in found:
        return platform.processor() or platform.machine()
    return f"{found['model name']} ({found.get('cpu family', '?')}.{found.get('model', '?')})"
