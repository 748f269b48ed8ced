"""Rewards for the tasks of reasoning-gym, by the rules of each task."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def score(*, prompt: str, response: str, ground_truth: Any, metadata: Mapping[str, Any]) -> float:
    """Return what the task itself gives an answer, from 0 to 1, most often 0 or 1.

    The answer is what stands between ``<answer>`` and ``</answer>``, or else the whole response.
    ``metadata`` is of a record that `megatron_rl.data.reasoning_gym` wrote; raises ValueError of another.
    """
    from reasoning_gym import get_score_answer_fn
    from reasoning_gym.utils import extract_answer

    if "entry" not in metadata:
        raise ValueError("a record without an entry: python -m megatron_rl.data.reasoning_gym writes them")
    entry = json.loads(metadata["entry"])
    answer = extract_answer(response)
    judge: Any = get_score_answer_fn(entry["metadata"]["source_dataset"])
    try:
        return float(judge(answer or response.strip(), entry))
    except Exception:
        # The rules of some tasks raise for an answer that they cannot read; those that fail for the right
        # answer, too, have failed.
        judge(entry["answer"], entry)
        return 0.0
