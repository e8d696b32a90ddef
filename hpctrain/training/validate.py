"""Validation during training, the test at the end of a run, and what follows from them."""

from __future__ import annotations

import math
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from hpctrain import __version__
from hpctrain.errors import Failure
from hpctrain.fault import fault
from hpctrain.inference.evaluate import Evaluation, evaluate, write_evaluation
from hpctrain.inference.network import Inference
from hpctrain.models import read_model, save_model, snapshot
from hpctrain.outcome import Status
from hpctrain.parallel.mpi import agreed, on_all, on_root
from hpctrain.report.find import NETWORK_FILE, best_file, evaluation_file
from hpctrain.report.metrics import Figure
from hpctrain.tasks.facts import all_settings
from hpctrain.text import counted
from hpctrain.training.state import CannotContinue, Reached, Run, Undefined, read_on_all
from hpctrain.watchdog import doing, running_time

#: Settings of a run, and fields of its plan and its pack, that the file of a network holds.
OF_CONFIG = ("small_stem", "task", *all_settings(), "channels_last", "loss", "metric")
OF_PLAN = ("model", "image_shape", "pack_uuid", "precision", "evaluation_rows")
OF_PACK = ("classes", "provenance", "external")


def validation_due(run: Run, step: int) -> bool:
    """Whether a validation follows this step."""
    if "validation" not in run.pack.splits:
        return False
    return run.config.validate_every.follows(step, run.plan.steps_per_epoch)


def validate(run: Run) -> None:
    """Evaluate the validation split, keep the best network, check --patience. Collective.

    The best network so far is written in the background. Raises Undefined if the figure of
    --best-by is NaN in the first validation.
    """
    state = run.progress
    patience = run.plan.patience
    by = run.best_by
    run.compare_ranks()
    result = evaluate_split(run, "validation")
    if result is None:
        return
    state.chosen = run.task.choose(result.tallies)
    best = state.best.validation(by)
    reached = Reached(state.step, state.epoch, dict(state.figures))
    value = reached.validation(by)
    if not state.validated:
        check_defined(run, value)
    state.validated = state.step
    if value.score > best.score:
        state.best = reached
        state.best_chosen = state.chosen
        state.waited = 0
        with evaluated_network(run):
            tensors = snapshot(run.trainer.model) if run.comm.rank == 0 else {}
        run.writer.save_best(state.step, tensors, network_metadata(run))
    else:
        state.waited += 1
    if patience and state.waited >= patience and not state.ended:
        value_text = "none" if best.value is None else f"{best.value:.4g}"
        than = f"than {value_text} of step {state.best.step}"
        state.ended = Status.DONE
        state.reason = f"no better {by.figure} {than} in {counted(patience, 'validation')}"


def check_defined(run: Run, figure: Figure) -> None:
    """Raise Undefined if a figure is NaN and does not follow from the network alone."""
    is_nan = figure.value is None or math.isnan(figure.value)
    if is_nan and (run.task.best_by or figure.name != "loss"):
        raise agreed(
            Undefined(
                f"the first validation has no {figure.name} (NaN), which chooses the best network:"
                " look at the validation split, or begin another run with another --best-by"
            )
        )


def network_metadata(run: Run) -> dict[str, Any]:
    """Return the metadata of the network that the model of a run holds."""
    reached = run.progress.network
    scaling = run.plan.scaling
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    by_image = {}  # a file without this has mean and std, or images in [0, 1]
    if isinstance(scaling, str):
        by_image["normalization"] = scaling
    elif scaling:
        mean, std = scaling
    values: dict[str, Any] = {}  # of packs of values only
    if run.pack.targets.columns:
        values["columns"] = run.pack.targets.columns
    settings = run.config.table()
    scale = run.pack.scale
    if run.plan.stored_range is not None:
        scale = scale.with_ranges(*run.plan.stored_range)
    return {
        "hpctrain": __version__,
        **{name: settings[name] for name in OF_CONFIG},
        **{name: getattr(run.plan, name) for name in OF_PLAN},
        "class_weights": run.plan.measured["class_weights"],
        **{name: getattr(run.pack, name) for name in OF_PACK},
        "scale": scale.as_metadata(),
        "mean": mean,
        "std": std,
        **by_image,
        **values,
        **run.task.with_chosen(run.progress.network_chosen).metadata(),
        "pack": str(Path(run.pack.path).resolve()),
        "run": run.folder.name,
        "step": reached.step,
        "epoch": reached.epoch,
        "figures": dict(reached.figures),  # a copy: training changes them while they are written
    }


