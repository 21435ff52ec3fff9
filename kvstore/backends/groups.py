"""Division of blocks into groups that are moved together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol, TypeVar


class Sized(Protocol):
    """An object with a length."""

    @property
    def size_bytes(self) -> int:
        """Length in bytes."""


_S = TypeVar("_S", bound=Sized)


def grouped(blocks: Iterable[_S], count_max: int, bytes_max: int) -> Iterator[list[_S]]:
    """Divide blocks, in their order, into groups bounded in blocks and bytes.

    Args:
        blocks: May be endless; taken one by one.
        count_max: Most blocks of a group.
        bytes_max: Most bytes of a group; a single block may have more.
    """
    group: list[_S] = []
    size_bytes = 0
    for block in blocks:
        if group and (len(group) >= count_max or size_bytes + block.size_bytes > bytes_max):
            yield group
            group, size_bytes = [], 0
        group.append(block)
        size_bytes += block.size_bytes
    if group:
        yield group
