"""Reinforcement learning of language models on Megatron-Core and vLLM.

``from megatron_rl import NAME`` imports the module of that name on first use, so ``import megatron_rl``
itself needs neither torch nor an accelerator.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from megatron_rl.algorithms import Algorithm as Algorithm
    from megatron_rl.algorithms import get_algorithm as get_algorithm
    from megatron_rl.algorithms.losses import PolicyLoss as PolicyLoss
    from megatron_rl.algorithms.losses import TokenLoss as TokenLoss
    from megatron_rl.algorithms.losses import fields_of as fields_of
    from megatron_rl.algorithms.losses import log_ratio as log_ratio
    from megatron_rl.algorithms.objectives import sft_objective as sft_objective
    from megatron_rl.check.configuration import check_config as check_config
    from megatron_rl.config.load import load_config as load_config
    from megatron_rl.config.sampling_profiles import sampling_profile as sampling_profile
    from megatron_rl.config.schema import RunConfig as RunConfig
    from megatron_rl.config.setting import setting as setting
    from megatron_rl.distributed.groups import ParallelGroups as ParallelGroups
    from megatron_rl.environments.agent import AgentEnvironment as AgentEnvironment
    from megatron_rl.environments.environment import Environment as Environment
    from megatron_rl.environments.environment import Episode as Episode
    from megatron_rl.environments.environment import StepEnvironment as StepEnvironment
    from megatron_rl.environments.environment import Truncated as Truncated
    from megatron_rl.hybrid_engine.sync import HybridEngine as HybridEngine
    from megatron_rl.megatron.model import ParallelModel as ParallelModel
    from megatron_rl.megatron.model import build_model as build_model
    from megatron_rl.metrics import Metrics as Metrics
    from megatron_rl.rollout.engines.base import Generator as Generator
    from megatron_rl.rollout.engines.base import Sampler as Sampler
    from megatron_rl.rollout.engines.base import WeightStore as WeightStore
    from megatron_rl.shapes.layout import ParallelLayout as ParallelLayout
    from megatron_rl.trainer.dataflow import Run as Run
    from megatron_rl.trainer.embedded import EmbeddedTrainer as EmbeddedTrainer
    from megatron_rl.types import PromptBatch as PromptBatch
    from megatron_rl.types import Rollouts as Rollouts
    from megatron_rl.types import Scores as Scores
    from megatron_rl.types import TrainBatch as TrainBatch

# Public name -> module that defines it; tests/unit/test_architecture.py compares it with the imports above.
PUBLIC = {
    "AgentEnvironment": "megatron_rl.environments.agent",
    "Algorithm": "megatron_rl.algorithms",
    "EmbeddedTrainer": "megatron_rl.trainer.embedded",
    "Environment": "megatron_rl.environments.environment",
    "Episode": "megatron_rl.environments.environment",
    "Generator": "megatron_rl.rollout.engines.base",
    "HybridEngine": "megatron_rl.hybrid_engine.sync",
    "Metrics": "megatron_rl.metrics",
    "ParallelGroups": "megatron_rl.distributed.groups",
    "ParallelLayout": "megatron_rl.shapes.layout",
    "ParallelModel": "megatron_rl.megatron.model",
    "PolicyLoss": "megatron_rl.algorithms.losses",
    "PromptBatch": "megatron_rl.types",
    "Rollouts": "megatron_rl.types",
    "Run": "megatron_rl.trainer.dataflow",
    "RunConfig": "megatron_rl.config.schema",
    "Sampler": "megatron_rl.rollout.engines.base",
    "Scores": "megatron_rl.types",
    "StepEnvironment": "megatron_rl.environments.environment",
    "TokenLoss": "megatron_rl.algorithms.losses",
    "TrainBatch": "megatron_rl.types",
    "Truncated": "megatron_rl.environments.environment",
    "WeightStore": "megatron_rl.rollout.engines.base",
    "build_model": "megatron_rl.megatron.model",
    "check_config": "megatron_rl.check.configuration",
    "fields_of": "megatron_rl.algorithms.losses",
    "get_algorithm": "megatron_rl.algorithms",
    "load_config": "megatron_rl.config.load",
    "log_ratio": "megatron_rl.algorithms.losses",
    "sampling_profile": "megatron_rl.config.sampling_profiles",
    "setting": "megatron_rl.config.setting",
    "sft_objective": "megatron_rl.algorithms.objectives",
}


def __getattr__(name: str) -> Any:
    """Import a public name on first use."""
    if name not in PUBLIC:
        raise AttributeError(f"module 'megatron_rl' has no attribute {name!r}")
    value = getattr(import_module(PUBLIC[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Return the public names and the names in the module."""
    return sorted({*globals(), *PUBLIC})
