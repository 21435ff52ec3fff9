"""What lies on the medium of a tier, over all namespaces, whether an engine is at work there or not."""

from __future__ import annotations

import mmap
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Self

from kvstore.codec.record import RecordCodec, RecordFault, RecordHeader, decode_header
from kvstore.errors import RecordError
from kvstore.namespace import Namespace
from kvstore.types import BlockKey

__all__ = [
    "LITTER_MAX",
    "HeldBlock",
    "HeldNamespace",
    "HeldRecord",
    "Holdings",
    "Litter",
    "check_record",
    "record_room",
]

LITTER_MAX: Final = 100_000
"""Pieces of litter that one run takes, some 30 MB of memory; the next run goes on."""

_PLAIN_BYTES_MAX: Final = 1 << 32
"""Longest block that a header may claim; blocks have megabytes. A tier that takes in an archive is opened for blocks of
the claimed length."""


@dataclass(frozen=True, slots=True)
class HeldNamespace:
    """One namespace on a medium.

    Attributes:
        hex: Its digest.
        fields: What it stands for; None where the medium does not say.
        holder: Who uses it now; empty if nobody does.
        used_at: When it was last used, seconds since the epoch; 0.0 if nobody knows.
    """

    hex: str
    fields: dict[str, Any] | None = None
    holder: str = ""
    used_at: float = 0.0


@dataclass(frozen=True, slots=True)
class HeldBlock:
    """One block on a medium.

    Attributes:
        key: Its key (or the name that stands for it, where keys are hidden).
        size_bytes: Length of its record.
        used_at: When it was written or last used, as far as the medium knows; seconds since the epoch, 0.0 if it
            does not know.
        place: Where it lies, for whoever found it.
    """

    key: BlockKey
    size_bytes: int
    used_at: float
    place: Any = None


@dataclass(frozen=True, slots=True)
class HeldRecord:
    """What came of reading one block.

    Attributes:
        block: Which; with an empty key where the medium could not even say what lies there.
        data: The whole record, as it lies there, valid until the next one is asked for; None if there is none to see.
        error: Why it could not be read; empty if it was read, or has gone since it was found.
    """

    block: HeldBlock
    data: memoryview | None
    error: str = ""


@dataclass(frozen=True, slots=True)
class Litter:
    """Something that a writer which died has left.

    Attributes:
        name: Where it lies, from the tier's directory.
        why: What it is.
        size_bytes: Its length.
    """

    name: str
    why: str
    size_bytes: int


class Holdings(ABC):
    """Reads a medium beside running engines, without taking anything from them.

    Attributes:
        backend: Name of the backend.
        header_bytes: Length of the headers of records there.
        ttl_s: Blocks unused for so long are expired by the tier's own configuration; 0.0 for none.
        knows_holders: Whether the medium knows who uses a namespace.
    """

    backend: str
    header_bytes: int
    ttl_s: float = 0.0
    knows_holders: ClassVar[bool] = True

    @abstractmethod
    def namespaces(self) -> list[HeldNamespace]:
        """Return all namespaces, those used last first.

        Raises:
            BackendError: The medium can't be read.
        """

    @abstractmethod
    def blocks(self, namespace: HeldNamespace) -> Iterator[HeldBlock]:
        """Yield the blocks of a namespace."""

    @abstractmethod
    def read(self, namespace: HeldNamespace, block: HeldBlock) -> memoryview | None:
        """Return a whole record, as it lies there; None if it has gone. Valid until the next call.

        Raises:
            OSError: It can't be read.
        """

    def records(self, namespace: HeldNamespace) -> Iterator[HeldRecord]:
        """Yield the records of a namespace, each read whole, in the order of :meth:`blocks`.

        A medium that answers request by request says of each block that it can't read why, and goes on.

        Raises:
            OSError: The medium can't be read.
            BackendError: It does not answer any more.
        """
        for block in self.blocks(namespace):
            yield HeldRecord(block, self.read(namespace, block))

    @abstractmethod
    def set_aside(self, namespace: HeldNamespace, blocks: Sequence[HeldBlock]) -> int:
        """Take damaged records out of the way, unless they have changed since; return how many were."""

    @abstractmethod
    def remove(self, namespace: HeldNamespace, blocks: Sequence[HeldBlock] | None) -> int:
        """Remove blocks (None: all) of a namespace that nobody uses; return how many. None, if somebody uses it."""

    @abstractmethod
    def litter(self) -> list[Litter]:
        """Return what dead writers have left. It may end soon after ``LITTER_MAX`` pieces: more would not be taken."""

    @abstractmethod
    def sweep(self, litter: Sequence[Litter]) -> int:
        """Remove litter; return how much of it was removed."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the medium. Idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def check_record(record: memoryview, namespace: str, key: BlockKey, *, alignment: int) -> RecordHeader:
    """Check a record at rest: all that can be checked without the keys and codecs of its writer.

    Args:
        record: The whole record.
        namespace: Digest of the namespace that it has to be of, in hexadecimal.
        key: Key that it has to be of.
        alignment: Unit of a record's length on the medium.

    Returns:
        Its header.

    Raises:
        RecordError: It is not whole, not intact, or not of this namespace and key.
    """
    found = decode_header(record[:256])
    if found.header_bytes % 256 or found.header_bytes < 256 or found.header_bytes > len(record):
        raise RecordError(f"The record ends within its header of {found.header_bytes} bytes.", RecordFault.LENGTH)
    if found.plain_bytes > _PLAIN_BYTES_MAX:
        raise RecordError(
            f"The record claims a block of {found.plain_bytes} bytes. Expected at most {_PLAIN_BYTES_MAX}.",
            RecordFault.GEOMETRY,
        )
    codec = RecordCodec(
        Namespace.of_digest(bytes.fromhex(namespace)), header_bytes=found.header_bytes, alignment=alignment
    )
    header, payload = record[: found.header_bytes], record[found.header_bytes :]
    return codec.check(key, header, payload, len(record), _accept_all, decodes=False)


def record_room(size_bytes: int) -> memoryview:
    """Return room to read a record into, of a length that a medium claims.

    It becomes memory page by page as it is written to, so a claim that nothing stands behind costs addresses only.

    Raises:
        OSError: There are no addresses left for it.
    """
    if not size_bytes:
        return memoryview(b"")
    return memoryview(mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


def _accept_all(header: RecordHeader) -> str:
    """Refuse no codec and no seal: the payload is checked as it is stored."""
    return ""
