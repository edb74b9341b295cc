"""Which experts the next layer will choose: two guesses, how good they are, and whether reading them early pays.

A layer's experts can be guessed before its turn: they are those of the token before, or those that its router chooses
for the residual stream as it stands one layer earlier. For a few tokens both are only compared with what is then
missing, and each layer keeps the better one. Then reading ahead is switched on and off in turns, and stays on if
tokens are faster so: a disk that is the bottleneck is kept busy, one that also serves the misses may be disturbed.
"""

from collections.abc import Callable, Sequence
from statistics import median

from torch import Tensor

Guess = Callable[[Tensor], list[int]]
"""Gives the experts that a layer's router chooses for the residual stream [1, 1, D] before the norm."""

SCOUTING = 8
"""Tokens for which guesses are compared and nothing is read ahead."""

TURN, TURNS = 4, 8
"""Reading ahead is off for some tokens, then on for as many, and so forth; then it is decided."""


class Foresight:
    """Guesses for every layer; ``lookahead`` says whether they are read, None: where that is measured to be a gain."""

    def __init__(self, lookahead: bool | None = None) -> None:
        self.lookahead = lookahead
        self.stream: Tensor | None = None
        self.tokens = 0
        self._guesses: dict[int, Sequence[list[int]]] = {}
        self._found: dict[int, list[int]] = {}  # by layer: how many missing experts each guess has named
        self._seconds: dict[bool, list[float]] = {False: [], True: []}

    def see(self, x_BTD: Tensor) -> None:
        """Note the residual stream that a feed-forward reads."""
        self.stream = x_BTD

    def begin(self) -> None:
        """Note that a token begins."""
        self.tokens += 1

    @property
    def on(self) -> bool:
        """Whether guesses are read now."""
        if self.lookahead is None:
            return self.tokens > SCOUTING and (self.tokens - SCOUTING - 1) // TURN % 2 == 1
        return self.lookahead and self.tokens > SCOUTING

    def guess(self, layer: int, previous: list[int], route: Guess) -> list[int]:
        """Return the experts of a layer that are to be read now; ``previous`` are those of the token before."""
        if self.lookahead is False or self.stream is None or self.stream.shape[:2] != (1, 1):
            return []
        if self.tokens <= SCOUTING:
            self._guesses[layer] = previous, route(self.stream)
        elif self.on:
            found = self._found.get(layer, [0, 0])
            if max(found):
                return previous if found[0] >= found[1] else route(self.stream)
        return []

    def check(self, layer: int, missing: list[int]) -> None:
        """Compare the guesses of a layer with the experts that were really missing."""
        guesses = self._guesses.pop(layer, ())
        for i, guess in enumerate(guesses):
            self._found.setdefault(layer, [0, 0])[i] += len(set(guess).intersection(missing))

    def end(self, seconds: float) -> None:
        """Note how long a token took; decide when there are enough of them."""
        if self.lookahead is not None or self.tokens <= SCOUTING:
            return
        self._seconds[self.on].append(seconds)
        if self.tokens >= SCOUTING + TURN * TURNS:
            off, on = self._seconds.values()
            guessed = any(max(found) for found in self._found.values())
            self.lookahead = guessed and bool(off and on) and median(on) < median(off)
