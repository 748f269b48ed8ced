"""Prediction of a step of a checked configuration: seconds by phase, or the reason why it is impossible."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.algorithms.lookup import algorithm_of
from megatron_rl.check.configuration import CheckReport
from megatron_rl.errors import UserError
from megatron_rl.planning.predict.step import RunStep, predict_run
from megatron_rl.shapes.hardware import load_constants

ASSUMED_GPU = "h100"
"""GPU for predictions if the configuration names no GPU."""


@dataclass(frozen=True)
class CheckedStep:
    """Prediction of one step of a checked configuration.

    Example: ``CheckedStep("H100-80GB", assumed=False, step=step)``, or ``CheckedStep(reason="no shape")``.
    """

    gpu: str | None = None
    """Name of the GPU in constants.json, or None if there is no prediction."""
    assumed: bool = False
    """Whether the GPU is `ASSUMED_GPU` because the configuration names none."""
    response_tokens: float = 0.0
    """Mean tokens of a response that the prediction assumes."""
    step: RunStep | None = None
    """Seconds and FLOPs of the step, or None if there is no prediction."""
    reason: str = ""
    """Reason why there is no prediction, or an empty string."""


def predict_checked(report: CheckReport) -> CheckedStep:
    """Predict a step of a checked configuration on its GPU, or on `ASSUMED_GPU` if it names none."""
    config = report.config
    if report.errors or report.layouts is None:
        return CheckedStep(reason="the configuration has errors")
    if report.batch is None:
        return CheckedStep(reason="the job has no steps of reinforcement learning")
    if report.shape is None:
        return CheckedStep(reason="the model's config.json is not on this machine")
    if not config.rollout.capabilities.in_process:
        return CheckedStep(reason="generation takes as long as the servers need")
    # The constants are rates in half precision; float32 is only used on hosts.
    if config.model.dtype == "float32":
        return CheckedStep(reason="constants are for bfloat16 on GPUs, and model.dtype is float32")

    constants = load_constants()
    try:
        gpu = constants.gpu(config.gpu or ASSUMED_GPU)
    except UserError:
        return CheckedStep(reason=f"the planner has no constants of {config.gpu}")

    # A check for other machines accepts code that cannot be imported on this machine.
    try:
        algorithm_of(config)
    except UserError:
        return CheckedStep(reason="a piece of the algorithm cannot be imported here")

    shapes = {role: report.shapes.get(role, report.shape) for role in report.layouts}
    step = predict_run(config, constants, gpu.name, shapes)
    rows = report.batch.prompts * report.batch.samples
    return CheckedStep(gpu.name, config.gpu is None, step.response_tokens / rows, step)
