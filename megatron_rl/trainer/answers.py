"""What answers to the same prompts say of a policy: pass@k, majority@k, their intervals, and diversity."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy
from numpy import ndarray

RESAMPLES = 1000
SUBSETS = 200
"""Random subsets of a prompt's answers that majority@k is a mean over, where k is not all of them."""
_TAIL = 2.5


def pass_at(right: ndarray, count: int) -> ndarray:
    """Return for each prompt the probability that one of ``count`` answers is right: [P].

    ``right`` [P, n] is 1 for right answers. Of n answers, of which c are right, it is
    1 - C(n - c, k) / C(n, k), the unbiased estimator of Chen et al. 2021 (arXiv 2107.03374).

    Example:
        >>> pass_at(numpy.array([[1, 0, 0, 0]]), 2)
        array([0.5])
    """
    samples = right.shape[1]
    # The chance that no draw is right, as a product: the binomials themselves overflow.
    wrong = samples - right.sum(axis=1)
    miss = numpy.ones(len(right))
    for drawn in range(count):
        miss *= numpy.clip(wrong - drawn, 0, None) / (samples - drawn)
    return 1.0 - miss


def majority_at(right: ndarray, votes: Sequence[Sequence[str]], count: int) -> ndarray:
    """Return for each prompt the probability that the most frequent of ``count`` answers is right: [P].

    ``votes`` are the answers themselves, n for each prompt. Of k < n answers it is a mean over random
    subsets, the same in every call; answers that are equally frequent share the vote (Wang et al. 2022,
    arXiv 2203.11171).
    """
    generator = numpy.random.default_rng(0)
    samples = right.shape[1]
    result = numpy.zeros(len(right))
    for place, texts in enumerate(votes):
        _, answers = numpy.unique(numpy.asarray(texts, dtype=object), return_inverse=True)
        kinds = int(answers.max()) + 1
        credit = numpy.bincount(answers, right[place], kinds) / numpy.bincount(answers, minlength=kinds)
        if count == samples:
            subsets = answers[None, :]
        else:
            subsets = answers[generator.random((SUBSETS, samples)).argsort(axis=1)[:, :count]]
        counts = (subsets[:, :, None] == numpy.arange(kinds)).sum(axis=1)
        winners = counts == counts.max(axis=1, keepdims=True)
        result[place] = ((winners * credit).sum(axis=1) / winners.sum(axis=1)).mean()
    return result


def intervals(values: Mapping[str, ndarray]) -> dict[str, tuple[float, float]]:
    """Return a 95% bootstrap interval of the mean over prompts of each [P] array.

    Prompts are drawn with replacement, the same draws for all arrays and in every call.
    """
    stacked = numpy.stack(list(values.values()), axis=1)
    generator = numpy.random.default_rng(0)
    means = [
        stacked[generator.integers(0, len(stacked), len(stacked))].mean(axis=0) for _ in range(RESAMPLES)
    ]
    low, high = numpy.percentile(means, (_TAIL, 100 - _TAIL), axis=0)
    return {name: (float(low[place]), float(high[place])) for place, name in enumerate(values)}


def diversity(responses: Sequence[ndarray], samples: int) -> dict[str, float]:
    """Return how diverse responses are, given as token ids, ``samples`` of each prompt running.

    ``distinct_n``: different n-grams of all n-grams in the answers to a prompt, mean over prompts (Li et al.
    2016, arXiv 1510.03055). ``ngram_entropy``: entropy of the 2-grams of all responses, in nats.
    ``repetition``: share of a response's 4-grams that stand in it before, mean over responses.
    """
    groups = [responses[start : start + samples] for start in range(0, len(responses), samples)]
    pairs = _ngrams(responses, 2)
    _, counts = numpy.unique(pairs, axis=0, return_counts=True)
    shares = counts / max(counts.sum(), 1)
    return {
        "distinct_1": _mean([_distinct(_ngrams(group, 1)) for group in groups]),
        "distinct_2": _mean([_distinct(_ngrams(group, 2)) for group in groups]),
        "ngram_entropy": float(-(shares * numpy.log(shares)).sum()),
        "repetition": 1.0 - _mean([_distinct(_ngrams([response], 4)) for response in responses]),
    }


def _ngrams(responses: Sequence[ndarray], length: int) -> ndarray:
    """Return the n-grams of each response, one below the other."""
    windows = [
        numpy.lib.stride_tricks.sliding_window_view(response, length)
        for response in responses
        if len(response) >= length
    ]
    return numpy.concatenate(windows) if windows else numpy.zeros((0, length), numpy.int64)


def _distinct(ngrams: ndarray) -> float:
    """Return the share of different n-grams, 1 where there are none."""
    return len(numpy.unique(ngrams, axis=0)) / len(ngrams) if len(ngrams) else 1.0


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan
