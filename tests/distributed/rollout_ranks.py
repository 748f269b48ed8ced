"""Ranks of test_rollout.py: compare vLLM engines with the plain engine and with each other."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any

import request_ranks
import torch
import torch.distributed as dist
from engines import (
    GREEDY,
    MAX_LEN,
    SAMPLED,
    build,
    close_to,
    random_rows,
    responses,
    same_weights,
    transformers_agree,
    write,
    write_boxes,
)
from safetensors.torch import load_file

from megatron_rl.distributed import device, exchange
from megatron_rl.errors import UserErrors
from megatron_rl.megatron.model_spec import describe_model, read_hf_config
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
    engine = build(path, tensor)
    write(engine, path)
    engine.finish_update(3)
    loaded = build(path, tensor, load=True)
    same_weights(engine, loaded)

    loaded.close()
    reference = TorchEngine.from_hf(path)
    prompts = make_prompts(random_rows(6, seed=1), GREEDY)
    result = generate(engine, prompts, seed=1)
    close_to(result, generate(reference, prompts, seed=1))
    assert result.policy_version.tolist() == [3] * 6
    engine.close()


def check_adapters(path: Path, tensor: int) -> None:
    """Check that adapters in vLLM's slots act as if added to the weights, before and after two updates."""
    adapted_model = make_adapted_model(describe_model(read_hf_config(path)), 6, 9.0, None)
    engine = build(path, tensor, adapters=adapted_model)
    reference = TorchEngine.from_hf(path)
    assert engine.adapters is not None

    write(engine, path)
    base = load_file(path / "model.safetensors")
    distinct_responses = set[str]()
    prompts = make_prompts(random_rows(6, seed=1), GREEDY)

    generator = torch.Generator().manual_seed(2)
    for version in (1, 2, 3):
        if version > 1:
            shapes = adapted_model.tensor_shapes()
            adapters = {name: torch.randn(shapes[name], generator=generator) * 0.12 for name in shapes}
            differences = {
                name: adapters[name] @ adapters[name.replace("_B", "_A")] for name in adapters if "_B" in name
            }
            weights = {name.replace("lora_B.", ""): difference for name, difference in differences.items()}
            write_boxes(
                engine.adapters,
                {PEFT_PREFIX + name: adapters[name] for name in adapters},
            )
            write_boxes(
                reference,
                base | {name: base[name] + weights[name] for name in weights},
            )

        engine.finish_update(version)
        reference.finish_update(version)
        rollouts = generate(engine, prompts, seed=1)
        # The reference has no adapters: its weights contain them.
        close_to(rollouts, generate(reference, prompts, seed=1))
        distinct_responses.add(str(responses(rollouts)))

    assert len(distinct_responses) == 3
    engine.close()


