"""The Stop button, pressed in a real browser: a run of 4 ranks must end on all after the same step.

    pip install playwright; apt-get install chromium     # or: CHROMIUM=/path/to/it
    python scripts/watch_stop.py [FOLDER]

Trains on digits in FOLDER (default: a temporary one), opens `hpctrain watch --web` in headless
Chromium, clicks Stop, leaves pictures of the page there, and prints what each rank did. Exit code 0
where the run ended with 0, all ranks did the same steps, and at most two of them after rank 0 saw
the STOP file.
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).resolve()
RANKS = 4
NAME = "stopped"
WAIT = 60.0  # seconds for the run to begin


def rank(arguments: list[str]) -> int:
    """hpctrain as it is, but each rank writes how many steps it did, and when it saw the file."""
    from hpctrain import cli
    from hpctrain.training import control, steps

    done: dict[str, Any] = {"rank": os.environ.get("OMPI_COMM_WORLD_RANK", "0"), "steps": 0}
    record_step, asked = steps.record_step, control.Control.asked

    def record(run: Any, *figures: Any) -> None:
        record_step(run, *figures)
        done["steps"] = run.state.step

    def ask(self: control.Control) -> bool:
        found = asked(self)
        if found:
            done.setdefault("seen_after", done["steps"])
        return found

    steps.record_step, control.Control.asked = record, ask
    atexit.register(lambda: Path(f"rank{done['rank']}.json").write_text(json.dumps(done)))
    return cli.main(arguments)


def click(address: str) -> None:
    """Open the page, let the run learn for a while, click Stop, wait for its end."""
    from playwright.sync_api import sync_playwright

    browser_path = os.environ.get("CHROMIUM") or shutil.which("chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.on("dialog", lambda dialog: dialog.accept())
        page.goto(address)
        page.wait_for_timeout(8000)
        page.screenshot(path="running.png")
        page.click("#chosen button.stop")
        page.wait_for_selector("#chosen .badge.stopped", timeout=60_000)
        page.screenshot(path="stopped.png")
        print("the page says:", page.inner_text("#chosen .badge"))
        browser.close()


def main(folder: Path) -> int:
    """Train, watch, stop; say what happened."""
    os.chdir(folder)
    train = ["train", "--epochs", "1000", "--run", NAME, "--progress", "none"]
    job = subprocess.Popen(
        ["timeout", "300", "mpirun", "-n", str(RANKS), sys.executable, str(SCRIPT), "rank", *train]
    )
    ends = time.monotonic() + WAIT
    while not Path("runs", NAME, "progress.jsonl").exists() and time.monotonic() < ends:
        time.sleep(0.2)
    watch = [sys.executable, "-m", "hpctrain", "watch", NAME, "--web"]
    with subprocess.Popen(watch, stdout=subprocess.PIPE, text=True) as page:
        assert page.stdout is not None
        try:
            click(page.stdout.readline().strip())
            code = job.wait()
        finally:
            page.terminate()
            job.terminate()
    ranks = [json.loads(Path(f"rank{number}.json").read_text()) for number in range(RANKS)]
    for one in ranks:
        print(one)
    after = ranks[0]["steps"] - ranks[0]["seen_after"]
    print(f"exit code {code}, {after} steps after rank 0 saw the STOP file")
    return 0 if code == 0 and after <= 2 and len({one["steps"] for one in ranks}) == 1 else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        sys.exit(rank(sys.argv[2:]))
    place = sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp(prefix="hpctrain-watch-")
    sys.exit(main(Path(place)))
