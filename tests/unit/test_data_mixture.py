"""Sources of prompts: exact shares, curricula, epochs by source and exact resumption."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from config_workspace import CONFIG

from megatron_rl.algorithms import AlgorithmState
from megatron_rl.config.load import load_text
from megatron_rl.config.sections.rollout import AsynchronyConfig
from megatron_rl.data.mixture import MixedPrompts, ShareOrder
from megatron_rl.data.sources import ShuffledOrder
from megatron_rl.errors import UserError
from megatron_rl.metrics import Metrics
from megatron_rl.rollout.collate import to_prompts
from megatron_rl.trainer.sample import RolloutSource
from megatron_rl.trainer.state import TrainerState
from megatron_rl.types import PromptBatch, SamplingParameters

SAMPLING = SamplingParameters(1.0, 1.0, 0, 8, (1,), 0.0)


class Numbers:
    """Source of ``records`` prompts, each with its number as its only token."""

    def __init__(self, records: int, templated: bool = False, name: str = "") -> None:
        self.name = name
        self.record_count = records
        self.templated = templated
        self.order = ShuffledOrder(records, 3, True, str(records))

    def __len__(self) -> int:
        return self.record_count

    def begin_step(self, step: int) -> None:
        self.step = step

    @property
    def epoch(self) -> int:
        return self.order.epoch

    def next_batch(self, count: int) -> PromptBatch:
        ids = torch.tensor(self.order.next_items(count))
        empty = ("",) * count
        ones = torch.ones(count, dtype=torch.long)
        metadata: tuple[Any, ...] = ({},) * count
        return PromptBatch(
            ids, ones, ids, empty, empty, empty, metadata, (SAMPLING,) * count, sources=(self.name,) * count
        )

    def has_prompt(self, record: int, tokens: torch.Tensor) -> bool:
        return tokens.tolist() == [record]

    def state_dict(self) -> dict[str, Any]:
        return self.order.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.order.load_state_dict(state)


def mixed(schedule: dict[int, dict[str, float]] | None = None, hard: int = 5) -> MixedPrompts:
    sources: Any = {"easy": Numbers(7, name="easy"), "hard": Numbers(hard, name="hard")}
    return MixedPrompts(sources, {"easy": 3.0, "hard": 1.0}, schedule or {})


@pytest.mark.parametrize(
    "weights",
    [
        {"a": 3.0, "b": 1.0},
        {"a": 0.7, "b": 0.2, "c": 0.1},
        {"a": 5.0, "b": 1.0, "c": 1.0},
        {"a": 0.1, "b": 0.3},
    ],
)
def test_every_window_has_the_exact_shares(weights):
    exact = {name: Fraction(str(weight)) for name, weight in weights.items()}
    smallest = min(exact.values())
    window = int(sum(exact.values()) / smallest)
    names = ShareOrder().next_sources(10 * window, weights)
    for start in range(9 * window):
        counts = Counter(names[start : start + window])
        assert counts == {name: weight / smallest for name, weight in exact.items()}


def test_shares_stay_close_between_windows():
    weights = {"a": 0.123, "b": 0.5, "c": 0.377}
    names = ShareOrder().next_sources(1000, weights)
    for drawn in range(1, 1001):
        counts = Counter(names[:drawn])
        assert all(abs(counts[name] - weight * drawn) < 1 for name, weight in weights.items())
    assert Counter(names) == {"a": 123, "b": 500, "c": 377}


def test_order_does_not_depend_on_the_sizes_of_batches():
    weights = {"a": 5.0, "b": 2.0, "c": 2.0}
    whole = ShareOrder().next_sources(60, weights)
    order = ShareOrder()
    parts = [name for count in (1, 7, 0, 20, 32) for name in order.next_sources(count, weights)]
    assert parts == whole


def test_sources_have_their_own_epochs_and_ids():
    prompts = mixed()
    batch = prompts.next_batch(40)
    names = batch.sources or ()
    assert Counter(names) == {"easy": 30, "hard": 10}

    # Each source visits all of its records once per epoch, in its own order.
    easy = [number for number, name in zip(batch.prompt_ids.tolist(), names, strict=True) if name == "easy"]
    hard = [number for number, name in zip(batch.prompt_ids.tolist(), names, strict=True) if name == "hard"]
    assert easy == Numbers(7).order.next_items(30)
    assert hard == [number + 7 for number in Numbers(5).order.next_items(10)]
    assert [source.epoch for source in prompts.sources.values()] == [4, 1]

    # The tokens are those of the source, whose numbers begin at 0.
    offsets = {"easy": 0, "hard": 7}
    tokens = [number - offsets[name] for number, name in zip(batch.prompt_ids.tolist(), names, strict=True)]
    assert batch.tokens.tolist() == tokens


def test_weights_change_after_a_number_of_steps():
    prompts = mixed({0: {"easy": 1.0}, 2: {"easy": 1.0, "hard": 1.0}, 3: {"hard": 1.0}})
    shares = []
    for step in range(1, 5):
        prompts.begin_step(step)
        counts = Counter(prompts.next_batch(8).sources)
        shares.append((counts["easy"], counts["hard"]))
    assert shares == [(8, 0), (8, 0), (4, 4), (0, 8)]


@pytest.mark.parametrize("stop", [1, 2, 3, 4])
def test_resumed_prompts_equal_uninterrupted_ones(stop):
    schedule = {2: {"easy": 2.0, "hard": 1.0}}
    whole = mixed(schedule)
    expected = []
    for step in range(1, 7):
        whole.begin_step(step)
        expected.append(whole.next_batch(7).prompt_ids.tolist())

    first = mixed(schedule)
    for step in range(1, stop + 1):
        first.begin_step(step)
        first.next_batch(7)
    second = mixed(schedule)
    second.load_state_dict(first.state_dict())
    for step in range(stop + 1, 7):
        second.begin_step(step)
        assert second.next_batch(7).prompt_ids.tolist() == expected[step - 1]
    assert second.state_dict() == whole.state_dict()


def test_state_of_other_sources_is_refused():
    sources: Any = {"easy": Numbers(7)}
    one = MixedPrompts(sources, {"easy": 1.0}, {})
    with pytest.raises(UserError, match="other sources of prompts"):
        one.load_state_dict(mixed().state_dict())
    with pytest.raises(UserError, match="another data set"):
        mixed(hard=6).load_state_dict(mixed().state_dict())
    with pytest.raises(UserError, match="other sources of prompts"):
        one.load_state_dict(Numbers(7).state_dict())


def test_prompts_of_an_older_checkpoint_are_resumed_with_their_sources():
    """Checkpoints from before sources had rewards do not name the sources of prompts."""
    prompts = mixed()
    batch = prompts.next_batch(8)
    assert set(batch.sources or ()) == {"easy", "hard"}
    older = replace(batch, sources=None)
    rollouts = SimpleNamespace(policy_version=torch.zeros(8))
    state = {
        "step": 1,
        "algorithm": AlgorithmState(0.0).state_dict(),
        "prompts": prompts.state_dict(),
        "policy_version": 0,
        "queue": [{"prompts": older, "rollouts": rollouts, "greedy": None, "metrics": Metrics()}],
        "rollouts": {"waiting": older, "started": None, "informative": (0, 0)},
        "best": {},
    }

    config = replace(load_text(CONFIG).valid(), asynchrony=AsynchronyConfig(1, 1))
    roles: Any = SimpleNamespace(hybrid_engine=SimpleNamespace(version=0))
    unused: Any = None
    source = RolloutSource(config, roles, unused, unused)
    resumed = TrainerState(mixed(), AlgorithmState(0.0), 1, source)
    resumed.load_state_dict(state, roles)
    assert to_prompts(source.buffer.waiting).sources == batch.sources
    assert [queued.prompts.sources for queued in resumed.queue] == [batch.sources]


def test_a_prompt_that_its_source_does_not_have_is_refused():
    batch = mixed().next_batch(8)
    named = PromptBatch.concatenate([replace(batch.rows([0, 1]), sources=None), batch.rows([2, 3])])
    assert mixed().with_sources(named).sources == (batch.sources or ())[:4]

    # One more record, too long to be a prompt, moves the ids of the next source.
    easy, hard = Numbers(8, name="easy"), Numbers(5, name="hard")
    sources: Any = {"easy": easy, "hard": hard}
    other = MixedPrompts(sources, {"easy": 3.0, "hard": 1.0}, {})
    assert other.with_sources(batch).sources == batch.sources
    sources = {"easy": easy}
    for wrong in (other, MixedPrompts(sources, {"easy": 1.0}, {})):
        with pytest.raises(UserError, match="the source of a prompt in the checkpoint is unknown") as error:
            wrong.with_sources(replace(batch, sources=None))
        assert error.value.where == "data.sources" and error.value.fix


def test_sources_of_two_forms_are_refused():
    sources: Any = {"easy": Numbers(7), "hard": Numbers(5, templated=True)}
    with pytest.raises(UserError, match="different forms"):
        MixedPrompts(sources, {"easy": 1.0, "hard": 1.0}, {})