def check_sampling(path: Path) -> None:
    """Check sampling per row, seeds per position, stop tokens, failed rows, and torch's own generator."""
    engine = build(path, 2, load=True, min_p=0.1)
    reference = TorchEngine.from_hf(path)
    rows = random_rows(8, seed=2)
    generator_state = torch.get_rng_state()
    full = generate(engine, make_prompts(rows, SAMPLED), seed=5)
    assert torch.equal(generator_state, torch.get_rng_state())

    transformers_agree(reference, full)
    assert torch.equal(
        full.tokens,
        generate(engine, make_prompts(rows, SAMPLED), seed=5).tokens,
    )
    assert not torch.equal(
        full.tokens,
        generate(engine, make_prompts(rows, SAMPLED), seed=6).tokens,
    )

    # A row's seed follows from its position in the global batch, not in the engine's own.
    partial = generate(engine, make_prompts([rows[6], rows[1]], SAMPLED), seed=5, rows=[6, 1])
    assert torch.equal(partial.tokens, full.rows([6, 1]).tokens)

    # Rows of one batch have different sampling parameters.
    settings = [
        GREEDY,
        SAMPLED._replace(top_k=3),
        SAMPLED._replace(top_p=0.5),
        SAMPLED._replace(top_k=1),
    ] * 2
    result = generate(engine, make_prompts(rows, *settings), seed=5)
    assert result.temperature.tolist()[:2] == [1.0, torch.tensor(0.8).item()]

    greedy = generate(reference, make_prompts(rows, GREEDY), seed=5)
    close_to(result.rows([0, 4]), greedy.rows([0, 4]))
    assert torch.equal(result.rows([3, 7]).tokens, greedy.rows([3, 7]).tokens)
    assert not result.rows([3, 7]).rollout_log_probs.any()  # top_k=1 allows one token, whose probability is 1

    # Truncated rows record the tokens they were sampled from, also when continued after 6 tokens.
    settings = [
        SAMPLED,
        SAMPLED._replace(top_k=3),
        SAMPLED._replace(top_p=0.5),
        SAMPLED._replace(min_p=0.2),
    ] * 2
    truncated = generate(engine, make_prompts(rows, *settings), seed=5)
    transformers_agree(reference, truncated)
    assert torch.equal(truncated.rows([0, 4]).tokens, full.rows([0, 4]).tokens)

    first = in_parts(
        engine,
        started(make_prompts(rows, *settings), 1, seed=5, version=0),
        (6, 20),
        (0, 0),
    )
    transformers_agree(reference, first)
    assert truncated.support_sizes is not None

    sizes = [row[row > 0].float() for row in split_rows(truncated.support_sizes, truncated.lengths)]
    assert [len(row) for row in sizes] == [0, 20, 20, 20] * 2
    assert float(sizes[1].mean()) == 3 and all(1 < float(sizes[row].mean()) < 100 for row in (2, 3))

    # A stop token ends the response and belongs to it.
    stop = int(split_rows(full.tokens, full.lengths)[0][len(rows[0]) + 3])
    stopped = generate(
        engine,
        make_prompts(rows[:1], SAMPLED._replace(stop_token_ids=(stop,))),
        seed=5,
    )
    assert stopped.finish_reason.tolist() == [FINISH_STOP]

    response = stopped.tokens[len(rows[0]) :].tolist()
    assert response[-1] == stop and stop not in response[:-1]
    assert response == full.tokens[len(rows[0]) : len(stopped.tokens)].tolist()

    # Rows that are too long, empty or out of vocabulary fail without an effect on valid ones.
    failed = generate(
        engine,
        make_prompts([rows[0], [1] * MAX_LEN, [], [1, 301]], SAMPLED),
        seed=5,
    )
    assert failed.finish_reason.tolist()[1:] == [FINISH_FAILED] * 3
    assert failed.lengths.tolist()[1:] == [MAX_LEN, 0, 2]
    assert torch.equal(failed.rows([0]).tokens, full.rows([0]).tokens)
    assert len(generate(engine, make_prompts([], SAMPLED), seed=5)) == 0
    engine.close()


def check_schedules(path: Path) -> None:
    """Check temperatures and top-p that change over tokens, in one request and in several."""
    schedule = {"start": 1.0, "end": 0.7, "over": 8}
    cooled = SAMPLED._replace(temperature=1.0, last_temperature=0.4, temperature_tokens=9)
    narrowed = SAMPLED._replace(top_p=1.0, last_top_p=0.5, top_p_tokens=4)
    widened = cooled._replace(top_p=0.6, last_top_p=1.0, top_p_tokens=15, min_p=0.01)
    reference = TorchEngine.from_hf(path)
    rows = random_rows(5, seed=8)

    # An engine that filters nothing, and one that replays supports.
    cases = (
        ({"temperature": schedule}, (cooled, SAMPLED)),
        ({"top_p": schedule}, (narrowed, widened)),
    )
    for rollout, changing in cases:
        engine = build(path, 2, load=True, **rollout)
        prompts = make_prompts(rows, *changing, GREEDY, *changing)
        whole = generate(engine, prompts, seed=5)
        transformers_agree(reference, whole)
        transformers_agree(
            reference,
            in_parts(
                engine,
                started(prompts, 1, seed=5, version=0),
                (1, 6, 20),
                (0, 0, 0),
            ),
        )
        greedy = generate(reference, make_prompts(rows, GREEDY), seed=5)
        close_to(whole.rows([2]), greedy.rows([2]))
        assert len(set(responses(whole)[0])) > 1
        engine.close()

    # A top-p that begins after the first token, and one of a row with another filter.
    assert whole.support_sizes is not None
    sizes = split_rows(whole.support_sizes, whole.lengths)
    assert (sizes[0][-20:] > 0).tolist() == [False] + [True] * 19
    assert (sizes[1][-20:] > 0).all(), "min_p filters on"
    assert not sizes[2].any()


