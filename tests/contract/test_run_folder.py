"""What lies in the folder of a run, file by file, for whoever reads it without hpctrain.

Checkpoints and the file of the best network are tensors of one run for its next launch: their names
and contents may change with a version of hpctrain. All else is a promise.
"""

from __future__ import annotations

import json
import re
from datetime import datetime
from typing import Any

import pytest
from safetensors import safe_open

from tests.support.ranks import command
from tests.support.records import read_strictly
from tests.support.runs import ROWS, RUNS, SAME

ALWAYS = {"config.toml", "plan.json", "progress.jsonl", "lock"}
TRAINED = ALWAYS | {"model.safetensors", "best", "evaluation-test.json"}
NUMBER = (int, float)
OR_NONE = type(None)

# Of each kind of record: the fields that are always there, and those that may be. A type alone, or
# a dictionary of such by name.
ACCURACY = (*NUMBER, OR_NONE)  # denoising has none
SECONDS = dict.fromkeys(("data", "compute", "reduce", "idle", "total"), NUMBER)
SHARES = dict.fromkeys(("data", "compute", "reduce", "other"), NUMBER)
REQUIRED: dict[str, dict[str, Any]] = {
    "run": {
        **dict.fromkeys(("format", "parameters", "ranks", "shards", "threads", "epochs"), int),
        **dict.fromkeys(("batch_size", "steps_per_epoch", "host_ranks", "host_cores"), int),
        **dict.fromkeys(("name", "folder", "model", "device", "precision", "comm_dtype"), str),
        **dict.fromkeys(("pack", "pack_uuid", "plan", "key", "mpi", "torch", "hpctrain"), str),
        "deterministic": bool,
        "learning_rate": NUMBER,
        "rows": dict.fromkeys(ROWS, int),
        "settings": dict,
        "init": (dict, OR_NONE),
    },
    "step": {
        **dict.fromkeys(("epoch", "step", "rows", "slowest_rank"), int),
        **dict.fromkeys(("loss", "learning_rate", "images_per_second"), NUMBER),
        "accuracy": ACCURACY,
        "seconds": SECONDS,
    },
    "epoch": {
        "epoch": int,
        **dict.fromkeys(("loss", "images_per_second", "seconds"), NUMBER),
        "accuracy": ACCURACY,
    },
    "evaluation": {
        **dict.fromkeys(("epoch", "step", "rows"), int),
        **dict.fromkeys(("loss", "seconds"), NUMBER),
        "accuracy": ACCURACY,
        "split": str,
    },
    "note": {"text": str},
    "digest": {"step": int, "digest": str},
    "end": {
        "status": str,
        "reason": (str, OR_NONE),
        **dict.fromkeys(("seconds", "step_seconds", "idle"), NUMBER),
        "shares": SHARES,
        "advice": list,
    },
}
OPTIONAL: dict[str, dict[str, Any]] = {
    "evaluation": dict.fromkeys(("unweighted_loss", "balanced_accuracy", "noisy"), NUMBER),
    "end": {
        **dict.fromkeys(("checkpoint_stall", "slowest_share", "test_accuracy"), NUMBER),
        **dict.fromkeys(("steps", "slowest_rank"), int),
        "digest": str,
        "repeats": bool,
    },
}
METADATA = {  # of weights, as JSON in the entry "hpctrain"
    **dict.fromkeys(("hpctrain", "model", "run", "pack", "pack_uuid", "precision", "task"), str),
    **dict.fromkeys(("epoch", "step"), int),
    **dict.fromkeys(("classes", "image_shape", "tensors"), list),
    **dict.fromkeys(("mean", "std", "class_weights"), (list, OR_NONE)),
    "small_stem": bool,
    "figures": dict,
    "provenance": dict,
}
PLAN = {
    **dict.fromkeys(("version", "epochs", "batch_size", "shards", "threads"), int),
    **dict.fromkeys(("warmup_steps", "rows"), int),
    **dict.fromkeys(("model", "optimizer", "device", "precision"), str),
    **dict.fromkeys(("digest", "settings", "pack_uuid", "shuffle"), str),
    **dict.fromkeys(("image_shape", "last"), list),
    "learning_rate": NUMBER,
}
EVALUATION = {
    **dict.fromkeys(("model", "pack", "pack_uuid", "split"), str),
    "rows": int,
    "loss": NUMBER,
}


def check(found: dict[str, Any], required: dict[str, Any], name: str = "") -> None:
    """Check that all fields are there, of the types that are given."""
    for field, kind in required.items():
        where = f"{name}.{field}"
        assert field in found, f"{where} is missing"
        if isinstance(kind, dict):
            assert isinstance(found[field], dict), where
            check(found[field], kind, where)
        else:
            kinds = kind if isinstance(kind, tuple) else (kind,)
            assert type(found[field]) in kinds, f"{where} is {found[field]!r}"


def check_records(records):
    """Check all fields, and the order of records."""
    for record in records:
        kind = record["kind"]
        more = {name: value for name, value in OPTIONAL.get(kind, {}).items() if name in record}
        check(record, REQUIRED[kind] | more, kind)
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", record["time"])
        datetime.fromisoformat(record["time"])
    steps = [record["step"] for record in records if record["kind"] == "step"]
    assert steps == [*range(1, len(steps) + 1)]
    assert (records[0]["kind"], records[-1]["kind"]) == ("run", "end")


