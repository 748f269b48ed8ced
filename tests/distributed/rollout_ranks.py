"""Ranks of test_rollout.py: compare vLLM engines with the plain engine and with each other."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import request_ranks
import torch
import torch.distributed as dist
from engines import (
    GREEDY,
    MAX_LEN,
    SAMPLED,
    build_engine,
    check_against_transformers,
    check_equal_rollouts,
    check_equal_weights,
    random_prompts,
    response_tokens,
    write_boxes,
    write_weights,
)
from safetensors.torch import load_file

from megatron_rl.distributed import device, exchange
from megatron_rl.errors import UserErrors
from megatron_rl.megatron.model_spec import (
    describe_model,
    read_hf_config,
)
from megatron_rl.rollout.collate import to_rollouts
from megatron_rl.rollout.engines.torch.engine import TorchEngine
from megatron_rl.rollout.engines.vllm.engine import VllmEngine
from megatron_rl.rollout.engines.vllm.setup import create_layout_groups
from megatron_rl.rollout.scheduler import SchedulerOutput
from megatron_rl.rollout.types import SequenceGroup
from megatron_rl.shapes.layout import ParallelLayout
from megatron_rl.shapes.lora import PEFT_PREFIX, make_adapted_model
from megatron_rl.types import (
    FINISH_FAILED,
    FINISH_STOP,
    Rollouts,
    split_rows,
)
from tests.sampling import continue_all, generate, make_prompts, started


def check_family(path: Path, tensor: int) -> None:
    """Check that weights written by boxes are those vLLM loads, and generate as in the plain engine."""
    engine = build_engine(path, tensor)
    write_weights(engine, path)
    engine.finish_update(3)
    loaded_engine = build_engine(path, tensor, load=True)
    check_equal_weights(engine, loaded_engine)
    loaded_engine.close()

    reference = TorchEngine.from_hf(path)
    prompts = make_prompts(random_prompts(6, seed=1), GREEDY)
    rollouts = generate(engine, prompts, seed=1)
    check_equal_rollouts(rollouts, generate(reference, prompts, seed=1))
    assert rollouts.policy_version.tolist() == [3] * 6
    engine.close()


def check_adapters(path: Path, tensor: int) -> None:
    """Check that adapters in vLLM's slots act as if added to the weights, before and after two updates."""
    adapted_model = make_adapted_model(describe_model(read_hf_config(path)), 6, 9.0, None)
    engine = build_engine(path, tensor, adapters=adapted_model)
    assert engine.adapters is not None
    write_weights(engine, path)

    # The reference has no adapters: its weights contain them.
    reference = TorchEngine.from_hf(path)
    base_weights = load_file(path / "model.safetensors")

    prompts = make_prompts(random_prompts(6, seed=1), GREEDY)
    shapes = adapted_model.tensor_shapes()
    generator = torch.Generator().manual_seed(2)
    distinct_responses = set[str]()
    for version in (1, 2, 3):
        # The first version has no adapters yet.
        if version > 1:
            adapters = {name: torch.randn(shapes[name], generator=generator) * 0.12 for name in shapes}
            write_boxes(
                engine.adapters,
                {PEFT_PREFIX + name: value for name, value in adapters.items()},
            )
            write_boxes(reference, merge_adapters(base_weights, adapters))

        engine.finish_update(version)
        reference.finish_update(version)
        rollouts = generate(engine, prompts, seed=1)
        check_equal_rollouts(rollouts, generate(reference, prompts, seed=1))
        distinct_responses.add(str(response_tokens(rollouts)))

    # Every update has an effect.
    assert len(distinct_responses) == 3
    engine.close()


def merge_adapters(
    base_weights: dict[str, torch.Tensor],
    adapters: dict[str, torch.Tensor],
) -> dict[str, torch.Tensor]:
    """Return the base weights plus the product B @ A of each pair of adapters."""
    weights = dict(base_weights)
    for name, factor_b in adapters.items():
        if "_B" not in name:
            continue
        factor_a = adapters[name.replace("_B", "_A")]
        weight_name = name.replace("lora_B.", "")
        weights[weight_name] = base_weights[weight_name] + factor_b @ factor_a
    return weights


