"""Compare the log-probs of trainer, vLLM and transformers for the same sampled responses to chat prompts.

    OMP_NUM_THREADS=2 torchrun --nproc-per-node 1 launch/examples/smollm2/agree.py CONFIG [KEY=VALUE …]

vLLM samples with the trainer's weights; the trainer and transformers compute the log-probs of its tokens.
The script prints the mean and the largest absolute difference per token of each pair, in model.dtype, and of
each with transformers in float32.
"""

from __future__ import annotations

import sys
from itertools import combinations

import torch
from transformers import AutoModelForCausalLM

from megatron_rl.algorithms import algorithm_of
from megatron_rl.check.configuration import check_config
from megatron_rl.config.load import load
from megatron_rl.data.sources import load_prompts
from megatron_rl.data.tokenizing import load_tokenizer
from megatron_rl.distributed.exchange import ReplicaGroup
from megatron_rl.roles.build import build_roles
from megatron_rl.trainer.job import open_job
from megatron_rl.trainer.sample import (
    PendingRound,
    gather_complete_round,
    make_complete_round,
)
from megatron_rl.types import Rollouts, split_rows

PROMPTS = 16


@torch.no_grad()
def transformers_log_probs(path: str, dtype: str, rollouts: Rollouts) -> torch.Tensor:
    """Return transformers' log-probs [N] of every token but the first of each row, one row at a time."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype))
    log_probs = []
    # One row at a time needs no padding, which would change the sums.
    for row in split_rows(rollouts.tokens, rollouts.lengths):
        log_p = model(row[None]).logits[0, :-1].float().log_softmax(-1)
        log_probs.append(torch.cat((torch.zeros(1), log_p.gather(1, row[1:, None])[:, 0])))
    return torch.cat(log_probs)


def main(path: str, overrides: list[str]) -> None:
    """Sample with vLLM, compute log-probs with trainer and transformers, and print the differences."""
    config = check_config(load(path, overrides), 1).valid()
    with open_job(config) as current:
        tokenizer = load_tokenizer(config.model.path)
        source = load_prompts(
            config,
            "data.train",
            config.data.train or "",
            tokenizer,
            current.token_files,
        )
        prompts = source.next_batch(PROMPTS)

        # The ranks meet once the data is known to be readable.
        current.join_ranks()
        roles = build_roles(config, algorithm_of(config), tokenizer)

        with roles.hybrid_engine.generation_mode():
            generation_round = make_complete_round(prompts, 1, config.seed, roles.hybrid_engine.version)
            rollouts = gather_complete_round(
                roles.rollout,
                PendingRound(generation_round, roles.rollout.infer(generation_round)),
                ReplicaGroup(),
            )

        # The trainer returns the rows of this rank's shard; gathering completes the batch.
        shard = roles.actor.infer(rollouts)
        trainer = ReplicaGroup().gather_rows(shard).tokens["old_log_probs"]
        response_mask = rollouts.response_mask
        log_probs = {"trainer": trainer, "vllm": rollouts.rollout_log_probs}
        for dtype in dict.fromkeys((config.model.dtype, "float32")):
            log_probs[f"transformers {dtype}"] = transformers_log_probs(config.model.path, dtype, rollouts)

        for first, second in combinations(log_probs, 2):
            difference = (log_probs[first] - log_probs[second])[response_mask].abs()
            current.print(
                f"{config.model.dtype}  {first} - {second}: mean {difference.mean():.2e}, "
                f"largest {difference.max():.2e} over {len(difference)} tokens"
            )
        roles.close()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
