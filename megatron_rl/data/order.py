"""The order in which a source draws its items: a permutation per epoch, known from the seed alone."""

from __future__ import annotations

import numpy

from megatron_rl.errors import UserError


class ShuffledOrder:
    """Draw the numbers 0 … count-1 epoch after epoch, each epoch in an order of its own.

    The order of an epoch is a function of (seed, epoch), so ``state_dict`` is two numbers and a restored
    order continues exactly. ``fingerprint`` names the items: state of other items is refused.
    """

    def __init__(self, count: int, seed: int, shuffle: bool, fingerprint: str) -> None:
        if count < 1:
            raise ValueError("an order needs at least one item")
        self.count, self.seed, self.shuffle, self.fingerprint = count, seed, shuffle, fingerprint
        self.epoch = 0
        self.position = 0
        self._order = self._permutation()

    def _permutation(self) -> list[int]:
        if not self.shuffle:
            return list(range(self.count))
        return numpy.random.default_rng([self.seed, self.epoch]).permutation(self.count).tolist()

    def next(self, count: int) -> list[int]:
        """Return the next ``count`` item numbers, crossing into further epochs as needed."""
        drawn: list[int] = []
        while len(drawn) < count:
            if self.position == self.count:
                self.epoch, self.position = self.epoch + 1, 0
                self._order = self._permutation()
            take = self._order[self.position : self.position + count - len(drawn)]
            drawn.extend(take)
            self.position += len(take)
        return drawn

    def state_dict(self) -> dict[str, int | str | bool]:
        """Return what a later order of the same items needs to go on from here."""
        return {
            "epoch": self.epoch,
            "position": self.position,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "fingerprint": self.fingerprint,
        }

    def load_state_dict(self, state: dict[str, int | str | bool]) -> None:
        """Go on from ``state``; raise a UserError when it belongs to other data, seed or shuffling."""
        current = self.state_dict()
        for name in ("fingerprint", "seed", "shuffle"):
            if state[name] != current[name]:
                raise UserError(
                    f"the checkpoint was made with another {'data set' if name == 'fingerprint' else name}",
                    where="data",
                    expected=f"{name} {state[name]}",
                    got=f"{name} {current[name]}",
                    fix="resume with the data, seed and shuffling of the checkpoint, or start a new run",
                )
        self.epoch, self.position = int(state["epoch"]), int(state["position"])
        self._order = self._permutation()