def check_sampling(path: Path) -> None:
    """Check sampling per row, seeds per position, stop tokens and failed rows on one engine."""
    engine = build_engine(path, 2, load=True, min_p=0.1)
    reference = TorchEngine.from_hf(path)
    prompts = random_prompts(8, seed=2)

    # vLLM must not change torch's own generator.
    generator_state = torch.get_rng_state()
    rollouts = generate(engine, make_prompts(prompts, SAMPLED), seed=5)
    assert torch.equal(generator_state, torch.get_rng_state())
    check_against_transformers(reference, rollouts)

    check_seeds(engine, prompts, rollouts)
    check_row_parameters(engine, reference, prompts)
    check_supports(engine, reference, prompts, rollouts)
    check_stop_tokens(engine, prompts, rollouts)
    check_failed_rows(engine, prompts, rollouts)
    engine.close()


def check_seeds(engine: VllmEngine, prompts: list[list[int]], rollouts: Rollouts) -> None:
    """Check that seeds reproduce responses, and belong to positions in the global batch."""
    repeated = generate(engine, make_prompts(prompts, SAMPLED), seed=5)
    assert torch.equal(rollouts.tokens, repeated.tokens)
    other_seed = generate(engine, make_prompts(prompts, SAMPLED), seed=6)
    assert not torch.equal(rollouts.tokens, other_seed.tokens)

    # A row's seed follows from its position in the global batch, not in the engine's own.
    two_prompts = make_prompts([prompts[6], prompts[1]], SAMPLED)
    two_rows = generate(engine, two_prompts, seed=5, rows=[6, 1])
    assert torch.equal(two_rows.tokens, rollouts.rows([6, 1]).tokens)


def check_row_parameters(
    engine: VllmEngine,
    reference: TorchEngine,
    prompts: list[list[int]],
) -> None:
    """Check a batch whose rows have different sampling parameters."""
    parameters = [
        GREEDY,
        SAMPLED._replace(top_k=3),
        SAMPLED._replace(top_p=0.5),
        SAMPLED._replace(top_k=1),
    ]
    rollouts = generate(engine, make_prompts(prompts, *parameters, *parameters), seed=5)
    # Greedy rows report log-probs at temperature 1.
    torch.testing.assert_close(rollouts.temperature[:2], torch.tensor([1.0, 0.8]), atol=0, rtol=0)

    greedy = generate(reference, make_prompts(prompts, GREEDY), seed=5)
    check_equal_rollouts(rollouts.rows([0, 4]), greedy.rows([0, 4]))

    # top_k=1 allows one token, whose probability is 1.
    top_1 = rollouts.rows([3, 7])
    assert torch.equal(top_1.tokens, greedy.rows([3, 7]).tokens)
    assert not top_1.rollout_log_probs.any()


def check_supports(
    engine: VllmEngine,
    reference: TorchEngine,
    prompts: list[list[int]],
    rollouts: Rollouts,
) -> None:
    """Check that truncated rows record the tokens they were sampled from, also after a continuation."""
    parameters = [
        SAMPLED,
        SAMPLED._replace(top_k=3),
        SAMPLED._replace(top_p=0.5),
        SAMPLED._replace(min_p=0.2),
    ]
    prompt_batch = make_prompts(prompts, *parameters, *parameters)
    truncated = generate(engine, prompt_batch, seed=5)
    check_against_transformers(reference, truncated)
    assert torch.equal(truncated.rows([0, 4]).tokens, rollouts.rows([0, 4]).tokens)

    groups = started(prompt_batch, 1, seed=5, version=0)
    continued = generate_in_rounds(engine, groups, (6, 20), (0, 0))
    check_against_transformers(reference, continued)

    # Rows without truncation have no supports; a top-k of 3 has three tokens everywhere.
    assert truncated.support_sizes is not None
    sizes_by_row = split_rows(truncated.support_sizes, truncated.lengths)
    support_sizes = [sizes[sizes > 0].float() for sizes in sizes_by_row]
    num_truncated = [len(sizes) for sizes in support_sizes]
    assert num_truncated[:4] == [0, 20, 20, 20]
    assert num_truncated[4:] == num_truncated[:4]
    assert float(support_sizes[1].mean()) == 3
    assert 1 < float(support_sizes[2].mean()) < 100
    assert 1 < float(support_sizes[3].mean()) < 100


