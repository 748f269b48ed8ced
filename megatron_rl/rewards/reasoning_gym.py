"""Rewards for problems of reasoning-gym, with the scoring rules of each task."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def score(
    *,
    prompt: str,
    response: str,
    ground_truth: Any,
    metadata: Mapping[str, Any],
) -> float:
    """Compute the score of a response by the rules of its task: from 0 to 1, for most tasks 0 or 1.

    The answer is the text between ``<answer>`` and ``</answer>``, or the complete response without these
    tags. Raises ValueError unless ``metadata`` comes from a record that `megatron_rl.data.reasoning_gym`
    wrote.
    """
    from reasoning_gym import get_score_answer_fn
    from reasoning_gym.utils import extract_answer

    if "entry" not in metadata:
        raise ValueError(
            'metadata has no "entry": write the data set with python -m megatron_rl.data.reasoning_gym'
        )
    problem = json.loads(metadata["entry"])
    answer = extract_answer(response) or response.strip()

    score_answer: Any = get_score_answer_fn(problem["metadata"]["source_dataset"])
    try:
        return float(score_answer(answer, problem))
    except Exception:
        # The rules of some tasks raise for an answer that they cannot parse: its score is 0. Rules that raise
        # even for the correct answer are broken: the second call raises again, and the sample is invalid.
        score_answer(problem["answer"], problem)
        return 0.0
