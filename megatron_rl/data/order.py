"""Order in which a source returns its items, and the rows of tokens that it returns.

The one idea: the order of an epoch is a function of (seed, epoch), so the state of a source is two
numbers. A fingerprint of the items makes sure that a restored state belongs to the same items.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import numpy
import torch

from megatron_rl.errors import UserError


class ShuffledOrder:
    """Order of the item numbers 0 … count-1, epoch after epoch, with a permutation per epoch.

    ``fingerprint`` identifies the items: a state of other items is refused.

    Example:
        >>> order = ShuffledOrder(3, seed=1, shuffle=False, fingerprint="a")
        >>> order.next(4), order.epoch
        ([0, 1, 2, 0], 1)
    """

    def __init__(self, count: int, seed: int, shuffle: bool, fingerprint: str) -> None:
        if count < 1:
            raise ValueError("an order needs at least one item")
        self.count = count
        self.seed = seed
        self.shuffle = shuffle
        self.fingerprint = fingerprint
        self.epoch = 0
        self.position = 0
        self._order = self._permutation()

    def _permutation(self) -> list[int]:
        if not self.shuffle:
            return list(range(self.count))
        return numpy.random.default_rng([self.seed, self.epoch]).permutation(self.count).tolist()

    def next(self, count: int) -> list[int]:
        """Return the next ``count`` item numbers, crossing into further epochs as needed."""
        numbers: list[int] = []
        while len(numbers) < count:
            # The next epoch begins with its first item, not with the last item of this one: a source at the
            # end of its data is still in the epoch that it has finished.
            if self.position == self.count:
                self.epoch += 1
                self.position = 0
                self._order = self._permutation()

            remaining = count - len(numbers)
            selected = self._order[self.position : self.position + remaining]
            numbers.extend(selected)
            self.position += len(selected)
        return numbers

    def state_dict(self) -> dict[str, int | str | bool]:
        """Return the state from which an order of the same items continues."""
        return {
            "epoch": self.epoch,
            "position": self.position,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "fingerprint": self.fingerprint,
        }

    def load_state_dict(self, state: dict[str, int | str | bool]) -> None:
        """Continue from ``state``; raises UserError for a state of other data, seed or shuffling."""
        # Compare the fingerprint first: with other data, seed and shuffling do not matter.
        current = self.state_dict()
        for name in ("fingerprint", "seed", "shuffle"):
            if state[name] == current[name]:
                continue
            noun = "data set" if name == "fingerprint" else name
            raise UserError(
                f"the checkpoint was made with another {noun}",
                where="data",
                expected=f"{name} {state[name]}",
                got=f"{name} {current[name]}",
                fix="resume with the data, seed and shuffling of the checkpoint, or start a new run",
            )

        self.epoch = int(state["epoch"])
        self.position = int(state["position"])
        self._order = self._permutation()


def ragged(rows: Sequence[numpy.ndarray]) -> torch.Tensor:
    """Concatenate rows of token ids into one [N] int64 tensor."""
    return torch.from_numpy(numpy.concatenate(rows).astype(numpy.int64))


def fingerprint(lengths: Sequence[int], rows: Iterable[numpy.ndarray]) -> str:
    """Return 16 hexadecimal digits that depend on the number, order, lengths and token ids of rows."""
    digest = hashlib.sha256(numpy.asarray(lengths, numpy.int64).tobytes())
    for ids in rows:
        digest.update(ids.tobytes())
    return digest.hexdigest()[:16]
