"""Comparison of the rollout engine with the trainer at the start of a run, before its first step.

An engine starts with random weights, and the first weight sync writes the real ones. Checksums prove that the
weights have arrived, but not that the engine computes with them: some layers compute with a packed or derived
copy of their weights, which must be created again after a write. So each replica samples a few tokens after
the first sync, and the trainer computes their log-probs with the weights that it sent.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterable
from itertools import chain
from pathlib import Path

from torch import Tensor

from megatron_rl.config.derive import default_mismatch_thresholds, longest_row
from megatron_rl.config.schema import RunConfig
from megatron_rl.distributed.exchange import ReplicaGroup
from megatron_rl.errors import UserError
from megatron_rl.metrics import Metrics
from megatron_rl.roles.build import Roles
from megatron_rl.rollout.collate import to_prompts, to_rollouts
from megatron_rl.rollout.engines.base import Generator
from megatron_rl.rollout.types import Completion, GenerationRequest, Sequence, SequenceGroup
from megatron_rl.shapes.pretrained import read_pretrained
from megatron_rl.types import Rollouts, SamplingParameters

_PROMPT_TOKENS = 16
"""Maximum number of prompt tokens: more than one to test prefill, less than a block of a prefix cache."""

_RESPONSE_TOKENS = 8
"""Maximum number of tokens of a response: enough decoding steps for layers with a recurrent state."""

_REQUESTS = 2
"""Minimum number of requests to a replica: engines use different kernels for a batch and a single row."""


def check_engine(config: RunConfig, roles: Roles) -> Metrics:
    """Sync the engine, sample a few tokens on each replica and compare their log-probs with the trainer's.

    Prompts are random tokens of the vocabulary, and sampling has temperature 1 and no filters. Raises
    UserError on all ranks if the mean absolute difference is above the larger of `mismatch.stop` and its
    default for the model's dtype. Returns the metrics of the sync. Collective over the world.
    """
    requests = _make_requests(config)
    # The trainer computes with the newest weights, so the engine must have them.
    with roles.hybrid_engine.generation_mode(newest=True) as sync_metrics:
        completions = _sample_requests(roles, requests)

    # One rank per replica has completions to gather; after the gather, every rank has all rows.
    world = ReplicaGroup()
    all_completions = chain.from_iterable(world.gather_objects(completions))
    rollouts = _collate_rollouts(requests, all_completions, roles.hybrid_engine.version)
    if rollouts is None:
        raise UserError(
            "the rollout engine sampled no token in its check at the start of the run",
            where="rollout.engine",
            expected=f"up to {requests[0].limit} tokens for each of {len(requests)} requests to each replica",
            got="no token",
            fix="see the engine's messages above",
        )

    log_probs = world.gather_rows(roles.actor.infer(rollouts)).tokens["old_log_probs"]
    _require_agreement(config, rollouts, log_probs)
    return sync_metrics


def _make_requests(config: RunConfig) -> list[GenerationRequest]:
    """Return requests with random prompts, for the comparison of the engine's log-probs with the trainer's.

    The prompts are the same in every run of a model.
    """
    # At least one request per server: a client sends consecutive requests to different servers.
    request_count = max(_REQUESTS, len(config.rollout.server.urls))
    # Engines reject requests with more tokens than the longest row of the run.
    max_tokens = longest_row(config)
    prompt_tokens = min(_PROMPT_TOKENS, max(1, max_tokens // 2))
    response_tokens = min(_RESPONSE_TOKENS, max_tokens - prompt_tokens)

    vocab_size = read_pretrained(Path(config.model.path) / "config.json").shape.vocab
    generator = random.Random(0)
    sampling = SamplingParameters(max_response_tokens=response_tokens)
    requests = []
    for request_number in range(request_count):
        prompt = [generator.randrange(vocab_size) for _ in range(prompt_tokens)]
        requests.append(
            GenerationRequest(request_number, prompt, sampling, response_tokens, seed=request_number)
        )
    return requests


def _sample_requests(roles: Roles, requests: list[GenerationRequest]) -> list[Completion]:
    """Sample the requests on each replica; return the completions on its first rank, [] on other ranks.

    Collective over the ranks of a replica.
    """
    engine: Generator | None = roles.rollout.engine
    if engine is None:
        return []

    completions: list[Completion] = []
    with engine.sampling():
        for request in requests:
            engine.submit(request)
        while len(completions) < len(requests):
            completions += engine.step()

    is_first = roles.rollout.layout.coordinates(roles.rollout.rank).tensor == 0
    return completions if is_first else []


def _collate_rollouts(
    requests: list[GenerationRequest], completions: Iterable[Completion], version: int
) -> Rollouts | None:
    """Return the completions as a ragged batch, without empty completions; None if all are empty."""
    sequences = []
    for completion in completions:
        # An empty completion means that the request's server was lost. Skip the completion: a run continues
        # without lost servers, so a lost server must not make this check fail.
        if not completion.tokens:
            continue
        request = requests[completion.number]
        sequence = Sequence(array("q", request.tokens), request.sampling, request.seed, version)
        sequence.append_sampled(completion, version)
        sequence.finish_reason = completion.finish_reason
        sequences.append(sequence)

    if not sequences:
        return None
    return to_rollouts([SequenceGroup(to_prompts([]), sequences)])


def _require_agreement(config: RunConfig, rollouts: Rollouts, log_probs: Tensor) -> None:
    """Raise UserError if log-probs of trainer and engine differ by more than rounding can explain."""
    mask = rollouts.response_mask
    difference = (log_probs - rollouts.rollout_log_probs)[mask].abs().double()
    mean_difference = float(difference.mean())

    # Allow at least the default difference: the mean over a few tokens of random prompts has more variance
    # than the mean over a batch, to which `mismatch.stop` normally applies.
    assert config.mismatch.stop is not None
    _, default_stop, _ = default_mismatch_thresholds(config.model.dtype)
    max_difference = max(config.mismatch.stop, default_stop)
    # Not `mean_difference > max_difference`: a NaN must raise, too.
    if mean_difference <= max_difference:
        return
    raise UserError(
        "rollout engine and trainer compute different log-probs from the same weights",
        where="rollout.engine",
        expected=f"a mean difference of at most {max_difference:.0e} nats per token, by mismatch.stop and "
        "model.dtype",
        got=f"mean {mean_difference:.2e} and maximum {float(difference.max()):.2e} over {len(difference)} "
        f"tokens that {config.rollout.engine} sampled after its first weight sync",
        fix="set rollout.engine=torch to compare; remove settings of rollout.vllm that change the numbers; "
        "or file an issue with the model's family: a layer of the engine may compute with a copy of its "
        "weights that the weight sync does not update",
    )
