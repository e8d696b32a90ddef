"""Validation during training, the test at the end of a run, and what follows from them."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from hpctrain.errors import Failure
from hpctrain.fault import fault
from hpctrain.inference.evaluate import Evaluation, evaluate, write_evaluation
from hpctrain.inference.network import FILE as MODEL_FILE
from hpctrain.inference.network import describe
from hpctrain.models import read_model, snapshot
from hpctrain.parallel.mpi import agreed, on_all, on_root
from hpctrain.report.find import best_file, evaluation_file
from hpctrain.training.run import CannotContinue, EndReason, Run, read_on_all
from hpctrain.watchdog import doing


def validation_due(run: Run, step: int) -> bool:
    """Whether a validation follows this step."""
    if "validation" not in run.pack.splits:
        return False
    return run.validations.follows(step, run.plan.steps_per_epoch)


def validate(run: Run) -> None:
    """Evaluate the validation split, keep the best network, check --patience. Collective."""
    state, patience = run.progress, run.plan.patience
    result = evaluation(run, "validation")
    if result is None:
        return
    state.validated = state.step
    if state.is_best(result.loss):
        save_best(run)
    if patience and state.waited >= patience and not state.ended:
        state.ended, state.reason = (
            EndReason.PATIENCE,
            (
                f"{patience} validations without a loss below the {state.best_loss:.4g}"
                f" of step {state.best.step}"
            ),
        )


def save_best(run: Run) -> None:
    """Write the network with the smallest validation loss so far in the background (rank 0)."""
    with evaluated_network(run):
        tensors = snapshot(run.trainer.model) if run.comm.rank == 0 else {}
    run.writer.save_best(run.progress.step, tensors, describe_network(run))


@torch.no_grad()
def choose_network(run: Run) -> None:
    """Let the model hold the final network: the average, the best one, or the last. Collective.

    Raises CannotContinue if the file of the best one cannot be read.
    """
    state, trainer = run.progress, run.trainer
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
        state.went_back = True
    trainer.swap_averages()
    state.chosen = True


def describe_network(run: Run) -> dict[str, Any]:
    """Return the metadata of the network that the model holds."""
    reached = run.progress.network
    where = {"run": run.folder.name, "step": reached.step, "epoch": reached.epoch}
    known = {**where, **reached.figures, "figures": reached.figures}
    return describe(run.config, run.plan, run.pack, known)


def evaluation(run: Run, split: str) -> Evaluation | None:
    """Evaluate one split and record the result; None if the run is preempted first. Collective.

    Raises CannotContinue if samples cannot be read or are not finite.
    """
    state, comm = run.progress, run.comm
    began = time.perf_counter()

    def go_on(what: str) -> bool:
        doing(f"{what} in the evaluation of {split} after step {state.step}")
        return run.control.preempted_by(evaluating=True) is None

    run.recorder.phase(f"evaluating {split}")
    fault("evaluation.begun")
    model, prepare, block = run.trainer.model, run.prepare, run.plan.evaluation_rows
    try:
        with on_all(comm):
            source = run.input.split(split)
        with evaluated_network(run):
            result = evaluate(model, source, run.task, prepare, comm, block, go_on)
    except Failure as error:
        if not error.agreed:
            raise
        raise agreed(CannotContinue(f"{split} cannot be evaluated: {error}")) from error
    doing(f"recording the evaluation of {split}")
    seconds = time.perf_counter() - began
    run.control.slowest_evaluation = max(run.control.slowest_evaluation, seconds)
    if result is None:
        state.ended = state.ended if state.ended is EndReason.STOP else EndReason.PREEMPTED
        return None
    step, epoch, known = state.network
    known[f"{split}_accuracy"] = result.accuracy
    known[f"{split}_loss"] = result.loss
    figures = {"epoch": epoch, "step": step, "split": split, **result.figures()}
    if run.plan.class_weights or run.config.balanced_sampling:
        figures["balanced_accuracy"] = result.balanced_accuracy
    state.add(figures)
    record = run.recorder.evaluation(**figures, seconds=seconds)
    if split == "validation":
        run.control.evaluated(record)
    return result


def evaluated_network(run: Run) -> AbstractContextManager[None]:
    """Let the model be the average of --ema in a block, until it is chosen as the final network."""
    return nullcontext() if run.progress.chosen else run.trainer.averaged()


def test(run: Run) -> dict[str, float | None]:
    """Evaluate every split that was not used in training. Collective.

    Writes the figures, with the confusion matrix, to the run's folder, and returns the accuracies
    or losses.
    """
    splits = [name for name in run.pack.splits if name not in ("train", "validation")]
    found: dict[str, float | None] = {}
    for split in splits:
        if not run.pack.splits[split].samples or (result := evaluation(run, split)) is None:
            continue
        what = result, run.pack, run.folder / MODEL_FILE, split
        on_root(run.comm, write_evaluation, evaluation_file(run.folder, split), *what)
        if run.task.classes:
            found[f"{split}_accuracy"] = result.accuracy
        else:
            found[f"{split}_loss"] = result.loss
    return found
