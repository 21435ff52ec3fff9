"""Where blocks lie in a bucket, and what could be read of packs and notes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvstore.backends.s3.client import ObjectInfo
from kvstore.backends.s3.failures import S3Error
from kvstore.backends.s3.pack_format import PackEntry, Unreadable
from kvstore.backends.s3.pack_reader import PackReader
from kvstore.backends.s3.uses import name_digest
from kvstore.cli.holdings.base import HeldBlock
from kvstore.types import BlockKey

__all__ = ["Pack", "Packed", "Single", "last_used", "live_blocks", "names_of", "read_pack"]


@dataclass(frozen=True, slots=True)
class Single:
    """Where a block lies that has an object of its own."""

    name: str
    etag: str


@dataclass(frozen=True, slots=True)
class Packed:
    """Where a block lies in a pack.

    Attributes:
        name: Of the pack.
        offset: Of the record in it.
        live: Blocks of the pack that are not gone.
    """

    name: str
    offset: int
    live: int


@dataclass(frozen=True, slots=True)
class Pack:
    """A pack or a note, as far as it could be read.

    Attributes:
        info: What the service says of it.
        found: Its blocks, or pairs of pack and key that are gone; None if it could not be read.
        is_damaged: Whether nobody can ever read it.
        error: What the service said instead.
    """

    info: ObjectInfo
    found: Sequence[PackEntry | tuple[str, BlockKey]] | None = None
    is_damaged: bool = False
    error: str = ""


async def read_pack(reader: PackReader, info: ObjectInfo, kind: str) -> Pack:
    """Return what a pack or a note says, or why it can't be read."""
    try:
        found: Any = await (reader.pack(info) if kind == "pack" else reader.note(info))
    except Unreadable as error:
        return Pack(info, is_damaged=error.is_damage)
    except S3Error as error:
        return Pack(info, error=str(error))
    return Pack(info, found)


def live_blocks(pack: Pack, gone: set[tuple[str, BlockKey]], used_at: float) -> list[HeldBlock]:
    """Return the blocks of a pack that no note says are gone."""
    name = pack.info.key
    live = [each for each in pack.found or () if isinstance(each, PackEntry) and (name, each.key) not in gone]
    return [HeldBlock(each.key, each.size_bytes, used_at, Packed(name, each.offset, len(live))) for each in live]


def names_of(blocks: Sequence[HeldBlock]) -> dict[str, None]:
    """Return the names of the objects in which blocks lie, each once."""
    return dict.fromkeys(block.place.name for block in blocks)


def last_used(info: ObjectInfo, used: dict[int, int]) -> float:
    """Return when an object was written or used, seconds since the epoch; 0.0 if nobody knows."""
    return max(info.modified_at, float(used.get(name_digest(info.key), 0)))
