"""Names, settings and their errors; everything here must work without torch."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest

from megatron_rl import algorithms
from megatron_rl.algorithms import lookup, names
from megatron_rl.algorithms.lookup import get_algorithm, setting_types
from megatron_rl.algorithms.pieces import load, resolve
from megatron_rl.algorithms.problems import _CHOICES, _RANGES, problems
from megatron_rl.algorithms.settings import Algorithm
from megatron_rl.errors import UserError, UserErrors

EXPECTED = {
    "grpo", "dr_grpo", "grpo_leave_one_out", "grpo_pass_at_k", "dapo", "gspo", "cispo", "sapo", "gmpo",
    "dppo", "clip_cov", "kl_cov", "gdpo", "rloo", "opo", "gpg", "topr", "reinforce", "reinforce_pp",
    "reinforce_pp_baseline", "remax", "ppo", "vapo",
}  # fmt: skip

MY_ALGORITHM = Algorithm("mine", "An algorithm of a user's own.", advantage="rloo", clip_ratio_high=0.3)


def test_table_holds_every_algorithm():
    assert set(names.ALGORITHMS) == EXPECTED
    for name, algorithm in names.ALGORITHMS.items():
        assert algorithm.name == name
        assert algorithm.summary.endswith(".") and len(algorithm.summary) < 100
        assert problems(algorithm) == []


@pytest.mark.parametrize("table", [names.ADVANTAGES, names.POLICY_LOSSES])
def test_every_piece_is_there_and_used(table):
    setting = "advantage" if table is names.ADVANTAGES else "policy_loss"
    for name, path in table.items():
        function = resolve(name, table, setting)
        assert callable(function) and function is load(path, "here")
        assert function.__doc__
    assert {getattr(a, setting) for a in names.ALGORITHMS.values()} == set(table)


def test_names_settings_and_checks_need_no_torch():
    code = (
        "import sys\n"
        "from megatron_rl.algorithms import ALGORITHMS, Algorithm, get_algorithm\n"
        "from megatron_rl.algorithms.problems import problems\n"
        "[get_algorithm(name) for name in ALGORITHMS]\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_roles_each_algorithm_needs():
    critic = {name for name, a in names.ALGORITHMS.items() if a.needs_critic}
    reference = {name for name, a in names.ALGORITHMS.items() if a.needs_reference}
    greedy = {name for name, a in names.ALGORITHMS.items() if a.needs_greedy_baseline}
    assert critic == {"ppo", "vapo"}
    assert reference == {"reinforce_pp", "reinforce_pp_baseline"}
    assert greedy == {"remax"}
    assert get_algorithm("grpo", {"kl_in": "loss"}).needs_reference
    assert get_algorithm("grpo", {"advantage": "mine:f", "use_critic": True}).needs_critic


def test_settings_override_fields():
    algorithm = get_algorithm("grpo", {"clip_ratio_high": 1, "rollout_is_band": [0.5, 2], "dual_clip": None})
    assert (algorithm.clip_ratio_high, algorithm.rollout_is_band, algorithm.dual_clip) == (
        1.0,
        (0.5, 2),
        None,
    )
    assert isinstance(algorithm.clip_ratio_high, float)
    assert get_algorithm("grpo", {"rollout_rs": {"token_k1": [0.5, 2.0], "seq_max_k2": 1}}).rollout_rs
    assert "name" not in setting_types() and "summary" not in setting_types()


def test_algorithm_of_the_user_by_module_and_name():
    algorithm = get_algorithm("test_algorithms_lookup:MY_ALGORITHM", {"gamma": 0.9})
    assert (algorithm.advantage, algorithm.clip_ratio_high, algorithm.gamma) == ("rloo", 0.3, 0.9)
    with pytest.raises(UserError, match="is not an Algorithm"):
        get_algorithm("test_algorithms_lookup:EXPECTED")


def test_correction_presets_and_overrides():
    preset = names.resolved_correction(get_algorithm("grpo", {"correction": "mis"}))
    assert (preset.level, preset.threshold, dict(preset.rejection)) == (
        "sequence",
        2.0,
        {"seq_sum_k1": (0.5, 2.0)},
    )
    changed = names.resolved_correction(
        get_algorithm("grpo", {"correction": "mis", "rollout_is": "token", "rollout_is_threshold": 5})
    )
    assert (changed.level, changed.threshold, changed.rejection) == ("token", 5.0, preset.rejection)
    assert not names.resolved_correction(get_algorithm("grpo")).active


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("grop", {}, ["unknown algorithm 'grop'", "algorithm.name", "did you mean 'grpo'?"]),
        ("none.such:thing", {}, ["cannot import module 'none.such'", "PYTHONPATH"]),
        ("grpo", {"clip_ratio_hihg": 0.2}, ["settings.clip_ratio_hihg", "did you mean 'clip_ratio_high'?"]),
        ("grpo", {"zzz": 0.2}, ["unknown setting 'zzz'", "advantage_clip"]),
        ("grpo", {"clip_ratio_high": "wide"}, ["wrong type", "a number", "'wide' (str)"]),
        ("grpo", {"whiten": 1}, ["wrong type", "true or false", "1 (int)"]),
        ("grpo", {"max_response_tokens": 1.5}, ["wrong type", "a whole number or null"]),
        ("grpo", {"rollout_is_band": [1.0]}, ["wrong type", "a list of 2 numbers or null"]),
        ("gdpo", {"component_weights": {"format": "much"}}, ["wrong type", "a mapping"]),
        ("grpo", {"advantage": 3}, ["wrong type", "a string or a function"]),
        ("grpo", {"advantage": "rlooo"}, ["unknown advantage 'rlooo'", "did you mean 'rloo'?"]),
        ("grpo", {"policy_loss": "ppo_clp"}, ["unknown policy_loss", "did you mean 'ppo_clip'?"]),
        ("grpo", {"aggregation": "token_mean"}, ["unknown aggregation", "did you mean 'token-mean'?"]),
        ("grpo", {"correction": "tis"}, ["unknown correction 'tis'", "token_tis"]),
        ("grpo", {"rollout_is": "tokens"}, ["unknown rollout_is", "did you mean 'token'?"]),
        ("grpo", {"rollout_rs": {"seq_max_k1": 2.0}}, ["rollout_rs.seq_max_k1", "did you mean 'seq_max_k"]),
        ("grpo", {"rollout_rs": {"token_k3": [0.1, 0.2]}}, ["bad threshold of token_k3", "a number > 0"]),
        ("grpo", {"rollout_rs": {"token_k1": [2.0, 0.5]}}, ["bad threshold of token_k1", "[low, high]"]),
        ("grpo", {"dual_clip": 1.0}, ["dual_clip is out of range", "> 1"]),
        ("ppo", {"gamma": 1.1}, ["gamma is out of range", ">= 0 and <= 1"]),
        ("grpo", {"kl_controller": "adaptive"}, ["without a KL term", "loss or reward"]),
        ("grpo", {"kl_estimator": "k4"}, ["unknown kl_estimator 'k4'"]),
        ("grpo", {"kl_coef_max": 0.5}, ["this one is fixed", "kl_controller: adaptive"]),
        (
            "grpo",
            {"kl_in": "loss", "kl_controller": "adaptive", "kl_coef": 0.2, "kl_coef_max": 0.1},
            ["starts above its ceiling", "at least kl_coef = 0.2"],
        ),
        ("gdpo", {"kl_in": "reward"}, ["gdpo normalises", "use kl_in: loss"]),
        ("dapo", {"max_response_tokens": 100, "overlong_buffer": 200}, ["at most max_response_tokens = 100"]),
        ("grpo", {"rollout_is_band": [2.0, 0.5]}, ["bad band"]),
        ("grpo", {"reward_clip_low": 1.0, "reward_clip_high": 0.0}, ["reward_clip_low is above"]),
        ("grpo", {"bypass": True, "rollout_is_batch_normalize": True}, ["bypass mode does not see"]),
    ],
)  # fmt: skip
def test_mistakes_are_explained(name, settings, words):
    with pytest.raises(UserError) as caught:
        get_algorithm(name, settings)
    for word in words:
        assert word in str(caught.value)


def test_all_mistakes_come_at_once():
    with pytest.raises(UserErrors) as caught:
        get_algorithm("grpo", {"clip": 1, "gamma": 2.0, "whiten": "yes"})
    assert len(caught.value.errors) == 3


def test_missing_function_names_the_nearest():
    with pytest.raises(UserError, match=r"did you mean 'MY_ALGORITHM'\?"):
        load("test_algorithms_lookup:MY_ALGORITM", "algorithm.name")


def test_checks_name_real_settings():
    fields = {f.name for f in dataclasses.fields(Algorithm)}
    assert set(_CHOICES) <= fields and set(_RANGES) <= fields
    assert lookup.accepts(dict, None) is False


def test_public_names_are_there():
    for name in algorithms.__all__:
        assert getattr(algorithms, name).__name__ == name if name != "ALGORITHMS" else algorithms.ALGORITHMS
    with pytest.raises(AttributeError, match="no attribute 'estimat'"):
        _ = algorithms.estimat