def check_stop_tokens(engine: VllmEngine, prompts: list[list[int]], rollouts: Rollouts) -> None:
    """Check that a stop token ends the response and belongs to it."""
    prompt_length = len(prompts[0])
    first_row = split_rows(rollouts.tokens, rollouts.lengths)[0]
    stop_token = int(first_row[prompt_length + 3])
    parameters = SAMPLED._replace(stop_token_ids=(stop_token,))
    stopped = generate(engine, make_prompts(prompts[:1], parameters), seed=5)
    assert stopped.finish_reason.tolist() == [FINISH_STOP]

    response = stopped.tokens[prompt_length:].tolist()
    assert response[-1] == stop_token
    assert stop_token not in response[:-1]
    assert response == rollouts.tokens[prompt_length : len(stopped.tokens)].tolist()


def check_failed_rows(engine: VllmEngine, prompts: list[list[int]], rollouts: Rollouts) -> None:
    """Check that rows that are too long, empty or out of vocabulary fail without an effect on valid rows."""
    invalid_prompts = [[1] * MAX_LEN, [], [1, 301]]
    failed = generate(
        engine,
        make_prompts([prompts[0], *invalid_prompts], SAMPLED),
        seed=5,
    )
    assert failed.finish_reason.tolist()[1:] == [FINISH_FAILED] * 3
    assert failed.lengths.tolist()[1:] == [MAX_LEN, 0, 2]
    assert torch.equal(failed.rows([0]).tokens, rollouts.rows([0]).tokens)

    no_rollouts = generate(engine, make_prompts([], SAMPLED), seed=5)
    assert len(no_rollouts) == 0


def check_schedules(path: Path) -> None:
    """Check temperatures and top-p that change over tokens, in one request and in several."""
    schedule = {"start": 1.0, "end": 0.7, "over": 8}
    cooled = SAMPLED._replace(
        temperature=1.0,
        last_temperature=0.4,
        temperature_tokens=9,
    )
    narrowed = SAMPLED._replace(
        top_p=1.0,
        last_top_p=0.5,
        top_p_tokens=4,
    )
    widened = cooled._replace(
        top_p=0.6,
        last_top_p=1.0,
        top_p_tokens=15,
        min_p=0.01,
    )
    reference = TorchEngine.from_hf(path)
    prompts = random_prompts(5, seed=8)

    # An engine that filters nothing, and one that replays supports.
    cases = (
        ({"temperature": schedule}, (cooled, SAMPLED)),
        ({"top_p": schedule}, (narrowed, widened)),
    )
    for rollout_config, parameters in cases:
        engine = build_engine(path, 2, load=True, **rollout_config)
        prompt_batch = make_prompts(prompts, *parameters, GREEDY, *parameters)
        rollouts = generate(engine, prompt_batch, seed=5)
        check_against_transformers(reference, rollouts)

        # A continued response has the temperature and top-p of its token, not of the new request's first one.
        groups = started(prompt_batch, 1, seed=5, version=0)
        continued = generate_in_rounds(engine, groups, (1, 6, 20), (0, 0, 0))
        check_against_transformers(reference, continued)

        greedy = generate(reference, make_prompts(prompts, GREEDY), seed=5)
        check_equal_rollouts(rollouts.rows([2]), greedy.rows([2]))
        first_response = response_tokens(rollouts)[0]
        assert len(set(first_response)) > 1
        engine.close()

    # A top-p that begins after the first token, and one of a row with another filter.
    assert rollouts.support_sizes is not None
    support_sizes = split_rows(rollouts.support_sizes, rollouts.lengths)
    assert (support_sizes[0][-20:] > 0).tolist() == [False] + [True] * 19
    assert (support_sizes[1][-20:] > 0).all(), "min_p filters on"
    assert not support_sizes[2].any()


