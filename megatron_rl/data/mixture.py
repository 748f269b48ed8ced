"""Training prompts of one data set, or of several sources in proportion to their weights.

The next prompt comes from the source that is furthest behind its share of the prompts so far. So the order of
the sources depends only on the weights, and a checkpoint stores only the number of prompts of each source.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from torch import Tensor

from megatron_rl.config.schema import RunConfig
from megatron_rl.data.messages import mixed_templates_error
from megatron_rl.data.sources import PromptSource, load_prompts
from megatron_rl.data.token_files import TokenFiles
from megatron_rl.errors import UserError
from megatron_rl.types import PromptBatch, split_rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class ShareOrder:
    """Deterministic order in which each source occurs in proportion to its weight.

    If the weights, scaled to the smallest integers, have the sum N, the order repeats every N prompts, and
    any N consecutive prompts have exactly these proportions. Ties go to the first source in ``weights``. This
    is the smooth weighted round robin with which nginx balances servers.

    Example:
        >>> ShareOrder().next_sources(4, {"math": 3.0, "code": 1.0})
        ['math', 'math', 'code', 'math']
    """

    def __init__(self) -> None:
        self.weights: dict[str, float] = {}
        self.counts: dict[str, int] = {}
        """Number of prompts drawn from each source since the weights changed."""

    def next_sources(self, count: int, weights: Mapping[str, float]) -> list[str]:
        """Return the sources of the next ``count`` prompts; changed ``weights`` start a new order."""
        if dict(weights) != self.weights:
            self.weights = dict(weights)
            self.counts = dict.fromkeys(weights, 0)

        # Convert the decimal digits of the weights to exact fractions: rounding errors would add up. The
        # weights 0.1 and 0.2 then have exactly the ratio 1 : 2.
        exact_weights = {name: Fraction(repr(weight)) for name, weight in weights.items()}
        total_weight = sum(exact_weights.values())

        names: list[str] = []
        num_drawn = sum(self.counts.values())
        for num_prompts in range(num_drawn + 1, num_drawn + count + 1):
            # Deficit: prompts that a source lacks for its share of `num_prompts`, times the total weight.
            deficits: dict[str, Fraction] = {}
            for name, weight in exact_weights.items():
                deficits[name] = weight * num_prompts - total_weight * self.counts[name]

            next_name = max(deficits, key=deficits.__getitem__)
            self.counts[next_name] += 1
            names.append(next_name)
        return names


class MixedPrompts:
    """Prompts of several sources in proportion to their weights; each source has its own order and epochs.

    ``weights`` maps each source to its weight. ``schedule`` maps a step to the weights that apply after this
    step. A source without a weight supplies no prompts. ``prompt_ids`` number the records of all sources
    consecutively, source after source. Raises UserError if the chat template renders only some of the
    sources.
    """

    def __init__(
        self,
        sources: Mapping[str, PromptSource],
        weights: Mapping[str, float],
        schedule: Mapping[int, Mapping[str, float]],
    ) -> None:
        self.sources = dict(sources)
        self._weights = dict(weights)
        self._schedule = {step: dict(schedule[step]) for step in sorted(schedule)}
        self._order = ShareOrder()
        self._step = 1
        self._id_ends = list(accumulate(source.record_count for source in self.sources.values()))
        """End (exclusive) of each source's range of prompt ids."""

        first, *further_names = self.sources
        self.templated = self.sources[first].templated
        for name in further_names:
            if self.sources[name].templated != self.templated:
                raise mixed_templates_error(first, self.templated, name)

    def __len__(self) -> int:
        return sum(map(len, self.sources.values()))

    @property
    def epoch(self) -> int:
        """Return the number of complete passes over every source so far."""
        return min(source.epoch for source in self.sources.values())

    def begin_step(self, step: int) -> None:
        """Apply the sources' weights and the sampling schedules of ``step`` to all further prompts.

        Steps count from 1. The weight of a source determines its share of the prompts.
        """
        self._step = step
        for source in self.sources.values():
            source.begin_step(step)

    def weights(self) -> dict[str, float]:
        """Return the positive weights of the current step, by name of the source."""
        weights = self._weights
        for steps, later_weights in self._schedule.items():
            if steps < self._step:
                weights = later_weights
        return {name: weights[name] for name in self.sources if weights.get(name, 0) > 0}

    def next_batch(self, count: int) -> PromptBatch:
        """Return the next ``count`` prompts, interleaved over the sources by their weights."""
        names = self._order.next_sources(count, self.weights())

        # Draw one batch per source, then interleave the rows.
        batches: list[PromptBatch] = []
        rows_of_source: dict[str, list[int]] = {}
        start = 0
        for index, (name, source) in enumerate(self.sources.items()):
            source_count = names.count(name)
            rows_of_source[name] = list(range(start, start + source_count))
            start += source_count
            if source_count:
                offset = self._id_ends[index] - source.record_count
                batches.append(source.next_batch(source_count).with_offset(offset))
        prompts = PromptBatch.concatenate(batches)
        return prompts.rows([rows_of_source[name].pop(0) for name in names])

    def record_uniform_rewards(self, prompt_id: int, *, is_uniform: bool) -> None:
        """Record whether all responses to a prompt had equal rewards.

        Later epochs may skip such a prompt (`data.uniform_share`).
        """
        name, record = self._find_record(prompt_id)
        self.sources[name].record_uniform_rewards(record, is_uniform=is_uniform)

    def _find_record(self, prompt_id: int) -> tuple[str, int]:
        """Return the name of a prompt's source, and the index of the prompt's record in that source."""
        index = bisect_right(self._id_ends, prompt_id)
        name = list(self.sources)[index]
        return name, prompt_id - (self._id_ends[index] - self.sources[name].record_count)

    def with_sources(self, prompts: PromptBatch) -> PromptBatch:
        """Add the names of the sources to prompts of a checkpoint; older checkpoints lack the names.

        The source is found by the prompt's id. Raises UserError if the record with this id has a different
        prompt, or if no record has the id.
        """
        saved_names = prompts.sources or (None,) * len(prompts)
        token_rows = split_rows(prompts.tokens, prompts.lengths)
        names: list[str] = []
        for row, prompt_id in enumerate(prompts.prompt_ids.tolist()):
            name = saved_names[row] or self._find_source(prompt_id, token_rows[row])
            if name is None:
                raise UserError(
                    "the source of a prompt in the checkpoint is unknown",
                    where="data.sources",
                    expected=f"the records of the checkpoint, with this prompt as number {prompt_id + 1}",
                    got=f"other records; the prompt: {prompts.prompts[row][:80]!r}",
                    fix="resume with the data of the checkpoint, or start a new run",
                )
            names.append(name)
        return replace(prompts, sources=tuple(names))

    def _find_source(self, prompt_id: int, tokens: Tensor) -> str | None:
        """Return the source whose record with this id has the prompt ``tokens``, or None."""
        # The ids shift if records were added to a data set, including records over the token limit.
        if prompt_id >= self._id_ends[-1]:
            return None
        name, record = self._find_record(prompt_id)
        if not self.sources[name].has_prompt(record, tokens):
            return None
        return name

    def uniform_fractions(self) -> dict[str, tuple[float, float]]:
        """Return (uniform fraction, skipped fraction) of each source's prompts, by ``/SOURCE``.

        A uniform prompt is a prompt whose last responses all had the same reward. A skipped prompt does not
        occur in the current epoch, see `data.uniform_share`. The key ``/SOURCE`` is appended to the names of
        the metrics.
        """
        fractions_by_suffix: dict[str, tuple[float, float]] = {}
        for name, source in self.sources.items():
            # A source that skips no prompts returns an empty mapping. Otherwise the only key is "".
            fractions = source.uniform_fractions().get("")
            if fractions is not None:
                fractions_by_suffix[f"/{name}"] = fractions
        return fractions_by_suffix

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the sources, and the weights and counts of `ShareOrder`."""
        return {
            "sources": {name: source.state_dict() for name, source in self.sources.items()},
            "weights": dict(self._order.weights),
            "counts": dict(self._order.counts),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> str | None:
        """Restore the position in all sources; raises UserError if the state has other sources.

        Returns the warnings of `PromptSource.load_state_dict` as one text, or None without warnings.
        """
        source_states = state.get("sources")
        if source_states is None or list(source_states) != list(self.sources):
            raise UserError(
                "the checkpoint was made with other sources of prompts",
                where="data.sources",
                expected=", ".join(source_states or ["data.train"]),
                got=", ".join(self.sources),
                fix="resume with the data of the checkpoint in the same order, or start a new run",
            )

        warnings: dict[str, str | None] = {}
        for name, source in self.sources.items():
            warnings[name] = source.load_state_dict(source_states[name])
        self._order.weights = dict(state["weights"])
        self._order.counts = dict(state["counts"])

        texts = [f"{name}: {warning}" for name, warning in warnings.items() if warning is not None]
        return "; ".join(texts) or None


TrainingPrompts = PromptSource | MixedPrompts
"""Prompts of `data.train`, or of `data.sources`."""


def prompt_data_sets(config: RunConfig) -> dict[str, str | tuple[str, ...]]:
    """Return the path or paths of each data set of training prompts, by configuration key."""
    if not config.data.sources:
        return {"data.train": config.data.train or ""}
    return {f"data.sources.{name}.path": source.path for name, source in config.data.sources.items()}


def load_training_prompts(
    config: RunConfig, tokenizer: PreTrainedTokenizerBase, files: TokenFiles
) -> tuple[TrainingPrompts, dict[str, PromptSource]]:
    """Load the training prompts; return them and a mapping from each data set's key to its source."""
    data_sets: dict[str, PromptSource] = {}
    for key, path in prompt_data_sets(config).items():
        data_sets[key] = load_prompts(config, key, path, tokenizer, files)
    if not config.data.sources:
        return data_sets["data.train"], data_sets

    # The data sets have the same order as the sources.
    sources = dict(zip(config.data.sources, data_sets.values(), strict=True))
    weights = {name: source.weight for name, source in config.data.sources.items()}
    schedule = {int(steps): step_weights for steps, step_weights in config.data.weights.items()}
    return MixedPrompts(sources, weights, schedule), data_sets
