"""What a sweep launches in tests instead of `srun ... python -m hpctrain train --config FILE`.

It writes a record, and does what the "model" of these settings says. Imports nothing of hpctrain.
"""

import json
import os
import signal
import sys
import tomllib
from datetime import UTC, datetime
from pathlib import Path

from tests.support.wait import wait_for

settings = tomllib.loads(Path(sys.argv[sys.argv.index("--config") + 1]).read_text())
folder = Path(settings["runs_dir"]) / settings["run"]
behaviour, epochs = settings.get("model", "auto"), settings.get("epochs", 2)
hold = os.environ.get("FAKE_HOLD")  # a file without which no network gets past its first epoch
notice = []


def put(kind, **fields):
    line = {"kind": kind, "time": datetime.now(UTC).isoformat().replace("+00:00", "Z"), **fields}
    with open(folder / "progress.jsonl", "a") as file:
        file.write(json.dumps(line) + "\n")


def tell(what):
    with open(folder.parent / "events", "a") as file:
        file.write(f"{what} {settings['run'][:2]} {os.getpid()}\n")


def leave(number, frame):
    notice.append(number)
    tell("notice")


signal.signal(signal.SIGUSR1, leave)


def gone():
    """Whether it was told to save and end; a deaf network does not listen."""
    return bool(notice) and behaviour != "deaf"


def end(status, code, reason=None):
    put("end", status=status, reason=reason, seconds=1.0)
    tell("end")
    sys.exit(code)


folder.mkdir(exist_ok=True)
(folder / "config.toml").touch()
(folder / "model.safetensors").touch()
old = folder / "progress.jsonl"
done = old.read_text().count('"epoch", ') if old.exists() else 0
tell("begin")
put("run", epochs=epochs, folder=str(folder))
for epoch in range(done + 1, epochs + 1):
    put("epoch", epoch=epoch, loss=1 / epoch, accuracy=0.5)
    accuracy = settings.get("lr", 0.5) * (1 - 1 / (epoch + 1))
    put("evaluation", epoch=epoch, step=epoch, split="validation", loss=1.0, accuracy=accuracy)
    if behaviour == "diverges":
        end("failed", 1, "the loss of step 3 is not finite")
    if behaviour == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if behaviour == "raises":
        tell("end")
        raise ValueError("the cause")
    if behaviour == "leaves":
        end("preempted", 75, "the time is up")
    if hold:
        wait_for(lambda: os.path.exists(hold) or (folder / "STOP").exists() or gone())
    if (folder / "STOP").exists():
        (folder / "STOP").unlink()
        end("stopped", 0, "asked to stop")
    if gone():
        end("preempted", 75, "SIGUSR1; saved")
put("evaluation", epoch=epochs, step=epochs, split="test", loss=1.0, accuracy=1 - settings["lr"])
end("done", 0)