def check_updates(path: Path) -> None:
    """Check that an engine without weights refuses to generate, and that an update drops the prefix cache."""
    try:
        build_engine(path, 2, vllm={"enable_chunked_prefill": True})
    except UserErrors as errors:
        assert [error.where for error in errors.errors] == ["rollout.vllm.enable_chunked_prefill"]
    else:
        raise AssertionError("prompts are read in parts on a host")

    engine = build_engine(path, 2)
    try:
        generate(engine, make_prompts([[1, 2]], GREEDY), seed=1)
    except RuntimeError as error:
        assert "no weights" in str(error)
    else:
        raise AssertionError("an engine without weights answered")

    # The prompt is longer than one block of the prefix cache.
    long_prompt = torch.arange(300).tolist()
    prompt_batch = make_prompts([long_prompt], GREEDY)
    rollouts_by_version = {}
    for version, scale in ((1, 1.0), (2, 1.5), (3, 1.0)):
        write_weights(engine, path, scale=scale)
        engine.finish_update(version)
        rollouts = generate(engine, prompt_batch, seed=1)
        assert rollouts.policy_version.tolist() == [version]
        rollouts_by_version[version] = rollouts

    first, second, third = rollouts_by_version.values()
    assert not torch.equal(first.rollout_log_probs, second.rollout_log_probs)
    assert torch.equal(first.tokens, third.tokens)
    assert torch.equal(first.rollout_log_probs, third.rollout_log_probs)

    # An evaluation set may truncate the distribution although training does not.
    top_1 = generate(
        engine,
        make_prompts([long_prompt], SAMPLED._replace(top_k=1)),
        seed=1,
    )
    assert torch.equal(top_1.tokens, third.tokens)
    assert not top_1.support_sizes.any()

    # A sleep on the host keeps the weights. Closing twice is allowed.
    engine.sleep()
    engine.wake()
    assert not engine.needs_weights
    engine.close()
    engine.close()


def check_rounds(path: Path) -> None:
    """Check that interrupted responses continue, also under newer weights, with every token's version."""
    engine = build_engine(path, 2)
    write_weights(engine, path)
    engine.finish_update(1)

    prompts = random_prompts(5, seed=3)
    greedy = generate(engine, make_prompts(prompts[:1], GREEDY), seed=1)
    stop_token = int(greedy.tokens[-3])
    prompt_batch = make_prompts(prompts, GREEDY._replace(stop_token_ids=(stop_token,)))

    # Under the same weights, responses of several rounds equal those of one.
    one_round = generate(engine, prompt_batch, seed=1)
    groups = started(prompt_batch, 1, seed=1, version=1)
    three_rounds = generate_in_rounds(engine, groups, (7, 7, 7), (1, 1, 1))
    check_equal_rollouts(one_round, three_rounds)
    assert one_round.finish_reason.tolist()[0] == FINISH_STOP

    def update_weights() -> None:
        write_weights(engine, path, scale=1.5)
        engine.finish_update(2)

    # Under newer weights they keep their first tokens and continue differently.
    groups = started(prompt_batch, 1, seed=1, version=1)
    two_versions = generate_in_rounds(engine, groups, (7, 20), (1, 2), update_weights)
    check_token_versions(two_versions, one_round)
    new_version = generate(engine, prompt_batch, seed=1)
    assert not torch.equal(two_versions.tokens, one_round.tokens)
    assert not torch.equal(two_versions.tokens, new_version.tokens)
    assert two_versions.policy_version.tolist() == [1] * 5

    # Seeds also reproduce responses of several rounds.
    sampled_prompts = make_prompts(prompts, SAMPLED)
    results = []
    for _ in range(2):
        groups = started(sampled_prompts, 1, seed=4, version=2)
        results.append(generate_in_rounds(engine, groups, (6, 6, 6, 6), (2, 2, 2, 2)))
    assert torch.equal(results[0].tokens, results[1].tokens)
    engine.close()


def check_token_versions(two_versions: Rollouts, one_version: Rollouts) -> None:
    """Check that 7 tokens of each response are of version 1 and the following tokens of version 2."""
    assert two_versions.token_versions is not None
    versions_by_row = split_rows(two_versions.token_versions, two_versions.lengths)
    for versions, old_response, response in zip(
        versions_by_row,
        response_tokens(one_version),
        response_tokens(two_versions),
        strict=True,
    ):
        assert old_response[:7] == response[:7]
        expected_versions = ([1] * 7 + [2] * 20)[: len(response)]
        # Tokens of the prompt have version 0.
        assert versions[versions > 0].tolist() == expected_versions


