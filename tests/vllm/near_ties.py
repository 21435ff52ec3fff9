"""Near ties of greedy answers, between which engines that add in another order may decide differently."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

NEAR: Final = 1e-3
"""Log probabilities this close are a tie, which the order of a sum may decide."""


def before_tie(tokens: Sequence[int], logprobs: Iterable[Iterable[float]]) -> list[int]:
    """Return the tokens before the first near tie, by the log probabilities of the likeliest ones of each position."""
    certain: list[int] = []
    for token, likeliest in zip(tokens, logprobs, strict=True):
        first, second, *_ = sorted(likeliest, reverse=True)
        if first - second < NEAR:
            break
        certain.append(token)
    return certain