def files(run):
    """The files of a run; "best" for the best networks."""
    assert all(path.is_file() or path.name in ("checkpoints", "ranks") for path in run.iterdir())
    assert not [*(run / "ranks").iterdir()], "heartbeats are gone after a run"
    kept = {path.name for path in run.iterdir() if path.is_file()}
    saved = [path.name for path in (run / "checkpoints").iterdir()]
    assert all(re.fullmatch(r"(best-)?\d{8}\.safetensors", name) for name in saved)
    assert len([name for name in kept if name.startswith("best-")]) <= 1, "only the best one"
    return {re.sub(r"best-\d{8}\.safetensors", "best", name) for name in kept}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_leaves_these_files_and_no_other(trained, name):
    assert files(trained.run(name)) == TRAINED


@pytest.mark.parametrize("name", RUNS)
def test_the_record_is_one_json_object_a_line_with_these_fields(trained, name):
    records = read_strictly(trained.run(name))
    check_records(records)
    kinds = [record["kind"] for record in records]
    first, last = records[0], records[-1]
    assert kinds.count("step") == first["epochs"] * first["steps_per_epoch"] == last["steps"]
    assert kinds.count("epoch") == first["epochs"]
    assert (first["name"], first["ranks"], first["rows"]) == (name, 2, ROWS)
    assert (last["status"], last["reason"]) == ("done", None)
    splits = [record["split"] for record in records if record["kind"] == "evaluation"]
    assert splits[-1] == "test" and {*splits[:-1]} == {"validation"}


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("file", ["model", "best"])
def test_weights_say_what_they_are_without_hpctrain(trained, name, file):
    with safe_open(max(trained.run(name).glob(f"{file}*.safetensors")), "numpy") as weights:
        metadata = json.loads(weights.metadata()["hpctrain"])
        assert sorted(metadata["tensors"]) == sorted(weights.keys())
        first = weights.get_tensor("conv1.weight") if name != "restored" else None
    check(metadata, METADATA, file)
    classes = 7 if name == "tuned" else 10
    assert (metadata["run"], metadata["image_shape"]) == (name, [28, 28, 1])
    assert metadata["classes"] == [f"class{k}" for k in range(classes)]
    assert first is None or first.shape == (20, 1, 5, 5)
    wanted = {"loss", "validation_loss"} | ({"test_loss"} if file == "model" else set())
    assert wanted <= metadata["figures"].keys()


@pytest.mark.parametrize("name", RUNS)
def test_plan_evaluation_and_record_tell_of_one_run(trained, name):
    run = trained.run(name)
    records = read_strictly(run)
    plan = json.loads((run / "plan.json").read_text())
    figures = json.loads((run / "evaluation-test.json").read_text())
    check(plan, PLAN, "plan")
    check(figures, EVALUATION, "evaluation")
    assert (plan["digest"], plan["pack_uuid"]) == (records[0]["plan"], figures["pack_uuid"])
    tested = records[-2]
    assert (figures["split"], figures["rows"]) == ("test", ROWS["test"])
    assert (figures["loss"], figures.get("accuracy")) == (tested["loss"], tested["accuracy"])
    if name == "restored":
        assert figures["confusion"] is None
        return
    matrix = figures["confusion"]
    assert len(matrix) == len(figures["classes"]) and sum(map(sum, matrix)) == figures["rows"]
    right = sum(row[k] for k, row in enumerate(matrix))
    assert figures["accuracy"] == right / figures["rows"]
    assert records[-1]["test_accuracy"] == figures["accuracy"]


def train(trained, folder, name, *words, ranks=2):
    """Train a run of two epochs: the exit code and its folder."""
    data = ["--data", trained.pack("plain"), "--runs-dir", folder, "--run", name, "--epochs", "2"]
    return command(ranks, "train", *data, *SAME, *words).code, folder / name


def test_a_run_that_is_preempted_stopped_and_resumed(trained, tmp_path):
    code, run = train(trained, tmp_path, "a", "--time-limit", "1s")
    assert (code, read_strictly(run)[-1]["status"]) == (75, "preempted")
    assert files(run) == ALWAYS

    assert command(1, "stop", run).code == 0
    assert files(run) == ALWAYS | {"STOP"}
    code, run = train(trained, tmp_path, "a", ranks=1)
    assert (code, read_strictly(run)[-1]["status"]) == (0, "stopped")
    assert files(run) == TRAINED - {"best"}, "tested, and STOP is gone"

    code, run = train(trained, tmp_path, "a", ranks=3)
    assert (code, read_strictly(run)[-1]["status"]) == (0, "done")
    assert files(run) == TRAINED
    check_records(read_strictly(run))
    launches = [record["ranks"] for record in read_strictly(run) if record["kind"] == "run"]
    assert launches == [2, 1, 3]
    before = (run / "progress.jsonl").read_bytes()
    assert train(trained, tmp_path, "a") == (0, run), "finished: nothing is left to do"
    assert (run / "progress.jsonl").read_bytes() == before


def test_a_run_that_fails_keeps_its_last_good_step(trained, tmp_path):
    code, run = train(trained, tmp_path, "a", "--lr", "1e30")
    last = read_strictly(run)[-1]
    assert (code, last["status"]) == (1, "failed")
    assert "not finite" in last["reason"] and last["repeats"] is True
    assert files(run) == ALWAYS | {"model.safetensors"}
    check_records(read_strictly(run))
