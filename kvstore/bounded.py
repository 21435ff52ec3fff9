"""A bounded dictionary, for remembered keys, answers and failures."""

from __future__ import annotations

from collections import OrderedDict
from typing import TypeVar

_K = TypeVar("_K")
_V = TypeVar("_V")


class BoundedDict(OrderedDict[_K, _V]):
    """A dictionary of at most ``most`` entries: a new entry drops the oldest. Setting a key again makes it the newest.

    For LRU order, call ``move_to_end`` on each use.
    """

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    def __setitem__(self, key: _K, value: _V) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        if len(self) > self.most:
            self.popitem(last=False)
