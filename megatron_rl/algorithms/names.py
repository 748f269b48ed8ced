"""Named algorithms and the pieces they are made of, by name; importable without torch.

A piece is a name that stands for ``module:function``. To add an algorithm, write the function and an
entry here, or name ``module:function`` in the configuration.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from megatron_rl.algorithms.settings import Algorithm, Piece
from megatron_rl.config.errors import UserError, nearest

AGGREGATIONS = (
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
    "seq-mean-token-mean",
)

_ADVANTAGES = "megatron_rl.algorithms.advantages.pieces"
_POLICY_LOSSES = "megatron_rl.algorithms.policy_losses.pieces"

ADVANTAGES: dict[str, str] = {name: f"{_ADVANTAGES}:{name}" for name in ("grpo", "dr_grpo")}
POLICY_LOSSES: dict[str, str] = {name: f"{_POLICY_LOSSES}:{name}" for name in ("ppo_clip",)}

ALGORITHMS: dict[str, Algorithm] = {
    algorithm.name: algorithm
    for algorithm in (
        Algorithm("grpo", "Group mean and standard deviation as baseline and scale, PPO clip."),
        Algorithm(
            "dr_grpo",
            "GRPO without the biases of length and of standard deviation.",
            advantage="dr_grpo",
            aggregation="seq-mean-token-sum-norm",
        ),
    )
}


def resolve(piece: Piece, table: dict[str, str]) -> Any:
    """Return the function that ``piece`` stands for: a name in ``table``, ``module:function``, or itself."""
    if callable(piece):
        return piece
    target = table.get(piece, piece)
    module, _, name = target.partition(":")
    if not name:
        close = nearest(piece, table)
        raise UserError(
            f"unknown piece {piece!r}",
            where="algorithm.settings",
            expected=f"one of {', '.join(sorted(table))}, or module:function",
            fix=f"did you mean {close!r}?" if close else None,
        )
    return getattr(import_module(module), name)
