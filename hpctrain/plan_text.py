"""The text of a plan, as `--dry-run` prints it: one line per decision."""

from __future__ import annotations

from hpctrain.plan import Plan
from hpctrain.text import counted, min_to_max

MOST_SHARES = 16  # listed one by one


def describe_plan(plan: Plan) -> list[str]:
    """Return the plan as text, one line per decision."""
    height, width, channels = plan.image_shape
    last = sum(plan.last)
    warmup = f" after {plan.warmup_steps:,} steps" if plan.warmup_steps else ""
    lines = [
        ("task", f"{plan.task}, {width}x{height}x{channels}, {plan.classes} classes"),
        ("model", plan.model),
        *(("input", _listed(values)) for values in plan.scaling),  # mean, std
        ("data", f"{plan.rows:,} training images, pack {plan.pack_uuid}"),
        ("ranks", f"{plan.ranks} on {plan.device}, {plan.threads} CPU threads each"),
        ("shards", _shards(plan)),
        ("order", _order(plan)),
        ("mini-batch", _batch(plan)),
        (
            "steps",
            f"{counted(plan.epochs, 'epoch')} x {plan.steps_per_epoch} = {plan.steps:,};"
            f" last step of an epoch {last} images",
        ),
        ("optimizer", f"{plan.optimizer}, learning rate {plan.learning_rate:g}{warmup}"),
        *([("class weights", _listed(plan.class_weights))] if plan.class_weights else []),
        ("batch norm", plan.batch_norm),
        ("precision", _precision(plan)),
        ("seed", str(plan.seed)),
        ("sums", _sums(plan)),
        ("plan", plan.digest()),
    ]
    return [f"{name:<14} {text}" for name, text in lines]


def describe_shares(plan: Plan) -> str:
    """Return the images of a full global batch per rank; only their range for many ranks."""
    shares = tuple(sum(plan.shares[first:end]) for first, end in plan.runs)
    if len(shares) > MOST_SHARES:
        return f"{min_to_max(shares)} a rank"
    return f"{', '.join(map(str, shares))} by rank"


def _shards(plan: Plan) -> str:
    counts = min_to_max(end - first for first, end in plan.runs)
    sizes = min_to_max(plan.partition.sizes)
    return f"{plan.shards}, partitions of {sizes} images, {counts} on a rank"


def _batch(plan: Plan) -> str:
    shares = min_to_max(plan.shares)
    return f"{plan.batch_size}, shares of {shares} images; {describe_shares(plan)}"


def _order(plan: Plan) -> str:
    chunks = f"; the file has chunks of {plan.chunk_rows:,} images" if plan.chunk_rows else ""
    if plan.shuffle != "blocks":
        alike = ", classes drawn equally often" if plan.balanced_sampling else ""
        return plan.shuffle + alike + chunks
    return f"blocks of {plan.block_rows:,} images, shuffled by {plan.window_blocks:,}{chunks}"


def _precision(plan: Plan) -> str:
    precision = plan.precision.replace("default", "default (TF32 in convolutions)")
    return f"{precision}, {'NHWC' if plan.channels_last else 'NCHW'}"


def _sums(plan: Plan) -> str:
    if plan.deterministic:
        return "tree order, deterministic"
    return "Allreduce" if plan.comm_dtype == "fp32" else f"gradients in {plan.comm_dtype}"


def _listed(values: tuple[float, ...]) -> str:
    shown = values if len(values) <= MOST_SHARES else (min(values), max(values))
    return (", " if shown is values else " to ").join(f"{value:.4g}" for value in shown)
