"""Stop texts of several tokens: which tokens a response has, against the text of each of its beginnings."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from megatron_rl.config.sections.rollout import EnvironmentConfig, RolloutConfig
from megatron_rl.data.chat_format import ChatFormats
from megatron_rl.data.tokenizing import sampling_by_task
from megatron_rl.environments.host import EnvironmentPool
from megatron_rl.errors import UserError
from megatron_rl.rollout.multi_turn import MultiTurnScheduler
from megatron_rl.rollout.scheduler import ReplicaQueue, ReplicaScheduler
from megatron_rl.rollout.stopping import StopTextFinder
from megatron_rl.rollout.types import Completion, GenerationRequest
from megatron_rl.types import FINISH_LENGTH, FINISH_STOP, SamplingParameters
from tests.sampling import copied, engine_of, make_prompts, round_of, started, take_in

STOPS = ("</answer>", "Ende é!", "x\n\n")
TEXT = "<answer>42</answer>\n <answer>é 漢字</answer>. Ende é! x\n\n\n</answers></ answer> Ende é? x\n"


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer whose tokens cut stop texts anywhere, also inside a character."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<eos>", "<mark>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        max_token_length=4,
    )
    # Pieces from any start, so that a token may begin and end anywhere in a stop text.
    pieces = [TEXT[start : start + 5] for start in range(len(TEXT))] * 3
    made.train_from_iterator([*pieces, TEXT], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<eos>")


def written(tokenizer: Any, source: random.Random, count: int) -> list[int]:
    """Return ``count`` tokens: parts of the stop texts in any tokens, with random tokens between them."""
    tokens: list[int] = []
    while len(tokens) < count:
        start = source.randrange(len(TEXT))
        tokens += tokenizer.encode(TEXT[start : start + source.randint(1, 12)], add_special_tokens=False)
        if source.random() < 0.3:
            tokens.append(source.randrange(len(tokenizer)))
    return tokens[:count]


def first_end(tokenizer: Any, turn: list[int]) -> int | None:
    """Return the number of tokens of the first beginning of a turn whose text contains a stop text."""
    for count in range(1, len(turn) + 1):
        text = tokenizer.decode(turn[:count], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if any(stop in text for stop in STOPS):
            return count
    return None


def test_a_response_ends_at_the_first_token_that_completes_a_stop_text(tokenizer: Any):
    source = random.Random(0)
    sampling = SamplingParameters(stop_texts=STOPS)
    stops = StopTextFinder(lambda: tokenizer)
    ends = []
    inside = 0
    for _ in range(300):
        prompt = written(tokenizer, source, source.randint(1, 9))
        turn = written(tokenizer, source, source.choice((4, 160)))
        end = first_end(tokenizer, turn)
        ends.append(end)

        # Any number of the tokens may belong to an earlier request.
        done = source.randint(0, (end or len(turn)) - 1)
        request = GenerationRequest(0, prompt + turn[:done], sampling, 999, 1, done, done)
        rest = turn[done:]
        log_probs = [-float(number) for number in range(len(rest))]
        support = [[number] for number in range(len(rest))]
        experts = torch.arange(len(prompt) + len(turn) - 1)[:, None, None]
        completion = Completion(0, rest, log_probs, FINISH_LENGTH, support, experts)
        trimmed = stops.trim_completion(request, completion)
        if end is None:
            assert trimmed == completion
            continue
        assert trimmed.tokens == rest[: end - done] and trimmed.finish_reason == FINISH_STOP
        assert trimmed.log_probs == log_probs[: end - done] and trimmed.support == support[: end - done]
        assert trimmed.experts is not None and len(trimmed.experts) == len(prompt) + end - 1
        text = tokenizer.decode(turn[:end])
        inside += not text.endswith(STOPS)
    assert None in ends and max(end or 0 for end in ends) > 60 and inside > 5, "cases of every kind"


def test_a_stop_text_is_looked_for_in_the_turn_alone(tokenizer: Any):
    stops = StopTextFinder(lambda: tokenizer)
    sampling = SamplingParameters(stop_token_ids=(0,), stop_texts=STOPS)
    before = tokenizer.encode("</ans", add_special_tokens=False)
    rest = tokenizer.encode("wer>", add_special_tokens=False)
    assert not stops.is_turn_ended(sampling, before + rest, len(rest))
    assert stops.is_turn_ended(sampling, before + rest, len(before + rest))
    assert stops.is_turn_ended(sampling, [5, 0], 1) and not stops.is_turn_ended(sampling, [5, 0], 0)
    assert not StopTextFinder(lambda: tokenizer).is_turn_ended(SamplingParameters(), before + rest, 2)


def logits_of(tokenizer: Any) -> Any:
    """Return logits by which rows write parts of `TEXT`."""
    generator = torch.Generator().manual_seed(5)
    last, second_last = torch.randn(2, len(tokenizer), len(tokenizer), generator=generator)
    # After a token of the text, the next one of it is likely.
    text_tokens = tokenizer.encode(TEXT, add_special_tokens=False)
    last[text_tokens[:-1], text_tokens[1:]] += 7

    def logits(tokens: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        ends = lengths.cumsum(0) - 1
        return last[tokens[ends]] + second_last[tokens[ends - 1]]

    return logits


def test_the_engine_samples_the_beginning_of_what_it_samples_without_stops(tokenizer: Any):
    logits = logits_of(tokenizer)
    texts = ("<answer>", "42 x", "42</answ", "Ende ")
    rows = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    plain = SamplingParameters(0.7, top_k=12, max_response_tokens=40)
    stopping = plain._replace(stop_texts=STOPS)
    stops = StopTextFinder(lambda: tokenizer)

    def responses(sampling: SamplingParameters, *limits: int | None) -> list[Any]:
        groups = copied(started(make_prompts(rows, sampling), 4, seed=3, version=0))
        queue = ReplicaQueue(round_of(groups), 16, None)
        scheduler = ReplicaScheduler(engine_of(logits, stop_finder=stops), queue)
        for limit in limits:
            scheduler.run_token_round(limit)
        take_in(scheduler)
        return [sequence for group in groups for sequence in group.sequences]

    # Token rounds of 5 cut stop texts in two.
    free = responses(plain, None)
    ended = responses(stopping, None)
    in_parts = responses(stopping, *[5] * 8)
    reasons = set()
    for whole, one, parts in zip(free, ended, in_parts, strict=True):
        end = first_end(tokenizer, whole.tokens.tolist())
        assert one.tokens.tolist() == whole.tokens.tolist()[:end] == parts.tokens.tolist()
        assert one.log_probs == whole.log_probs[:end] == parts.log_probs
        assert one.support_sizes == whole.support_sizes[:end]
        assert one.finish_reason == parts.finish_reason == (FINISH_LENGTH if end is None else FINISH_STOP)
        reasons.add(one.finish_reason)
    assert reasons == {FINISH_LENGTH, FINISH_STOP}


ENVIRONMENT = '''
from megatron_rl import Environment

class Asking(Environment):
    """Observe the length of each turn three times, with a part of a stop text behind it."""
    async def run(self, episode):
        turns = []
        for _ in range(3):
            turns.append(await episode.generate())
            episode.observe(f"{len(turns[-1])}</ans")
        return {"reward": float(sum(map(len, turns)))}
'''


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[EnvironmentPool]:
    (tmp_path / "asking.py").write_text(ENVIRONMENT)
    pool = EnvironmentPool(EnvironmentConfig(f"{tmp_path / 'asking.py'}:Asking", workers=1, max_turns=9))
    yield pool
    pool.close()


@pytest.mark.slow
@pytest.mark.parametrize("limits", [(None,), (20,) * 12], ids=["at once", "in parts"])
def test_turns_end_at_stop_texts_and_the_observations_follow(
    tokenizer: Any, hosts: EnvironmentPool, limits: tuple[int | None, ...]
):
    sampling = SamplingParameters(0.7, max_response_tokens=200, stop_texts=STOPS)
    prompts = make_prompts([tokenizer.encode("<an"), tokenizer.encode("wer>")], sampling)
    groups = copied(started(replace(prompts, prompts=("a", "b")), 3, seed=4, version=0))
    queue = ReplicaQueue(round_of(groups), 6, 400)
    engine = engine_of(logits_of(tokenizer), max_model_len=400, stop_finder=StopTextFinder(lambda: tokenizer))
    scheduler = MultiTurnScheduler(engine, queue, hosts, ChatFormats(tokenizer))
    for limit in limits:
        scheduler.run_token_round(limit)
    scheduler.close()
    take_in(scheduler)

    complete = 0
    for sequence in (sequence for group in groups for sequence in group.sequences):
        # Turns: the runs of sampled tokens.
        turns: list[list[int]] = [[]]
        for token, version in zip(sequence.tokens, sequence.versions, strict=True):
            if version < 0:
                if turns[-1]:
                    turns.append([])
            else:
                turns[-1].append(token)
        turns = [turn for turn in turns if turn]
        for number, turn in enumerate(turns):
            is_last_of_full = number == len(turns) - 1 and sequence.finish_reason == FINISH_LENGTH
            assert first_end(tokenizer, turn) == (None if is_last_of_full else len(turn))
        complete += len(turns) == 3 and sequence.finish_reason == FINISH_STOP
    assert complete > 0


def test_texts_of_one_token_are_stop_tokens_and_impossible_texts_are_refused(tokenizer: Any):
    one, several = "<mark>", "</answer>"
    default, by_task = sampling_by_task(
        RolloutConfig(stop=(one, several), sampling_profiles={"free": {"stop": []}}), tokenizer, (0,)
    )
    assert default.stop_token_ids == (0, tokenizer.convert_tokens_to_ids(one))
    assert default.stop_texts == (several,)
    assert by_task["free"].stop_texts == () and by_task["free"].stop_token_ids == (0,)
    assert default.with_greedy_decoding().stop_texts == (several,)
    with pytest.raises(UserError, match="never part of a response"):
        sampling_by_task(RolloutConfig(stop=("",)), tokenizer, (0,))
