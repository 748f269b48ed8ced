"""Rewards for the tasks of reasoning-gym, by the rules of each task."""

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
    """Return the task's own score of an answer, from 0 to 1, for most tasks 0 or 1.

    The answer is the text between ``<answer>`` and ``</answer>``, or the complete response without these
    tags. ``metadata`` must come from a record that `megatron_rl.data.reasoning_gym` wrote; raises ValueError
    otherwise.
    """
    from reasoning_gym import get_score_answer_fn
    from reasoning_gym.utils import extract_answer

    if "entry" not in metadata:
        raise ValueError("a record without an entry: python -m megatron_rl.data.reasoning_gym writes them")
    entry = json.loads(metadata["entry"])
    answer = extract_answer(response)

    score_answer: Any = get_score_answer_fn(entry["metadata"]["source_dataset"])
    try:
        return float(score_answer(answer or response.strip(), entry))
    except Exception:
        # The rules of some tasks raise for an answer that they cannot parse: its score is 0. Rules that raise
        # for the correct answer, too, are broken: this second call raises, and the sample is invalid.
        score_answer(entry["answer"], entry)
        return 0.0
