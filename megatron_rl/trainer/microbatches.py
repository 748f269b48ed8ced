"""Adaptation of the tokens per micro-batch to measured memory use, for `batch.memory_target`."""

from __future__ import annotations

from collections.abc import Mapping

from megatron_rl.config.schema import RunConfig
from megatron_rl.distributed import device
from megatron_rl.errors import UserError
from megatron_rl.megatron.passes import BYTES_PER_TOKEN, RESIDENT_BYTES, SPLIT_PASSES, SPLIT_TOKENS
from megatron_rl.metrics import Metrics
from megatron_rl.roles.build import Roles
from megatron_rl.trainer.job import Job
from megatron_rl.trainer.state import TrainerState

_GIB = 2**30
_MIN_REPORTED_FRACTION = 0.95
"""Fraction of `gpu_memory_gib` that the device must report: the driver reserves some memory."""


class MicroBatchControl:
    """Controller of the number of tokens per micro-batch, which is the same for all roles.

    With `batch.memory_target`, the token budget in the run's state determines the number. Otherwise there is
    no budget, and the number is constant.
    """

    def __init__(self, job: Job, roles: Roles, state: TrainerState) -> None:
        self._job = job
        self._roles = roles
        self._state = state

        budget = state.budget
        if budget is None:
            return
        device_memory = device.read_memory()
        configured_gib = job.config.gpu_memory_gib or 0.0
        job.print(
            f"batch.memory_target: micro-batches of up to {budget.tokens:,} tokens, as `check` estimates"
        )
        if device_memory is None:
            job.print("batch.memory_target: memory is not measured on a CPU, so micro-batches keep this size")
        elif device_memory.total < _MIN_REPORTED_FRACTION * configured_gib * _GIB:
            raise UserError(
                "the GPU has less memory than the configuration states",
                where="gpu_memory_gib",
                expected=f"{configured_gib:g} GiB, of which batch.memory_target is a share",
                got=f"{device_memory.total / _GIB:.1f} GiB on {device.product_name()}",
                fix=f"set gpu_memory_gib={device_memory.total / _GIB:.1f}",
            )

    def resume(self) -> None:
        """Apply the budget that was restored from a checkpoint; print it if it differs from the estimate."""
        budget = self._state.budget
        if budget is not None and budget.tokens != budget.estimate:
            self._job.print(
                f"batch.memory_target: micro-batches of up to {budget.tokens:,} tokens, from the checkpoint"
            )
        self._apply_budget()

    def _apply_budget(self) -> None:
        """Set the tokens per micro-batch of all roles from the budget, if there is one."""
        budget = self._state.budget
        if budget is None:
            return
        for role in self._roles.models:
            role.tokens_per_microbatch = budget.tokens

    def adapt_to_step(self, values: Mapping[str, float]) -> Metrics:
        """Adapt the budget to a step's memory use; print the new budget if it has changed.

        ``values``: the step's metrics, gathered over all ranks, so that all ranks compute the same budget.
        Returns the metric ``memory/tokens_per_microbatch`` of this step.
        """
        announce_split_passes(self._job, values)
        old_budget = self._state.budget
        if old_budget is None:
            return Metrics()

        resident_bytes = values.get(RESIDENT_BYTES)
        bytes_per_token = values.get(BYTES_PER_TOKEN)
        budget = old_budget.after_step(resident_bytes, bytes_per_token, values.get(SPLIT_TOKENS))
        self._state.budget = budget
        self._apply_budget()

        if budget.tokens != old_budget.tokens:
            # Without measurements, only passes that ran out of memory change the budget.
            reason = "passes ran out of memory and were repeated on smaller micro-batches"
            if resident_bytes is not None and bytes_per_token is not None:
                resident_gib = resident_bytes / _GIB
                mib_per_token = bytes_per_token / 2**20
                allowed_gib = budget.allowed / _GIB
                reason = (
                    f"{resident_gib:.1f} GiB and {mib_per_token:.2f} MiB a token are in use, "
                    f"of {allowed_gib:.1f} GiB"
                )
            self._job.print(
                f"step {self._job.phases.step}: batch.memory_target: the next micro-batches have up to "
                f"{budget.tokens:,} tokens, {old_budget.tokens:,} before: {reason}"
            )
        return Metrics.of({"memory/tokens_per_microbatch": old_budget.tokens})


def announce_split_passes(job: Job, values: Mapping[str, float]) -> None:
    """Print how many forward and backward passes of a step were repeated after running out of memory.

    They were repeated on smaller micro-batches. ``values``: the step's metrics, gathered over all ranks.
    """
    split_tokens = values.get(SPLIT_TOKENS)
    if split_tokens is None:
        return
    pass_count = int(values[SPLIT_PASSES])
    passes_text = "1 pass" if pass_count == 1 else f"{pass_count} passes"
    job.print(
        f"step {job.phases.step}: {passes_text} of a role ran out of memory and succeeded in micro-batches "
        f"of up to {int(split_tokens):,} tokens; {_advise_smaller_batches(job.config)}"
    )


def _advise_smaller_batches(config: RunConfig) -> str:
    """Return console text that names the setting for smaller micro-batches."""
    if config.batch.memory_target is not None:
        return "later steps use no larger micro-batches; lower batch.memory_target"
    return "each repetition costs the time of another pass; lower batch.tokens_per_microbatch"
