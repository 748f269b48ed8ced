"""Compare the log-probs that trainer, vLLM and transformers give the same sampled answers to chat prompts.

    OMP_NUM_THREADS=2 torchrun --nproc-per-node 1 launch/examples/smollm2/agree.py CONFIG [KEY=VALUE …]

vLLM samples with the weights that the trainer sent it; the other two score its tokens. Prints the mean
and the largest absolute difference per token of each pair, in the dtype that model.dtype names, and what
transformers in float32 says beside it.
"""

from __future__ import annotations

import sys
from itertools import combinations

import torch
from transformers import AutoModelForCausalLM

from megatron_rl.algorithms import algorithm_of
from megatron_rl.check.configuration import check_config
from megatron_rl.config.load import load
from megatron_rl.data.prompts import load_prompts
from megatron_rl.data.tokenizing import load_tokenizer
from megatron_rl.distributed.exchange import ReplicaGroup
from megatron_rl.roles.build import build_roles
from megatron_rl.trainer.job import job
from megatron_rl.trainer.sample import Pending, complete_round, gather_complete
from megatron_rl.types import Rollouts, split_rows

PROMPTS = 16


@torch.no_grad()
def transformers_log_probs(path: str, dtype: str, rollouts: Rollouts) -> torch.Tensor:
    """Return transformers' log-probs [N] of every token but the first of each row, one row at a time."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype))
    parts = []
    for row in split_rows(rollouts.tokens, rollouts.lengths):
        log_p = model(row[None]).logits[0, :-1].float().log_softmax(-1)
        parts.append(torch.cat((torch.zeros(1), log_p.gather(1, row[1:, None])[:, 0])))
    return torch.cat(parts)


def main(path: str, overrides: list[str]) -> None:
    """Sample, score twice and print the differences."""
    config = check_config(load(path, overrides), 1).valid()
    with job(config) as current:
        tokenizer = load_tokenizer(config.model.path)
        source = load_prompts(config, "data.train", config.data.train or "", tokenizer, current.token_files)
        prompts = source.next(PROMPTS)
        current.join()
        roles = build_roles(config, algorithm_of(config), tokenizer)
        with roles.hybrid_engine.generation_mode():
            generation_round = complete_round(prompts, 1, config.seed, roles.hybrid_engine.version)
            rollouts = gather_complete(
                roles.rollout,
                Pending(generation_round, roles.rollout.infer(generation_round)),
                ReplicaGroup(),
            )
        trainer = ReplicaGroup().gather_rows(roles.actor.infer(rollouts)).tokens["old_log_probs"]
        sampled = rollouts.response_mask
        log_probs = {"trainer": trainer, "vllm": rollouts.rollout_log_probs}
        for dtype in dict.fromkeys((config.model.dtype, "float32")):
            log_probs[f"transformers {dtype}"] = transformers_log_probs(config.model.path, dtype, rollouts)
        for (left, a), (right, b) in combinations(log_probs.items(), 2):
            apart = (a - b)[sampled].abs()
            current.say(
                f"{config.model.dtype}  {left} - {right}: mean {apart.mean():.2e}, largest {apart.max():.2e} "
                f"over {len(apart)} tokens"
            )
        roles.close()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