def generate_in_rounds(
    engine: VllmEngine,
    groups: list[SequenceGroup],
    token_counts: tuple[int, ...],
    versions: tuple[int, ...],
    after_first_round: Callable[[], None] | None = None,
) -> Rollouts:
    """Generate up to ``token_counts[i]`` tokens of each sequence in round i; return the rollouts."""
    for index, (count, version) in enumerate(zip(token_counts, versions, strict=True)):
        continue_all(engine, groups, count, version)
        if index == 0 and after_first_round is not None:
            after_first_round()
    return to_rollouts(groups)


def check_broadcast() -> None:
    """Check that `broadcast_object` carries values of any length, and short ones in a single message."""
    is_leader = device.rank() == 0
    message_sizes = []
    broadcast = dist.broadcast

    def counting_broadcast(tensor: torch.Tensor, *arguments: Any, **keywords: Any) -> Any:
        message_sizes.append(tensor.numel())
        return broadcast(tensor, *arguments, **keywords)

    # 1,016 bytes of pickle fit the first message, whose length is fixed; longer values need a second one.
    values = (
        None,
        SchedulerOutput(),
        "x" * 990,
        "x" * 1016,
        "x" * 1024,
        list(range(5000)),
    )
    dist.broadcast = counting_broadcast
    try:
        for value in values:
            local_value = "other"
            if is_leader:
                local_value = value
            assert exchange.broadcast_object(local_value, (0, 1)) == value

            needs_second_message = len(pickle.dumps(value)) > 1016
            assert len(message_sizes) == 1 + needs_second_message, (
                value,
                message_sizes,
            )
            message_sizes.clear()
    finally:
        dist.broadcast = broadcast


def check_replicas(path: Path) -> None:
    """Check two replicas on four ranks in a given order, then one replica on two of the ranks."""
    rank = device.rank()
    reference = TorchEngine.from_hf(path)
    engine = build_engine(path, 2, ranks=(3, 1, 0, 2), load=True)
    replica_by_rank = {3: 0, 1: 0, 0: 1, 2: 1}
    assert engine.replica == replica_by_rank[rank]

    # Replicas have different prompts, and different numbers of them.
    num_prompts = 3 + 4 * engine.replica
    prompts = make_prompts(random_prompts(num_prompts, seed=engine.replica), GREEDY)
    check_equal_rollouts(
        generate(engine, prompts, seed=1),
        generate(reference, prompts, seed=1),
    )

    # The second rank of each replica has the second shard.
    query_boxes = [box for box in engine.boxes() if box.name.endswith("q_proj.weight")]
    query_box = query_boxes[0]
    has_second_shard = query_box.start[0] > 0
    assert has_second_shard == (rank in (1, 2)), (rank, query_box)

    # A replica generates without the other one.
    if engine.replica == 0:
        generate(engine, prompts, seed=2)
    engine.close()

    # Creating groups is collective over all ranks, although two ranks have an engine.
    layout = ParallelLayout((1, 2), tensor=2)
    create_layout_groups(layout)
    if rank in layout.ranks:
        engine = build_engine(path, 2, ranks=layout.ranks, load=True)
        prompts = make_prompts(random_prompts(4, seed=7), GREEDY)
        check_equal_rollouts(
            generate(engine, prompts, seed=1),
            generate(reference, prompts, seed=1),
        )
        engine.close()
    dist.barrier()


def check_families(paths: list[Path]) -> None:
    """Check the engine of each model, and adapters of some models."""
    for path in paths:
        check_family(path, device.world_size())
        # Models with biases and tied embeddings, and with experts.
        if path.name.startswith(("qwen2_tied", "qwen3_moe")):
            check_adapters(path, device.world_size())
        # The job's process group outlives every engine.
        dist.barrier()


def main() -> None:
    check, *arguments = sys.argv[1:]
    paths = [Path(argument) for argument in arguments]
    device.initialize(timeout=300)
    if check == "families":
        check_families(paths)
    elif check == "sampling":
        check_broadcast()
        check_sampling(paths[0])
        check_schedules(paths[0])
        check_updates(paths[0])
        check_rounds(paths[0])
        request_ranks.check_requests(paths[0])
        request_ranks.check_updates_in_flight(paths[0])
        request_ranks.check_long_prompts(paths[0])
    else:
        check_replicas(paths[0])

    dist.barrier()
    if device.rank() == 0:
        print(f"{check}: all checks passed", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