@torch.no_grad()
def choose_network(run: Run) -> None:
    """Let the model hold the final network: the average, the best one, or the last. Collective.

    Raises CannotContinue if the file of the best one cannot be read.
    """
    state = run.progress
    trainer = run.trainer
    chosen = state.network
    if run.config.final == "best" and state.best.step:
        path = best_file(run.folder, state.best.step)
        try:
            best = read_on_all(run.comm, lambda: read_model(path)[0])
        except Failure as error:
            raise agreed(CannotContinue(f"the best network is lost: {error}")) from error
        tensors = trainer.model.state_dict()
        for name, tensor in best.items():
            tensors[name].copy_(tensor)
        trainer.norms.read()
        chosen = state.best
    trainer.swap_average()
    state.final = chosen


def save_network(run: Run) -> None:
    """Write the network that is evaluated to model.safetensors (rank 0)."""
    with evaluated_network(run):
        save_model(run.folder / NETWORK_FILE, run.trainer.model, network_metadata(run))


def evaluate_split(run: Run, split: str) -> Evaluation | None:
    """Evaluate one split and record the result; None if the run is preempted first. Collective.

    Raises CannotContinue if samples cannot be read or are not finite.
    """
    state = run.progress
    comm = run.comm
    start = running_time()
    began = time.perf_counter()

    def go_on() -> bool:
        return run.control.preempted_by(evaluating=True) is None

    run.recorder.phase(f"evaluating {split}")
    fault("evaluation.begun")
    task = run.task
    if split != "validation":
        task = replace(task.with_chosen(state.network_chosen), has_all_figures=True)
    inference = Inference(run.trainer.model, task, run.pipeline, run.plan.evaluation_rows)
    try:
        with on_all(comm):
            source = run.split(split)
        with evaluated_network(run):
            result = evaluate(inference, source, comm, go_on)
    except Failure as error:
        if not error.agreed:
            raise
        raise agreed(CannotContinue(f"{split} cannot be evaluated: {error}")) from error
    doing(f"recording the evaluation of {split}")
    seconds = time.perf_counter() - began
    ran = min(seconds, running_time() - start)  # without a suspension of the job
    run.control.slowest_evaluation = max(run.control.slowest_evaluation, ran)
    if result is None:
        if state.ended != Status.STOPPED:
            state.ended = Status.PREEMPTED
        return None
    network = state.network
    for name in run.task.tracked:
        network.figures[f"{split}_{name}"] = result.value(name)
    recorded = result.figures(without=run.task.unrecorded)
    figures = {"epoch": network.epoch, "step": network.step, "split": split, **recorded}
    state.chain_figures(figures)
    record = run.recorder.write("evaluation", **figures, seconds=seconds)
    if split == "validation":
        run.control.evaluated(record)
    return result


def evaluated_network(run: Run) -> AbstractContextManager[None]:
    """Let the model be the average of --ema in a block, until it is chosen as the final network."""
    return nullcontext() if run.progress.final else run.trainer.averaged()


def test_network(run: Run) -> dict[str, float | None]:
    """Evaluate every split that was not used in training. Collective.

    Writes the figures, with the confusion matrix, to the run's folder, and returns those by which
    runs are ranked.
    """
    ranked_by = run.task.ranked_by
    tested: dict[str, float | None] = {}
    for split, info in run.pack.splits.items():
        if split in ("train", "validation") or not info.samples:
            continue
        if (result := evaluate_split(run, split)) is None:
            break
        file = evaluation_file(run.folder, split)
        network = run.folder / NETWORK_FILE
        on_root(run.comm, write_evaluation, file, result, run.pack, network, split)
        tested[f"{split}_{ranked_by}"] = result.value(ranked_by)
    return tested
