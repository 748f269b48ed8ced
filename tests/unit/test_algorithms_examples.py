"""The worked examples in the docstrings are true, and every public function of the maths has one."""

from __future__ import annotations

import doctest
import importlib
import inspect
import pkgutil

import pytest
import torch

import megatron_rl.algorithms

MODULES = [
    info.name for info in pkgutil.walk_packages(megatron_rl.algorithms.__path__, "megatron_rl.algorithms.")
]
# Modules of equations: each public function has a worked example and, where it is published, its source.
EQUATIONS = [
    "advantages.group", "advantages.returns", "aggregation", "correction", "filters", "groups", "kl",
    "mismatch",
    "policy_losses.clipped", "policy_losses.covariance", "policy_losses.sequence", "preference", "ragged",
    "rewards", "value_loss",
]  # fmt: skip
# Thin compositions of functions that have examples.
COMPOSED = {
    "broadcast_rows", "clipped_surrogate", "correct", "count_groups", "dense_groups", "dpo_objective",
    "first_best", "group_range", "group_sums", "reward_model_objective", "scaled", "shape_rewards",
}  # fmt: skip


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    module = importlib.import_module(name)
    result = doctest.testmod(module, extraglobs={"torch": torch})
    assert result.failed == 0


@pytest.mark.parametrize("name", EQUATIONS)
def test_every_equation_has_a_worked_example(name):
    module = importlib.import_module(f"megatron_rl.algorithms.{name}")
    functions = {
        key: value
        for key, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and not key.startswith("_")
    }
    assert functions
    lacking = [
        key for key, value in functions.items() if key not in COMPOSED and ">>>" not in (value.__doc__ or "")
    ]
    assert lacking == []


@pytest.mark.parametrize(
    "name",
    ["advantages.group", "policy_losses.clipped", "policy_losses.covariance", "policy_losses.sequence"],
)
def test_every_estimator_and_loss_names_its_source(name):
    module = importlib.import_module(f"megatron_rl.algorithms.{name}")
    for key, value in vars(module).items():
        if inspect.isfunction(value) and value.__module__ == module.__name__ and not key.startswith("_"):
            assert "Source:" in (value.__doc__ or "") or key in COMPOSED, key
