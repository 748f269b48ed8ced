"""Rules that hold for single values and pairs of values, without a model, files or a world size."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_rl.config.derive import MAX_WORLD
from megatron_rl.config.load import flatten
from megatron_rl.config.placement import PLACEMENTS
from megatron_rl.config.schema import RunConfig
from megatron_rl.config.source import describe
from megatron_rl.errors import UserError, nearest

CHOICES: Mapping[str, tuple[str | None, ...]] = {
    "model.dtype": ("bfloat16", "float32"),
    "model.attention": (None, "transformer_engine", "torch"),
    "actor.optimizer.decay": ("constant", "linear", "cosine"),
    "sft.optimizer.decay": ("constant", "linear", "cosine"),
    "preference.optimizer.decay": ("constant", "linear", "cosine"),
    "preference.loss": ("sigmoid", "robust", "hinge", "ipo", "simpo"),
    "critic.optimizer.decay": ("constant", "linear", "cosine"),
    "actor.recompute": ("none", "selective", "full"),
    "critic.recompute": ("none", "selective", "full"),
    "placement": PLACEMENTS,
    "rollout.engine": ("vllm", "torch"),
    "hybrid_engine.verify": ("full", "sampled", "off"),
    "data.over_long": ("drop", "error"),
}


@dataclass(frozen=True)
class Range:
    """Bound a number: ``low`` and ``high`` are included unless ``open_low`` / ``open_high``."""

    low: float | None = None
    high: float | None = None
    open_low: bool = False
    open_high: bool = False
    fix: str = ""

    def holds(self, value: float) -> bool:
        """Return whether the value lies inside."""
        if self.low is not None and (value < self.low or (self.open_low and value == self.low)):
            return False
        return self.high is None or not (value > self.high or (self.open_high and value == self.high))

    def words(self) -> str:
        """Return the range in words."""
        low = high = ""
        if self.low is not None:
            low = f"more than {self.low:g}" if self.open_low else f"{self.low:g} or more"
        if self.high is not None:
            high = f"less than {self.high:g}" if self.open_high else f"at most {self.high:g}"
        return " and ".join(filter(None, [low, high]))


_SIZE = Range(1, MAX_WORLD, fix="1 switches it off")
_COUNT = Range(1)
_POSITIVE = Range(0, open_low=True)
_NOT_NEGATIVE = Range(0)

_LAYOUT = {
    name: _SIZE for name in ("tensor", "pipeline", "virtual_pipeline", "context", "expert", "expert_tensor")
}
_OPTIMIZER = {
    "learning_rate": Range(
        0, 1, open_low=True, fix="1e-6 is a usual start for RL, 1e-5 for supervised training"
    ),
    "minimum_learning_rate": _NOT_NEGATIVE,
    "warmup_steps": _NOT_NEGATIVE,
    "weight_decay": _NOT_NEGATIVE,
    "beta1": Range(0, 1, open_high=True, fix="0.9 is usual"),
    "beta2": Range(0, 1, open_high=True, fix="0.999 is usual"),
    "epsilon": Range(0, 1, open_low=True, fix="1e-8 is usual"),
    "clip_grad": Range(0, fix="0 switches clipping off"),
}
_NEVER = "a number above `steps` means never"

RANGES: Mapping[str, Range] = {
    **{f"actor.layout.{name}": rule for name, rule in _LAYOUT.items()},
    **{f"reference.layout.{name}": rule for name, rule in _LAYOUT.items()},
    **{f"critic.layout.{name}": rule for name, rule in _LAYOUT.items()},
    **{f"actor.optimizer.{name}": rule for name, rule in _OPTIMIZER.items()},
    **{f"critic.optimizer.{name}": rule for name, rule in _OPTIMIZER.items()},
    **{f"sft.optimizer.{name}": rule for name, rule in _OPTIMIZER.items()},
    **{f"preference.optimizer.{name}": rule for name, rule in _OPTIMIZER.items()},
    "preference.steps": Range(1, fix="remove the preference section for a run without that training"),
    "preference.pairs_per_step": _COUNT,
    "preference.beta": _POSITIVE,
    "preference.label_smoothing": Range(0, 0.5, open_high=True),
    "preference.margin": _NOT_NEGATIVE,
    "preference.sft_coef": _NOT_NEGATIVE,
    "rollout.tensor": _SIZE,
    "rollout.temperature": Range(
        0, open_low=True, fix="sample with 1.0; greedy training samples of one prompt would all be equal"
    ),
    "rollout.top_p": Range(0, 1, open_low=True, fix="1.0 switches top-p off"),
    "rollout.top_k": Range(0, fix="0 switches top-k off"),
    "rollout.max_response_tokens": _COUNT,
    "rollout.oversample": Range(0, 1, fix="0.25 samples a quarter more prompts than a step needs; 0 is off"),
    "rollout.round_tokens": _COUNT,
    "rollout.memory_fraction": Range(0, 1, open_low=True, fix="0.6 leaves room for the trainer"),
    "hybrid_engine.staging_bytes": Range(1 << 16, fix="268435456 (256 MiB) is the default"),
    "mismatch.warn": _POSITIVE,
    "mismatch.stop": _POSITIVE,
    "data.max_prompt_tokens": _COUNT,
    "critic.warmup_steps": _NOT_NEGATIVE,
    "asynchrony.steps_ahead": Range(0, 64, fix="1 is one-step-off-policy, 0 the synchronous order"),
    "asynchrony.max_staleness": Range(0, fix="steps_ahead, and with rollout.partial more"),
    "reward.timeout": _POSITIVE,
    "reward.workers": Range(1, 1024),
    "batch.prompts_per_step": _COUNT,
    "batch.samples_per_prompt": _COUNT,
    "batch.optimizer_steps": _COUNT,
    "batch.epochs": _COUNT,
    "batch.tokens_per_microbatch": _COUNT,
    "evaluation.every": Range(1, fix=_NEVER),
    "evaluation.temperature": Range(0, fix="0 is greedy"),
    "evaluation.samples": _COUNT,
    "evaluation.max_prompts": _COUNT,
    "checkpoint.every": Range(1, fix=_NEVER),
    "checkpoint.keep": _COUNT,
    "sft.steps": Range(1, fix="remove the sft section, or sft=null, for a run without warm-up"),
    "sft.rows_per_step": _COUNT,
    "steps": _COUNT,
    "seed": Range(0, 2**32 - 1),
    "world_size": Range(1, MAX_WORLD),
    "gpus_per_node": Range(1, 1024),
    "gpu_memory_gib": _POSITIVE,
    "network_gigabits_per_gpu": _POSITIVE,
    "rank_timeout": _POSITIVE,
}

MODEL_RANGES: Mapping[str, Range] = {
    **{f"layout.{name}": rule for name, rule in _LAYOUT.items()},
    **{f"training.optimizer.{name}": rule for name, rule in _OPTIMIZER.items()},
    "training.steps": _COUNT,
    "training.pairs_per_step": _COUNT,
}
"""Below reward.models.NAME."""

NOT_EMPTY = (
    "model.path",
    "critic.path",
    "reference.path",
    "data.train",
    "data.eval",
    "data.prompt_field",
    "data.ground_truth_field",
    "data.task_field",
    "reward.function",
    "algorithm.name",
    "checkpoint.resume",
    "sft.data",
    "sft.response_field",
    "preference.data",
    "preference.chosen_field",
    "preference.rejected_field",
    "run_dir",
    "gpu",
)

_PROFILE = {
    "temperature": (Range(0, open_low=True), (int, float)),
    "top_p": (RANGES["rollout.top_p"], (int, float)),
    "top_k": (RANGES["rollout.top_k"], (int,)),
    "max_response_tokens": (RANGES["rollout.max_response_tokens"], (int,)),
}


def check_values(config: RunConfig) -> list[UserError]:
    """Return what is wrong with single values and with pairs of values."""
    errors: list[UserError] = []
    values = flatten(config)
    for path, options in CHOICES.items():
        if path in values and values[path] not in options:
            errors.append(_choice_error(path, values[path], options))
    ranges = dict(RANGES)
    for name in config.reward.models:
        ranges |= {f"reward.models.{name}.{value}": rule for value, rule in MODEL_RANGES.items()}
    for path, rule in ranges.items():
        value = values.get(path)
        if value is not None and not rule.holds(value):
            errors.append(_range_error(path, value, rule))
    for path in NOT_EMPTY:
        if values.get(path) is not None and not str(values.get(path)).strip():
            errors.append(
                UserError(f"`{path}` is empty", where=path, expected="text", got="''", fix="give a value")
            )
    errors.extend(_profiles(config))
    errors.extend(_reward_models(config))
    errors.extend(_pairs(config))
    return errors


def _choice_error(path: str, value: Any, options: tuple[str | None, ...]) -> UserError:
    names = [option for option in options if option is not None]
    aliases = {"bf16": "bfloat16", "fp32": "float32", "float": "float32", "te": "transformer_engine"}
    close = aliases.get(str(value).lower()) or nearest(str(value).lower(), names)
    if close not in names:
        close = None
    note = "; float16 is not offered: it needs loss scaling, bfloat16 does not" if value == "float16" else ""
    return UserError(
        f"`{path}` is {value!r}, which is not a choice" + (f"; did you mean {close!r}?" if close else ""),
        where=path,
        expected=f"one of {', '.join(names)}",
        got=describe(value),
        fix=f"write {path}={close or names[0]}{note}",
    )


def _range_error(path: str, value: Any, rule: Range) -> UserError:
    return UserError(
        f"`{path}` is out of range",
        where=path,
        expected=rule.words(),
        got=f"{value}",
        fix=rule.fix or f"give a value that is {rule.words()}",
    )


def _reward_models(config: RunConfig) -> list[UserError]:
    errors = []
    for name, model in config.reward.models.items():
        where = f"reward.models.{name}"
        if not name.isidentifier() or name == "function":
            errors.append(
                UserError(
                    "the name of a reward model cannot name its metric",
                    where=where,
                    expected="letters, digits and _, and not function: the reward function's own name",
                    got=repr(name),
                    fix="give it another name",
                )
            )
        if model.path is None and model.training is None:
            errors.append(
                UserError(
                    "a reward model is neither given nor trained",
                    where=f"{where}.path",
                    expected="a *ForSequenceClassification checkpoint, or a training section",
                    got="neither",
                    fix=f"set {where}.path, or {where}.training to train one from the starting model",
                )
            )
        if model.path is not None and not model.path.strip():
            errors.append(
                UserError(f"`{where}.path` is empty", f"{where}.path", "text", "''", "give a value")
            )
        decay = model.training and model.training.optimizer.decay
        options = CHOICES["sft.optimizer.decay"]
        if decay is not None and decay not in options:
            errors.append(_choice_error(f"{where}.training.optimizer.decay", decay, options))
    if config.reward.function is None and not config.reward.models:
        errors.append(
            UserError(
                "nothing judges the responses",
                where="reward",
                expected="reward.function, reward.models, or both",
                got="neither",
                fix="for example reward.function=megatron_rl.rewards.arithmetic:exact_match",
            )
        )
    return errors


def _profiles(config: RunConfig) -> list[UserError]:
    errors = []
    for task, profile in config.rollout.sampling_profiles.items():
        for name, value in profile.items():
            path = f"rollout.sampling_profiles.{task}.{name}"
            if name == "stop":
                if not (isinstance(value, list) and all(isinstance(item, str) for item in value)):
                    errors.append(_profile_error(path, "a list of texts", value))
                continue
            if name not in _PROFILE:
                close = nearest(name, _PROFILE)
                errors.append(
                    UserError(
                        f"`{path}` is not a sampling setting"
                        + (f"; did you mean `{close}`?" if close else ""),
                        where=path,
                        expected=f"one of {', '.join(_PROFILE)}, stop",
                        got=f"`{name}`",
                        fix=f"write `{close}`" if close else "remove it",
                    )
                )
                continue
            rule, kinds = _PROFILE[name]
            if isinstance(value, bool) or not isinstance(value, kinds) or not rule.holds(value):
                kind = "an integer" if kinds == (int,) else "a number"
                errors.append(_profile_error(path, f"{kind}, {rule.words()}", value))
    return errors


def _profile_error(path: str, expected: str, value: Any) -> UserError:
    return UserError(
        f"`{path}` is out of range",
        where=path,
        expected=expected,
        got=describe(value),
        fix="correct it, or remove it to have the value of the rollout section",
    )


def _pairs(config: RunConfig) -> list[UserError]:
    rules: list[tuple[bool, Callable[[], UserError]]] = []
    for path, optimizer, steps in (
        ("actor.optimizer", config.actor.optimizer, None),
        ("critic.optimizer", config.critic and config.critic.optimizer, None),
        *(
            (f"{name}.optimizer", section.optimizer, section.steps)
            for name, section in (("sft", config.sft), ("preference", config.preference))
            if section is not None
        ),
    ):
        if optimizer is None:
            continue
        minimum, rate = optimizer.minimum_learning_rate, optimizer.learning_rate
        if minimum is not None and minimum > rate:
            rules.append((True, lambda path=path, a=minimum, b=rate: _minimum_error(path, a, b)))
        total = steps or config.steps * config.batch.optimizer_steps * config.batch.epochs
        if optimizer.warmup_steps > total > 0:
            rules.append(
                (True, lambda path=path, a=optimizer.warmup_steps, b=total: _warmup_error(path, a, b))
            )
    warn, stop = config.mismatch.warn, config.mismatch.stop
    rules.append((warn is not None and stop is not None and stop < warn, lambda: _mismatch_error(warn, stop)))
    batch = config.batch
    rules.append((0 < batch.prompts_per_step < batch.optimizer_steps, lambda: _optimizer_steps_error(config)))
    names = [config.data.prompt_field, config.data.ground_truth_field]
    rules.append((len(set(names)) < len(names), lambda: _same_field_error(names[0])))
    return [make() for wrong, make in rules if wrong]


def _minimum_error(path: str, minimum: float, rate: float) -> UserError:
    return UserError(
        "the learning rate would end above where it starts",
        where=f"{path}.minimum_learning_rate",
        expected=f"at most learning_rate ({rate:g})",
        got=f"{minimum:g}",
        fix="lower minimum_learning_rate, or raise learning_rate",
    )


def _warmup_error(path: str, warmup: int, total: int) -> UserError:
    return UserError(
        "the learning rate would still be warming up when the run ends",
        where=f"{path}.warmup_steps",
        expected=f"at most the {total} optimizer steps of the run",
        got=str(warmup),
        fix="lower warmup_steps, or raise steps",
    )


def _mismatch_error(warn: float | None, stop: float | None) -> UserError:
    return UserError(
        "the run would stop before it warns",
        where="mismatch.stop",
        expected=f"at least mismatch.warn ({warn:g})",
        got=f"{stop:g}",
        fix="exchange the two values",
    )


def _optimizer_steps_error(config: RunConfig) -> UserError:
    prompts, steps = config.batch.prompts_per_step, config.batch.optimizer_steps
    return UserError(
        "there are more optimizer steps than prompts to share among them",
        where="batch.optimizer_steps",
        expected=f"at most prompts_per_step ({prompts}): samples of one prompt stay together",
        got=str(steps),
        fix=f"lower batch.optimizer_steps to {prompts} or less, or raise batch.prompts_per_step to {steps}",
    )


def _same_field_error(name: str) -> UserError:
    return UserError(
        "prompt and ground truth are read from the same field",
        where="data.ground_truth_field",
        expected="two different fields",
        got=f"`{name}` for both",
        fix="name the field that holds the answer",
    )
