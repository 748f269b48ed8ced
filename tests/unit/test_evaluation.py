"""Evaluation: estimates against enumeration, diversity, best checkpoints, and the table of the command."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import numpy
import pytest

from megatron_rl.config.checkpoint_meta import META, prune_checkpoints
from megatron_rl.config.schema import CheckpointConfig
from megatron_rl.config.sections.evaluation import DIVERSITY, EvaluationSetConfig
from megatron_rl.trainer import evaluation
from megatron_rl.trainer.offline import format_metrics_table
from megatron_rl.trainer.state import Best

RIGHT = numpy.array([[1, 0, 0, 1, 0, 0], [0, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 1]])
VOTES = [list("aabcbb"), list("abcdef"), list("xxxxxx"), list("yyzzzw")]


@pytest.mark.parametrize("count", [1, 2, 3, 6])
def test_pass_at_k_is_the_mean_over_all_subsets(count: int) -> None:
    subsets = list(combinations(range(6), count))
    expected = [numpy.mean([row[list(subset)].any() for subset in subsets]) for row in RIGHT]
    assert evaluation.pass_at_k(RIGHT, count) == pytest.approx(expected)
    many = numpy.zeros((1, 4000))
    many[0, 0] = 1
    assert evaluation.pass_at_k(many, 1000)[0] == pytest.approx(0.25), "where binomials overflow"


@pytest.mark.parametrize("count", [2, 3, 6])
def test_majority_at_k_is_near_the_mean_over_all_subsets(count: int) -> None:
    def vote(texts: list[str], right: numpy.ndarray, subset: tuple[int, ...]) -> float:
        counts = {text: sum(texts[place] == text for place in subset) for text in texts}
        winners = [text for text in sorted(set(texts)) if counts[text] == max(counts.values())]
        return float(
            numpy.mean(
                [right[[place for place in range(6) if texts[place] == text]].mean() for text in winners]
            )
        )

    subsets = list(combinations(range(6), count))
    expected = [
        numpy.mean([vote(texts, right, subset) for subset in subsets])
        for texts, right in zip(VOTES, RIGHT, strict=True)
    ]
    estimated = evaluation.majority_at_k(RIGHT, VOTES, count)
    assert estimated == pytest.approx(expected, abs=0 if count == 6 else 0.07)
    assert (estimated == evaluation.majority_at_k(RIGHT, VOTES, count)).all(), "the same in every call"


def test_intervals_hold_the_mean_and_shrink_with_prompts() -> None:
    def width(count: int) -> float:
        values = {"even": numpy.arange(count) % 2, "same": numpy.ones(count)}
        low, high = evaluation.bootstrap_intervals(values)["even"]
        assert low < 0.5 < high and evaluation.bootstrap_intervals(values)["same"] == (1.0, 1.0)
        return high - low

    assert width(400) == pytest.approx(2 * 1.96 * 0.5 / 20, rel=0.1)
    assert width(1600) == pytest.approx(width(400) / 2, rel=0.15)


def test_diversity_of_known_answers() -> None:
    def of(*texts: str, samples: int = 1) -> dict[str, float]:
        responses = [numpy.frombuffer(text.encode(), numpy.uint8) for text in texts]
        return evaluation.diversity_statistics(responses, samples)

    assert of("aaaa", "abcd", samples=2)["distinct_1"] == pytest.approx(4 / 8)
    assert of("aaaa", "abcd")["distinct_2"] == pytest.approx((1 / 3 + 1) / 2)
    assert of("ab", "ab", "ac", "ac")["ngram_entropy"] == pytest.approx(numpy.log(2))
    assert of("abcdabcd", "abcdefgh")["repetition"] == pytest.approx((1 / 5 + 0) / 2)
    assert tuple(of("", "")) == DIVERSITY and of("", "")["repetition"] == 0.0


def test_the_numbers_of_samples() -> None:
    assert EvaluationSetConfig("a").sample_counts() == ()
    assert EvaluationSetConfig("a", samples=2).sample_counts() == (2,)
    assert EvaluationSetConfig("a", samples=8).sample_counts() == (2, 4, 8)
    assert EvaluationSetConfig("a", samples=12).sample_counts() == (2, 4, 8, 12)


def test_the_best_measurements_stay(tmp_path: Path) -> None:
    config, best = CheckpointConfig(best="eval/a/accuracy", keep_best=2), Best()
    measured = {1: 0.5, 2: 0.4, 3: 0.5, 4: 0.7, 5: 0.1}
    assert [best.record(step, value, config) for step, value in measured.items()] == [
        True,
        True,
        True,
        True,
        False,
    ]
    assert best.kept == [(4, 0.7), (1, 0.5)] and best.waited == 1
    lowest = Best()
    for step, value in measured.items():
        lowest.record(step, value, CheckpointConfig(best="x", best_is="lowest"))
    assert lowest == Best([(5, 0.1)], 0)

    for step in measured:
        (tmp_path / f"step_{step}").mkdir()
        (tmp_path / f"step_{step}" / META).write_text("{}")
    prune_checkpoints(tmp_path / "step_5", 1, [step for step, _ in best.kept])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_1", "step_4", "step_5"]


def test_the_table_of_several_models() -> None:
    first = {"eval/a/accuracy": 0.5, "eval/a/accuracy_low": 0.4, "eval/a/accuracy_high": 0.61}
    assert format_metrics_table(["x"], [first]) == "eval/a/accuracy  0.5000 (0.400-0.610)"
    lines = format_metrics_table(["x", "y"], [first, {"eval/a/reward": 1.0}]).splitlines()
    assert lines[:2] == ["[1] x", "[2] y"] and lines[2].split() == ["[1]", "[2]"]
    assert lines[3].split() == ["eval/a/accuracy", "0.5000", "(0.400-0.610)", "-"]
    assert lines[4].split() == ["eval/a/reward", "-", "1.0000"]
