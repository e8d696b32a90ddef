"""Simulate the share of the time that a long job spends on steps that count (its goodput).

    python -m scripts.benchmarks.goodput [--nodes 128] [--mttf 1011h] [--cost 0.5]

This is a model, not a measurement. Failures are a Poisson process. Each costs the steps since the
newest complete checkpoint, the time until it is detected, and the restart. The defaults are a job
of 1,024 GPUs on 128 nodes, which fails every 7.9 hours (Kokolis et al., "Revisiting reliability in
large-scale machine learning research clusters", 2024).
"""

from __future__ import annotations

import argparse
import random

from hpctrain.config import Interval, duration

DAYS = 300  # simulated
DETECTION = (("10 s", 10.0), ("5 min", 300.0), ("30 min", 1800.0))
RESTART = (("15 s", 15.0), ("5 min", 300.0))


def goodput(
    interval: float, cost: float, writing: float, mttf: float, lost: float, seed: int = 0
) -> float:
    """Return the share of useful time over `DAYS` days; all arguments in seconds.

    A checkpoint blocks training for `cost` and is complete `writing` seconds later. A failure
    costs `lost` seconds besides the steps that are repeated.
    """
    draw, end = random.Random(seed), DAYS * 86400.0
    now = useful = 0.0
    while now < end:
        alive = draw.expovariate(1 / mttf)
        period = interval + cost
        complete = int(max(alive - writing, 0) / period)  # checkpoints that can be resumed from
        useful += complete * interval
        now += alive + lost
    return useful / now


def main() -> None:
    """Print a table: intervals of checkpoints against times of detection and restart."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--nodes", type=int, default=128)
    parser.add_argument("--mttf", default="1011h", help="of a node")
    parser.add_argument("--cost", type=float, default=0.5, help="seconds that a checkpoint blocks")
    parser.add_argument("--writing", type=float, default=20.0, help="seconds until it is complete")
    options = parser.parse_args()
    mttf = duration(options.mttf, "--mttf") / options.nodes
    auto = Interval(auto=True, mttf=mttf).length(options.cost, options.writing)
    intervals = (("auto", auto), ("10m", 600.0), ("1h", 3600.0), ("3h", 3 * 3600.0))
    print(f"{options.nodes} nodes, a failure every {mttf / 3600:.1f} h; auto = {auto:.0f} s")
    print(f"{'detection':>10}{'restart':>9}" + "".join(f"{name:>9}" for name, _ in intervals))
    for detection, noticed in DETECTION:
        for restart, again in RESTART:
            shares = [
                goodput(seconds, options.cost, options.writing, mttf, noticed + again)
                for _, seconds in intervals
            ]
            row = "".join(f"{share:9.2%}" for share in shares)
            print(f"{detection:>10}{restart:>9}{row}")


if __name__ == "__main__":
    main()
