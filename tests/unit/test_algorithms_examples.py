"""The worked examples in the docstrings are true, and every public function of the maths has one."""

from __future__ import annotations

import doctest
import importlib
import inspect
import pkgutil

import pytest
import torch
from piece_inputs import advantage_inputs, micro_batch

import megatron_rl.algorithms
from megatron_rl.algorithms.piece import Piece

MODULES = [
    info.name for info in pkgutil.walk_packages(megatron_rl.algorithms.__path__, "megatron_rl.algorithms.")
]
# Modules of equations: each public function has a worked example and, where it is published, its source.
EQUATIONS = [
    "advantages", "aggregation", "correction", "kl", "losses", "preference", "ragged", "rewards",
]  # fmt: skip
# Thin compositions of functions that have examples, and pieces that are tested as a whole.
COMPOSED = {
    "broadcast_rows", "clipped_surrogate", "correct", "count_groups", "renumber_groups", "dpo_objective",
    "mark_first_best", "group_range", "group_sums", "reward_model_objective",
    "Correction", "Gae", "Imitation", "KeepEveryGroup", "Kl", "KlInLoss", "KlInReward", "KlPenalty", "NoKl",
    "NoDistillation",
    "DynamicSampling", "Overlong", "RefillGroups", "RewardShaping", "Vapo", "FunctionAdvantage",
    "FunctionLoss", "validate_token_loss", "fields_of", "log_ratio", "minibatches",
    "broadcast_row_advantages", "with_loss_weights",
}  # fmt: skip
EXAMPLES = {"torch": torch, "advantage_inputs": advantage_inputs, "micro_batch": micro_batch}


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    module = importlib.import_module(name)
    result = doctest.testmod(module, extraglobs=EXAMPLES)
    assert result.failed == 0


def equations(name: str) -> dict[str, object]:
    """Return the public functions of a module, and the pieces that it defines in full."""
    module = importlib.import_module(f"megatron_rl.algorithms.{name}")
    return {
        key: value
        for key, value in vars(module).items()
        if getattr(value, "__module__", None) == module.__name__
        and not key.startswith("_")
        and (
            inspect.isfunction(value)
            or (inspect.isclass(value) and issubclass(value, Piece) and not inspect.isabstract(value))
        )
    }


@pytest.mark.parametrize("name", EQUATIONS)
def test_every_equation_has_a_worked_example(name):
    found = equations(name)
    assert found
    shown = {key for key, value in found.items() if ">>>" in (value.__doc__ or "")}
    lacking = sorted(set(found) - shown - COMPOSED)
    assert lacking == []


@pytest.mark.parametrize("name", ["advantages", "losses"])
def test_every_estimator_and_loss_names_its_source(name):
    for key, value in equations(name).items():
        assert "Source:" in (value.__doc__ or "") or key in COMPOSED, key
