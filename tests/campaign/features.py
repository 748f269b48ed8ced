"""Features that `combinations` draws from, each a change of one tiny run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_rl.algorithms.algorithm import ALGORITHMS
from tests.campaign.judges import ANYWHERE

STEPS = 4
"""Training steps of a run."""
HALF = 2
"""Step after which runs are interrupted and continued."""
ENVIRONMENT = '''
import asyncio

from megatron_rl import Environment, StepEnvironment


class Free(Environment):
    """Environment whose seed determines the number and lengths of its turns, and its waits."""

    async def run(self, episode):
        length = 0
        for turn in range(1 + episode.seed % 3):
            tokens = await episode.generate(limit=3 + turn)
            length += len(tokens)
            await asyncio.sleep(0.01 * (episode.seed % 2))
            if turn < episode.seed % 3:
                episode.observe("2*", "3=")
        return {"reward": length / 10, "turns": 1 + episode.seed % 3}


class Echo(StepEnvironment):
    """Environment of three turns; with ``failing`` every third episode fails."""

    def __init__(self, failing=False):
        self.failing = failing

    def reset(self, episode):
        self.turn, self.seed, self.truth = 0, episode.seed, str(episode.ground_truth)

    def step(self, response):
        if self.failing and self.seed % 3 == 0:
            raise RuntimeError("this one fails")
        self.turn += 1
        return "1+", float(len(set(response) & set(self.truth))), self.turn == 3
'''
REWARDS = """
def group(*, prompt, group, ground_truth, **_):
    return [float(len(set(response) & set(str(ground_truth)))) - len(group) / 10 for response in group]


async def turns(*, prompt, response, turns, tokens, **_):
    return {"reward": len(tokens["response"]) / 10 + len(turns), "length": len(response)}


def length(*, response, **_):
    return len(response)


def parts(*, response, ground_truth, metadata, **_):
    return {"reward": len(response) / 8, "other": len(metadata), "third": len(str(ground_truth))}


def question(*, prompt, response, **_):
    return [{"role": "user", "content": f"{response} to {prompt}?"}]


def verdict(*, judgement, **_):
    return float(judgement[-1]) if judgement[-1].isdigit() else None


def failing(*, prompt, response, **_):
    if len(response) % 4 == 1:
        raise ValueError("cannot judge this")
    return float(len(set(response)))
"""

# Sections that several of the variants below contain.
_OPTIMIZER = {"learning_rate": 1e-3}
_STAGE = {"checkpoint_every": 2, "optimizer": _OPTIMIZER}
_SFT = {"data": "sft.jsonl", "steps": 3, "rows_per_step": 8, **_STAGE}
_PAIRS = {"data": "pairs.jsonl", "steps": 3, "pairs_per_step": 4, **_STAGE}
_PATIENT = {"backoff": 0.01, "retries": 5, "timeout": 60.0}
_HELD_OUT = {"data": "eval.jsonl", "max_prompts": 6}
_JUDGE = {
    "weight": 0.5,
    "training": {
        "data": "pairs.jsonl",
        "steps": 3,
        "pairs_per_step": 4,
        **_STAGE,
    },
}
BASE: dict[str, Any] = {
    "steps": STEPS,
    "model": {"dtype": "float32"},
    "data": {"train": "train.jsonl", "max_prompt_tokens": 8},
    "reward": {
        "function": "rewards.py:turns",
        "timeout": 120.0,
        "max_invalid_fraction": 1.0,
    },
    "batch": {"prompts_per_step": 4, "samples_per_prompt": 2},
    "actor": {"optimizer": _OPTIMIZER},
    "rollout": {"engine": "torch", "max_response_tokens": 8},
    "checkpoint": {"every": 1, "keep": STEPS},
    "mismatch": {"warn": 0.5, "stop": 5.0},
}


def _algorithm_variants(kind: str, *values: Any) -> list[dict[str, Any]]:
    """Return one variant per value of an algorithm's setting ``kind``."""
    return [{"algorithm": {kind: value}} for value in values]


