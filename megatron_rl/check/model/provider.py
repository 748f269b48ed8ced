"""The user's own model code: where it lies, what it is called with, and whether a run can train its model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from megatron_rl.check.rewards.function import Called, check_function
from megatron_rl.config.sections.models import ModelConfig
from megatron_rl.errors import UserError
from megatron_rl.interop.megatron_lm.arguments import arguments_of
from megatron_rl.shapes.pretrained import PretrainedModel

ARGUMENTS = ("pre_process", "post_process", "vp_stage", "config", "pg_collection", "args")
"""What a provider is given of where it names them; the first two it must take."""


def provider_errors(settings: ModelConfig, model: PretrainedModel | None) -> Iterator[UserError]:
    """Yield what is wrong with `model.provider` and `model.weights`.

    ``model`` is what config.json describes, None where it is not known.
    """
    if settings.provider is None:
        if settings.weights is not None:
            yield UserError(
                "names of parameters are given, but no model provider",
                where="model.weights",
                expected="model.provider beside it",
                got=settings.weights,
                fix="set model.provider, or remove model.weights",
            )
        return
    stages, further = ARGUMENTS[:2], ARGUMENTS[2:]
    yield from check_function(Called(settings.provider, "model.provider", (), False, stages, further, False))
    if settings.weights is not None:
        yield from check_function(Called(settings.weights, "model.weights", (), False, (), (), False))
    try:
        if model is not None:
            arguments_of(model)
    except UserError as error:
        fix = "remove model.provider: Megatron's own GPTModel is built"
        yield replace(error, where="model.provider", fix=fix)
