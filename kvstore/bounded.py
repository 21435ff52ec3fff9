"""A dictionary that forgets: the one way in which memories of keys, answers and failures are kept bounded."""

from __future__ import annotations

from collections import OrderedDict
from typing import TypeVar

__all__ = ["BoundedDict"]

_K = TypeVar("_K")
_V = TypeVar("_V")


class BoundedDict(OrderedDict[_K, _V]):
    """A dictionary of at most ``most`` entries: a new one drops the oldest. An entry that is set again is the newest.

    To keep what was used last (and not what was set last), call ``move_to_end`` on a use.
    """

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    def __setitem__(self, key: _K, value: _V) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        if len(self) > self.most:
            self.popitem(last=False)
