"""Ranks that placements give to roles."""

from __future__ import annotations

import pytest

from megatron_rl.algorithms import get_algorithm
from megatron_rl.config.derive import resolve, smallest_world
from megatron_rl.config.load import dump, load_text
from megatron_rl.config.placement import role_layouts
from megatron_rl.config.roles import layout_path_of, role_of

TEXT = """\
model: {path: m}
data: {train: t}
reward: {function: "a:b", models: {judge: {path: j}, strict: {path: s, layout: {ranks: [1]}}}}
run_dir: r
steps: 1
algorithm: {name: ppo}
actor: {layout: {tensor: 2}}
critic: {}
reference: {}
rollout: {tensor: 2}
"""


@pytest.mark.parametrize(
    ("placement", "first", "second"),
    [
        ("colocate", (), ()),
        ("standalone", ("actor", "critic", "reference", "reward.judge"), ("rollout",)),
        ("split", ("actor", "reference", "rollout"), ("critic", "reward.judge")),
    ],
)
def test_presets_name_the_ranks_of_every_role(placement, first, second):
    config = load_text(TEXT, [f"placement={placement}"]).valid()
    layouts = role_layouts(config, 8)
    assert list(layouts) == ["actor", "critic", "reference", "reward.judge", "reward.strict", "rollout"]
    assert layouts["reward.strict"].ranks == (1,), "named ranks stay"
    for role, layout in layouts.items():
        if role == "reward.strict":
            continue
        expected = range(4) if role in first else range(4, 8) if role in second else range(8)
        assert layout.ranks == tuple(expected), role
        assert layout.tensor == 2, "sizes that are not stated are the actor's"
    resolved = resolve(config, 8, get_algorithm("ppo", {}))
    assert role_layouts(resolved.config, 8) == layouts, "resolving changes no place"
    assert resolved.config.critic.path == "m" and "critic.path" in resolved.reasons
    assert load_text(dump(resolved.config)).valid() == resolved.config


def test_the_smallest_world_of_a_preset_has_two_halves():
    assert smallest_world(load_text(TEXT, ["placement=colocate"]).valid()) == 2
    assert smallest_world(load_text(TEXT, ["placement=split"]).valid()) == 4


def test_an_algorithm_with_a_critic_brings_one():
    config = load_text(TEXT, ["critic=null"]).valid()
    assert resolve(config, 2, get_algorithm("grpo", {})).config.critic is None
    assert resolve(config, 2, get_algorithm("ppo", {})).config.critic.layout.ranks == (0, 1)


@pytest.mark.parametrize("role", ["actor", "critic", "reward.judge", "reward.a_b"])
def test_paths_and_roles_name_each_other(role):
    assert role_of(layout_path_of(role)) == role
