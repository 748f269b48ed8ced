"""Filters that remove responses before any reward is computed for them."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.config.sections.bounds import MAX_TOKENS, SHARE, TOKENS, WEIGHT
from megatron_rl.config.setting import setting

FILTER_KEY = "rollout.filters.function"
"""Configuration key of the user's own filter function."""

# Values of `on_filtered`.
DROP = "drop"
REWARD = "reward"


@dataclass(frozen=True)
class FiltersConfig:
    """Filters of finished responses. No reward is computed for a removed response.

    A response is counted for the first filter that removes it, in the order of the keys here. Evaluations are
    not filtered.
    """

    # Filters, all of them off by default: each changes the distribution of the training data.
    empty: bool = setting(False, "Remove responses without a visible character.")
    min_tokens: int = setting(
        0,
        "Remove responses with fewer tokens; 0 removes none.",
        unit="tokens",
        at_least=0,
        at_most=MAX_TOKENS,
    )
    max_repetition: float = setting(
        1.0,
        "Remove responses in which a larger share of token n-grams repeats earlier ones; 1 removes none.",
        **SHARE,
        advice="0.3 removes loops and few other texts",
    )
    ngram: int = setting(4, "Length of the n-grams of `max_repetition`.", **TOKENS)
    banned: tuple[str, ...] = setting((), "Remove responses that contain one of these texts.")
    function: str | None = setting(
        None,
        "Function that is called like a reward function, with the same limits, and returns whether to keep a "
        "response: module:function, or path/to/file.py:function.",
        unset="none",
        also_called={
            "slime": "rollout_sample_filter_path",
            "common": "add_postprocess_filter, postprocess_filter",
        },
        conversion="ours is called for one response: path/to/file.py:function",
    )
    # Use of the removed responses.
    on_filtered: str = setting(
        DROP,
        "Use of a removed response: its group is trained on without it (`drop`), or it has the reward "
        "`filtered_reward` (`reward`).",
        choices=(DROP, REWARD),
    )
    refill: int = setting(
        0,
        "Number of times that a removed response is sampled again, with another seed each time. A response "
        "that is removed the last time is used as `on_filtered` sets it.",
        unit="times",
        at_least=0,
        at_most=100,
        advice="0 samples none again; 1 to 4 replace most of what filters remove now and then",
    )
    filtered_reward: float = setting(0.0, "Reward of removed responses with `on_filtered: reward`.", **WEIGHT)

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the filters that are set, in the order in which they are applied."""
        # Cheap filters come first: the user's function runs only on responses that pass the others.
        is_set_by_name: dict[str, bool] = {
            "empty": self.empty,
            "min_tokens": self.min_tokens > 0,
            "max_repetition": self.max_repetition < 1,
            "banned": bool(self.banned),
            "function": self.function is not None,
        }

        return tuple(name for name, is_set in is_set_by_name.items() if is_set)

    @property
    def reward(self) -> float | None:
        """Return the reward of filtered responses, or None if `on_filtered` drops them from the batch."""
        if self.on_filtered == DROP:
            return None

        return self.filtered_reward