FEATURES: Mapping[str, Sequence[Mapping[str, Any]]] = {
    # Every algorithm with its defaults.
    "algorithm": [{"algorithm": {"name": name}} for name in sorted(ALGORITHMS)],
    # Estimators of advantages, in place of those of the algorithm.
    "advantage": _algorithm_variants(
        "advantage", "grpo", "rloo", "opo", "gpg", "remax", "gae", {"whiten": True, "clip": 3.0}
    ),
    # Policy losses, and terms that are added to one.
    "policy loss": _algorithm_variants(
        "policy_loss",
        "cispo",
        "clip_cov",
        "dppo",
        "gmpo",
        "gspo",
        "kl_cov",
        "policy_gradient",
        "sapo",
        "topr",
        {"entropy_coef": 0.01},
        {"opsm_delta": 0.01},
    ),
    # How the losses of tokens are averaged.
    "aggregation": _algorithm_variants(
        "aggregation",
        "token-mean",
        "token-sum",
        "seq-mean-token-sum",
        "seq-mean-token-sum-norm",
        {"name": "seq-mean-token-mean", "denominator": "all"},
    ),
    # KL penalties in the loss or in the reward, with fixed and adaptive coefficients.
    "kl": _algorithm_variants(
        "kl",
        "none",
        {"name": "loss", "coef": 0.1, "estimator": "k2"},
        {"name": "loss", "coef": 0.1, "controller": "adaptive", "horizon": 50.0},
        {"name": "reward", "coef": 0.05, "controller": "adaptive", "horizon": 50.0},
        {"name": "reward", "coef": 0.1},
    ),
    # Corrections of the difference between the engine and the trainer.
    "correction": _algorithm_variants(
        "correction",
        "token_tis",
        "sequence_tis",
        "icepop",
        "mis",
        "geometric_token_tis",
        {"level": "token", "batch_normalize": True},
        {"level": "token", "bypass": True},
    ),
    # Normalised and clipped rewards.
    "reward shaping": _algorithm_variants(
        "reward_shaping", {"normalize": "running", "clip_high": 2.0}, {"normalize": "batch", "smoothing": 0.2}
    ),
    # Penalties of long responses, with buffers shorter than the tiny responses.
    "overlong": _algorithm_variants(
        "overlong", {"buffer": 3}, {"buffer": 2, "penalty": 0.5}, {"buffer": 3, "limit": 6}
    ),
    "imitation": _algorithm_variants("imitation", {"coef": 0.1, "threshold": 0.5}),
    # Groups with equal rewards are sampled again.
    "dynamic sampling": _algorithm_variants("dynamic_sampling", {"name": "refill", "max_rounds": 3}),
    # A critic beside algorithms with and without a value function.
    "critic": [
        {"critic": {"optimizer": _OPTIMIZER}},
        {"critic": {"optimizer": _OPTIMIZER, "warmup_steps": 1, "offload": True}},
    ],
    # Reward functions, trained reward models and programs, alone and together.
    "reward": [
        {"reward": {"function": "rewards.py:group"}},
        {"reward": {"function": "rewards.py:failing"}},
        {"reward": {"models": {"judge": _JUDGE}}},
        {"reward": {"models": {"judge": {**_JUDGE, "layout": {"tensor": 2}, "offload": True}}}},
        {"reward": {"models": {"judge": _JUDGE, "other": {**_JUDGE, "layout": {"pipeline": 2}}}}},
        {"reward": {"workers": 2, "concurrency": 2}},
        {"reward": {"function": "rewards.py:parts", "weight": 0.5}, "algorithm": {"name": "gdpo"}},
        {"reward": {"code": {"scoring": "share", "workers": 2}}, "data": {"train": "programs/train.jsonl"}},
        {
            "reward": {"function": None, "code": {"scoring": "share", "weight": 2.0}},
            "data": {"train": "programs/train.jsonl"},
        },
    ],
    # Reward servers and judges that are slow, fail or return unusual results.
    "servers": [
        {"reward": {"http": {"url": f"{ANYWHERE}/plain", **_PATIENT}}},
        {"reward": {"function": None, "http": {"url": f"{ANYWHERE}/named", "samples_per_request": 3}}},
        {"reward": {"http": {"url": f"{ANYWHERE}/flaky", "concurrency": 2, "weight": 0.5, **_PATIENT}}},
        {
            "reward": {
                "http": {
                    "url": f"{ANYWHERE}/failing",
                    "sends": ["response", "turns", "tokens"],
                    "rate": 500.0,
                }
            }
        },
        {"reward": {"function": None, "judge": {"url": ANYWHERE, "model": "any", **_PATIENT}}},
        {
            "reward": {
                "judge": {
                    "url": f"{ANYWHERE}/flaky",
                    "model": "any",
                    "cache": 0,
                    "weight": 0.5,
                    **_PATIENT,
                    "template": "rewards.py:question",
                    "parser": "rewards.py:verdict",
                    "temperature": 0.5,
                }
            }
        },
    ],
    # Several optimizer steps and epochs per batch.
    "updates": [
        {"batch": {"optimizer_steps": 2}},
        {"batch": {"epochs": 2}},
        {"batch": {"optimizer_steps": 2, "epochs": 2, "tokens_per_microbatch": 32}},
        {"batch": {"samples_per_prompt": 3, "prompts_per_step": 6}},
    ],
    # Optimizers whose state is sharded, replicated or offloaded.
    "optimizer": [
        {"actor": {"optimizer": change}}
        for change in (
            {"name": "sgd", "distributed": False},
            {"distributed": False},
            {"offload": True},
            {"clip_grad": 0.0},
            {"clip_grad": 0.01},
            {"offload": True, "warmup_steps": 2},
            {"decay": "cosine", "warmup_steps": 1, "minimum_learning_rate": 1e-5},
            {"weight_decay": 0.5, "beta1": 0.5, "beta2": 0.9, "decay": "linear"},
        )
    ],
    # Recomputation, offloading and overlapped communication.
    "training": [
        {"actor": change}
        for change in (
            {"recompute": "full"},
            {"recompute": "selective"},
            {"offload": True},
            {"ddp": {"overlap_grad_reduce": True}},
            {"ddp": {"overlap_grad_reduce": True, "overlap_param_gather": True}},
            {"ddp": {"overlap_grad_reduce": True, "bucket_size": 5000}},
            {"ddp": {"overlap_grad_reduce": True}, "optimizer": {"distributed": False}},
            {"recompute": "full", "offload": True},
            {"layout": {"sequence_parallel": False}},
        )
    ],
    # LoRA, synchronised separately or merged.
    "adapters": [
        {"actor": {"lora": {"rank": 4, "sync": "adapter"}}, "rollout": {"engine": "vllm"}},
        {"actor": {"lora": {"rank": 4, "alpha": 8}}},
        {"actor": {"lora": {"rank": 4}}, "critic": {"lora": {"rank": 2}}},
        {"actor": {"lora": {"rank": 2, "dropout": 0.3, "targets": ["linear_qkv", "linear_proj"]}}},
        {"actor": {"lora": {"rank": 4, "sync": "adapter"}, "offload": True}, "rollout": {"engine": "vllm"}},
    ],
    # Sampling parameters whose log-probs need supports or temperatures.
    "sampling": [
        {"rollout": {"temperature": 0.7, "top_p": 0.9}},
        {"rollout": {"top_k": 5}},
        {"rollout": {"min_p": 0.02, "stop": ["="]}},
        {"rollout": {"max_in_flight": 3}},
        {"rollout": {"sampling_profiles": {"addition": {"temperature": 0.5, "max_response_tokens": 4}}}},
        {"rollout": {"sampling_profiles": {"addition": {"top_k": 4, "top_p": 0.8, "min_p": 0.01}}}},
        {"rollout": {"top_k": 6, "top_p": 0.7, "min_p": 0.05, "temperature": 1.3, "stop": ["=", "+"]}},
        {"rollout": {"max_response_tokens": 1}},
    ],
    # Sequences that continue over the end of a step.
    "order": [
        {"rollout": {"oversample": 0.5, "round_tokens": 3, "max_response_tokens": 12}},
        {"rollout": {"oversample": 0.5, "round_tokens": 3, "partial": True, "max_response_tokens": 12}},
        {"rollout": {"order": "open", "oversample": 0.5, "partial": True}},
        {"rollout": {"order": "open", "on_update": "keep"}, "asynchrony": {"max_staleness": 3}},
    ],
    # Episodes of several turns, also with failures.
    "environment": [
        {"rollout": {"max_response_tokens": 24, "environment": {"name": "environment.py:Echo", **change}}}
        for change in (
            {},
            {"max_turns": 2},
            {"workers": 2},
            {"settings": {"failing": True}},
            {"name": "environment.py:Free"},
            {"name": "environment.py:Free", "workers": 2, "max_turns": 2},
        )
    ],
    # vLLM with settings that change its batches. The default is drawn twice as often.
    "engine": [
        {"rollout": {"engine": "vllm", **change}}
        for change in (
            {},
            {},
            {"tensor": 1},
            {"tensor": 2},
            {"vllm": {"max_num_seqs": 2}},
            {"vllm": {"async_scheduling": True}},
            {"vllm": {"enable_prefix_caching": True}},
            {"vllm": {"max_num_batched_tokens": 64, "enable_chunked_prefill": True}},
            {"vllm": {"block_size": 32}},
            {"vllm": {"scheduling_policy": "priority"}},
        )
    ],
    # A reference model with a layout of its own.
    "reference": [
        {"reference": change}
        for change in (
            {"offload": True},
            {"layout": {"tensor": 2}},
            {"layout": {"pipeline": 2}, "offload": True},
            {"layout": {"context": 2}},
        )
    ],
    # Every form of a data set.
    "data": [
        {"data": {"shuffle": False}},
        {"data": {"max_prompt_tokens": 7, "over_long": "error"}},
        {"seed": 12345},
        {"data": {"train": "parquet/train.parquet"}},
        {"data": {"train": "saved/train.saved"}},
        {"data": {"train": "chats/train.jsonl", "max_prompt_tokens": 16}},
        {"data": {"train": "chats/train.jsonl", "max_prompt_tokens": 10}},
        {"data": {"train": "tools/train.parquet", "max_prompt_tokens": 12, "tools_field": "tools"}},
        {"data": {"chat_template": True, "max_prompt_tokens": 10}},
        {
            "data": {
                "train": "nested/train.jsonl",
                "prompt_field": "problem.text",
                "task_field": "extra.kind",
                "ground_truth_field": "problem.truth",
            }
        },
    ],
    # Roles on different ranks, and steps that overlap.
    "apart": [
        {"placement": "split"},
        {"placement": "standalone"},
        {"placement": "standalone", "asynchrony": {"steps_ahead": 1}},
        {"placement": "standalone", "asynchrony": {"steps_ahead": 2}},
        {"reference": {"layout": {"ranks": [0]}}},
    ],
    # Evaluation sets with their own sampling, and checkpoints that are selected by their metrics.
    "evaluation": [
        {"evaluation": {"every": 2, "sets": {"held_out": _HELD_OUT}}},
        {
            "evaluation": {
                "every": 1,
                "sets": {"held_out": {**_HELD_OUT, "samples": 2, "temperature": 1.0}},
            },
            "checkpoint": {"best": "eval/held_out/reward", "keep": 1},
        },
        {
            "evaluation": {
                "every": 1,
                "at_start": False,
                "patience": 2,
                "sets": {"held_out": {**_HELD_OUT, "evaluators": {"length": "rewards.py:length"}}},
            },
            "checkpoint": {"best": "eval/held_out/length", "best_is": "lowest", "keep_best": 2},
        },
        {
            "evaluation": {
                "every": 3,
                "sets": {
                    "held_out": {**_HELD_OUT, "reward": "rewards.py:parts"},
                    "other": {**_HELD_OUT, "every": 1, "samples": 4, "temperature": 0.8, "top_p": 0.9},
                    "third": "eval.jsonl",
                },
            },
            "checkpoint": {"best": "eval/other/pass_at_2", "keep_best": 2, "every": 3},
        },
    ],
    # Formats of checkpoints, written in the foreground or in the background.
    "checkpoint": [
        {"checkpoint": {"asynchronous": True}},
        {"checkpoint": {"optimizer_layout": "same"}},
        {"checkpoint": {"optimizer_layout": "same", "asynchronous": True, "keep": 1}},
        {"checkpoint": {"megatron": "taken"}},
        {"checkpoint": {"megatron": "taken", "keep": 1}},
        {"checkpoint": {"export": False}},
        {"checkpoint": {"every": 2, "asynchronous": True, "megatron": "taken"}},
    ],
    # Stages before the training, alone and one after another.
    "stages": [
        {"sft": _SFT},
        {"preference": {"data": "pairs.jsonl", "steps": 3, "pairs_per_step": 4, **_STAGE}},
        {"preference": {"data": "pairs.jsonl", "steps": 2, "pairs_per_step": 4, "loss": "simpo", **_STAGE}},
        {"sft": {**_SFT, "held_out": "sft_eval.jsonl", "evaluate_every": 1, "until_loss": 6.0}},
        {"sft": _SFT, "preference": {"data": "pairs.jsonl", "epochs": 0.005, "loss": "ipo", **_STAGE}},
        {"sft": {**_SFT, "turns": "last"}},
        {"sft": {"data": "sft.jsonl", "epochs": 0.002, "rows_per_step": 12, "max_row_tokens": 24, **_STAGE}},
        {
            "preference": {
                **_PAIRS,
                "held_out": "pairs.jsonl",
                "loss": "robust",
                "label_smoothing": 0.1,
                "sft_coef": 0.2,
            }
        },
        {"preference": {**_PAIRS, "loss": "hinge", "beta": 0.5}, "sft": {**_SFT, "turns": "last"}},
    ],
    "type": [
        {"model": {"dtype": "bfloat16"}},
        {"model": {"dtype": "bfloat16"}, "rollout": {"engine": "vllm", "float32_head": False}},
    ],
    "values": [
        {"algorithm": {"value_loss": {"clip": None, "coef": 0.5}}, "critic": {"optimizer": _OPTIMIZER}},
        {"algorithm": {"value_aggregation": "seq-mean-token-mean"}, "critic": {"optimizer": _OPTIMIZER}},
        {
            "algorithm": {"value_aggregation": {"name": "token-mean", "denominator": "all"}},
            "critic": {"optimizer": {"name": "sgd", "learning_rate": 1e-2, "distributed": False}},
        },
    ],
    # Settings of Megatron-Core that the configuration passes through.
    "megatron": [
        {"actor": {"megatron": {"attention_softmax_in_fp32": True}}},
        {"actor": {"megatron": {"bias_dropout_fusion": True}}},
        {"actor": {"optimizer": {"megatron": {"adam_eps": 1e-5}}}},
        {"critic": {"optimizer": _OPTIMIZER, "megatron": {"attention_softmax_in_fp32": True}}},
        {"actor": {"megatron": {"attention_dropout": 0.2, "hidden_dropout": 0.1}}},
        {"actor": {"recompute": "full", "megatron": {"recompute_method": "block"}}},
        {"actor": {"megatron": {"moe_router_dtype": "fp32", "moe_token_dispatcher_type": "alltoall"}}},
        {"actor": {"megatron": {"moe_grouped_gemm": True, "moe_input_jitter_eps": 0.01}}},
        {"actor": {"megatron": {"num_layers_in_first_pipeline_stage": 1}}},
        {"actor": {"ddp": {"grad_reduce_in_fp32": True, "check_for_nan_in_grad": True}}},
        {"actor": {"optimizer": {"megatron": {"decoupled_weight_decay": False}}}},
    ],
    # Checks of the weight sync.
    "verification": [
        {"hybrid_engine": {"verify": "sampled", "staging_bytes": 65536}},
        {"hybrid_engine": {"verify": "off"}},
    ],
    # Settings that must not change any result.
    "logging": [
        {"logging": {"trackers": []}},
        {"logging": {"samples": 0, "name": "named", "project": "one"}},
        {"gpu": "h100", "gpu_memory_gib": 80.0},
        {"reward": {"invalid_steps": 1, "max_invalid_fraction": 0.9}},
    ],
    # Settings of models with experts.
    "mixture": [
        {"actor": {"routing_replay": "update"}},
        {"actor": {"routing_replay": "rollout"}},
        {"actor": {"freeze_router": True}},
    ],
}
"""Feature -> its variants. A case has at most one variant of each."""