def check_updates(path: Path) -> None:
    """Check that an engine without weights refuses to generate, and that an update drops the prefix cache."""
    try:
        build(path, 2, vllm={"enable_chunked_prefill": True})
    except UserErrors as errors:
        assert [error.where for error in errors.errors] == ["rollout.vllm.enable_chunked_prefill"]
    else:
        raise AssertionError("prompts are read in parts on a host")

    engine = build(path, 2)
    try:
        generate(engine, make_prompts([[1, 2]], GREEDY), seed=1)
    except RuntimeError as error:
        assert "no weights" in str(error)
    else:
        raise AssertionError("an engine without weights answered")

    long = make_prompts([torch.arange(300).tolist()], GREEDY)  # longer than one block of the prefix cache
    write(engine, path)
    engine.finish_update(1)
    first = generate(engine, long, seed=1)
    write(engine, path, scale=1.5)

    engine.finish_update(2)
    second = generate(engine, long, seed=1)
    write(engine, path)
    engine.finish_update(3)
    third = generate(engine, long, seed=1)

    # An evaluation set may truncate the distribution although training does not.
    filtered = generate(
        engine,
        make_prompts([torch.arange(300).tolist()], SAMPLED._replace(top_k=1)),
        seed=1,
    )
    assert torch.equal(filtered.tokens, third.tokens) and not filtered.support_sizes.any()
    assert not torch.equal(first.rollout_log_probs, second.rollout_log_probs)
    assert torch.equal(first.tokens, third.tokens)
    assert torch.equal(first.rollout_log_probs, third.rollout_log_probs)
    assert [r.policy_version.tolist() for r in (first, second, third)] == [
        [1],
        [2],
        [3],
    ]

    # A sleep on the host keeps the weights. Closing twice is allowed.
    engine.sleep()
    engine.wake()
    assert not engine.needs_weights

    engine.close()
    engine.close()


def check_parts(path: Path) -> None:
    """Check that interrupted responses continue, also under newer weights, with every token's version."""
    engine = build(path, 2)
    write(engine, path)
    engine.finish_update(1)
    rows = random_rows(5, seed=3)
    stop = int(generate(engine, make_prompts(rows[:1], GREEDY), seed=1).tokens[-3])
    prompts = make_prompts(rows, GREEDY._replace(stop_token_ids=(stop,)))
    full = generate(engine, prompts, seed=1)

    # Under the same weights, responses of several rounds equal those of one.
    continued = in_parts(engine, started(prompts, 1, seed=1, version=1), (7, 7, 7), (1, 1, 1))
    close_to(full, continued)
    assert full.finish_reason.tolist()[0] == FINISH_STOP

    def update_weights() -> None:
        write(engine, path, scale=1.5)
        engine.finish_update(2)

    # Under newer weights they keep their first tokens and continue differently.
    mixed_versions = in_parts(
        engine,
        started(prompts, 1, seed=1, version=1),
        (7, 20),
        (1, 2),
        update_weights,
    )
    second = generate(engine, prompts, seed=1)
    assert mixed_versions.token_versions is not None

    for row, (old, new) in enumerate(zip(responses(full), responses(mixed_versions), strict=True)):
        assert old[:7] == new[:7]

        versions = split_rows(mixed_versions.token_versions, mixed_versions.lengths)[row]
        assert versions[versions > 0].tolist() == ([1] * 7 + [2] * 20)[: len(new)]

    assert not torch.equal(mixed_versions.tokens, full.tokens)
    assert not torch.equal(mixed_versions.tokens, second.tokens)
    assert mixed_versions.policy_version.tolist() == [1] * 5

    sampled = make_prompts(rows, SAMPLED)
    # Seeds also reproduce responses of several rounds.
    first = in_parts(engine, started(sampled, 1, seed=4, version=2), (6, 6, 6, 6), (2,) * 4)
    repeated = in_parts(engine, started(sampled, 1, seed=4, version=2), (6, 6, 6, 6), (2,) * 4)
    assert torch.equal(first.tokens, repeated.tokens)
    engine.close()


def in_parts(
    engine: VllmEngine,
    groups: list[SequenceGroup],
    token_counts,
    versions,
    on_first_part=None,
) -> Rollouts:
    """Generate one round per item of ``token_counts``; call ``on_first_part`` after the first."""
    for count, version in zip(token_counts, versions, strict=True):
        continue_all(engine, groups, count, version)
        if on_first_part is not None:
            on_first_part()
            on_first_part = None
    return to_rollouts(groups)


def check_sharing() -> None:
    """Check that `broadcast_object` carries values of any length, and short ones in a single message."""
    is_first = device.rank() == 0
    messages = []
    broadcast = dist.broadcast

    def counting(tensor: torch.Tensor, *arguments: Any, **keywords: Any) -> Any:
        messages.append(tensor.numel())
        return broadcast(tensor, *arguments, **keywords)

    # 1,016 bytes of pickle fit the first message, whose length is fixed; longer values need a second one.
    dist.broadcast = counting
    try:
        for value in (
            None,
            SchedulerOutput(),
            "x" * 990,
            "x" * 1016,
            "x" * 1024,
            list(range(5000)),
        ):
            assert exchange.broadcast_object(value if is_first else "other", (0, 1)) == value
            assert len(messages) == 1 + (len(pickle.dumps(value)) > 1016), (
                value,
                messages,
            )
            messages.clear()
    finally:
        dist.broadcast = broadcast


def check_replicas(path: Path) -> None:
    """Check two replicas on four ranks in a given order, then one replica on two of the ranks."""
    rank = device.rank()
    reference = TorchEngine.from_hf(path)
    engine = build(path, 2, ranks=(3, 1, 0, 2), load=True)
    assert engine.replica == {3: 0, 1: 0, 0: 1, 2: 1}[rank]

    prompts = make_prompts(random_rows(3 + 4 * engine.replica, seed=engine.replica), GREEDY)
    close_to(generate(engine, prompts, seed=1), generate(reference, prompts, seed=1))
    head = next(box for box in engine.boxes() if box.name.endswith("q_proj.weight"))
    assert (head.start[0] > 0) == (rank in (1, 2)), (rank, head)

    if engine.replica == 0:  # a replica generates without the other one
        generate(engine, prompts, seed=2)

    engine.close()

    layout = ParallelLayout((1, 2), tensor=2)
    create_layout_groups(layout)

    if rank in layout.ranks:
        engine = build(path, 2, ranks=layout.ranks, load=True)
        prompts = make_prompts(random_rows(4, seed=7), GREEDY)
        close_to(
            generate(engine, prompts, seed=1),
            generate(reference, prompts, seed=1),
        )
        engine.close()
    dist.barrier()


def main() -> None:
    check, *paths = sys.argv[1:]
    device.initialize(timeout=300)
    if check == "families":
        for path in paths:
            check_family(Path(path), device.world_size())
            if Path(path).name.startswith(("qwen2_tied", "qwen3_moe")):  # biases and tied embeddings; experts
                check_adapters(Path(path), device.world_size())
            dist.barrier()  # the job's process group outlives every engine
    elif check == "sampling":
        check_sharing()
        check_sampling(Path(paths[0]))
        check_schedules(Path(paths[0]))
        check_updates(Path(paths[0]))
        check_parts(Path(paths[0]))
        request_ranks.check_requests(Path(paths[0]))
        request_ranks.check_updates_in_flight(Path(paths[0]))
        request_ranks.check_long_prompts(Path(paths[0]))
    else:
        check_replicas(Path(paths[0]))

    dist.barrier()
    if device.rank() == 0:
        print(f"{check}: all checks passed", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
