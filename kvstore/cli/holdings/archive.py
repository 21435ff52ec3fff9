"""Archives of records: a tar file that another tier, on another medium, can take in.

::

    kvstore-archive.json            {"format": 1, "backend": …}: what it is
    <namespace>/namespace.json      what the namespace stands for
    <namespace>/<key, hex>.kv       a record as docs/format.md describes it, without padding at its end
    kvstore-end.json                {"blocks": …, "size_bytes": …}: without it the archive was cut off

Every record is checked before it is written to an archive, and again before it is put into a tier.
"""

from __future__ import annotations

import io
import json
import mmap
import re
import struct
import tarfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import IO, Any, Final

from kvstore.cli.holdings.base import HeldNamespace, Holdings, check_record
from kvstore.codec.checksum import header_checksum
from kvstore.codec.record import HEADER_BYTES, RecordHeader
from kvstore.errors import KVStoreError, RecordError
from kvstore.types import KEY_BYTES_MAX, BlockKey

__all__ = ["ArchiveError", "ArchivedBlock", "ExportResult", "aligned_to", "read_archive", "write_archive"]

_FORMAT: Final = 1
_START: Final = "kvstore-archive.json"
_END: Final = "kvstore-end.json"
_NAMESPACE: Final = re.compile(r"([0-9a-f]{64})/namespace\.json")
_BLOCK: Final = re.compile(rf"([0-9a-f]{{64}})/((?:[0-9a-f]{{2}}){{1,{KEY_BYTES_MAX}}})\.kv")
_DOCUMENT_BYTES_MAX: Final = 1 << 20
"""Longest JSON document that is parsed, into objects that take twenty times as much; those we write have kilobytes."""
_RECORD_BYTES_MAX: Final = 1 << 32
"""Longest record that is taken into memory; blocks have megabytes."""

_PLAIN_FILES: Final = frozenset({tarfile.REGTYPE, tarfile.AREGTYPE})
_NOTHING: Final = memoryview(b"")

# Where docs/format.md has these fields.
_HEADER_BYTES_FIELD: Final = struct.Struct("<I")
_HEADER_BYTES_AT: Final = 12
_CHECKSUM_FIELD: Final = struct.Struct("<Q")
_CHECKSUM_AT: Final = 248


class ArchiveError(KVStoreError):
    """A file is no archive, or was cut off."""


@dataclass(frozen=True, slots=True)
class ArchivedBlock:
    """One block of an archive; it has passed all checks.

    Attributes:
        namespace: Its namespace.
        key: Its key.
        header: The header of its record.
        record: The record: ``header.header_bytes`` bytes of header and the payload.
    """

    namespace: HeldNamespace
    key: BlockKey
    header: RecordHeader
    record: memoryview


@dataclass(slots=True)
class ExportResult:
    """What was written.

    Attributes:
        blocks: Blocks in the archive.
        size_bytes: Bytes of their records.
        gone: Blocks that were evicted before it was their turn.
        damaged: Blocks that did not verify, and are not in the archive, with the reason.
        unread: Blocks that the medium did not give, and that are not in the archive, with the reason.
    """

    blocks: int = 0
    size_bytes: int = 0
    gone: int = 0
    damaged: list[tuple[HeldNamespace, BlockKey, RecordError]] = field(default_factory=list)
    unread: list[tuple[HeldNamespace, BlockKey, str]] = field(default_factory=list)


def write_archive(
    holdings: Holdings,
    namespaces: Iterable[HeldNamespace],
    file: IO[bytes] | None,
    on_block: Callable[[], None] | None = None,
) -> ExportResult:
    """Write the blocks of some namespaces to an archive.

    Args:
        holdings: Where they lie.
        namespaces: Which.
        file: The archive, written from where it stands, never sought in; None: only check what would be written.
        on_block: Told of each block.

    Raises:
        OSError: The archive can't be written, or a block can't be read.
    """
    result = ExportResult()
    with tarfile.open(fileobj=file or io.BytesIO(), mode="w|", format=tarfile.PAX_FORMAT) as tar:
        _add(tar, _START, _document({"format": _FORMAT, "backend": holdings.backend}))
        for namespace in namespaces:
            document = {"digest": namespace.hex, "fields": namespace.fields}
            _add(tar, f"{namespace.hex}/namespace.json", _document(document))
            for held in holdings.records(namespace):
                block, record = held.block, held.data
                if held.error:
                    result.unread.append((namespace, block.key, held.error))
                    continue
                if record is None:
                    result.gone += 1
                    continue
                try:
                    found = check_record(record, namespace.hex, block.key, alignment=holdings.header_bytes)
                except RecordError as error:
                    result.damaged.append((namespace, block.key, error))
                    continue
                size_bytes = found.header_bytes + found.stored_bytes
                if file is not None:
                    created_s = found.created_ns // 10**9
                    _add(tar, f"{namespace.hex}/{block.key.hex()}.kv", record[:size_bytes], created_s)
                result.blocks += 1
                result.size_bytes += size_bytes
                if on_block is not None:
                    on_block()
        _add(tar, _END, _document({"blocks": result.blocks, "size_bytes": result.size_bytes}))
    return result


def read_archive(
    file: IO[bytes], on_damage: Callable[[HeldNamespace, BlockKey, RecordError], None]
) -> Iterator[ArchivedBlock]:
    """Yield the blocks of an archive that are whole and intact, in its order.

    Args:
        file: The archive; it is read once, from front to end.
        on_damage: Told of blocks that do not verify; they are not yielded.

    Raises:
        ArchiveError: It is no archive, or it ends before its end; every block before that was yielded.
    """
    # Only one at a time is remembered, however many an archive claims: they come one after the other.
    namespace = HeldNamespace("")
    members = _members(file)
    name, data = next(members, ("", _NOTHING))
    if name != _START or _parsed(name, data).get("format") != _FORMAT:
        raise ArchiveError(f"This is no archive of format {_FORMAT}. Give a file that 'kvstore export' wrote.")
    is_ended = False
    for name, data in members:
        if match := _NAMESPACE.fullmatch(name):
            fields = _parsed(name, data).get("fields")
            namespace = HeldNamespace(match[1], fields if isinstance(fields, dict) else None)
        elif match := _BLOCK.fullmatch(name):
            if namespace.hex != match[1]:
                namespace = HeldNamespace(match[1])
            key = bytes.fromhex(match[2])
            try:
                header = check_record(data, namespace.hex, key, alignment=1)
            except RecordError as error:
                on_damage(namespace, key, error)
                continue
            yield ArchivedBlock(namespace, key, header, data)
        is_ended = name == _END
    if not is_ended:
        raise ArchiveError("The archive was cut off: its end is missing. What was whole has been read; export it anew.")


def aligned_to(block: ArchivedBlock, header_bytes: int) -> list[memoryview] | None:
    """Return header and payload of a record for a medium with headers of a length.

    None if the record is sealed for another one: its seal covers the length.
    """
    is_same = block.header.header_bytes == header_bytes
    if block.header.mac_key_id and not is_same:
        return None
    payload = block.record[block.header.header_bytes :]
    # A copy into whole pages, as direct I/O takes no other addresses; what came out of a tar file lies anywhere.
    record = memoryview(mmap.mmap(-1, header_bytes + len(payload)))
    header = record[:header_bytes]
    kept = header_bytes if is_same else HEADER_BYTES
    header[:kept] = block.record[:kept]
    record[header_bytes:] = payload
    if not is_same:
        _HEADER_BYTES_FIELD.pack_into(header, _HEADER_BYTES_AT, header_bytes)
        _CHECKSUM_FIELD.pack_into(header, _CHECKSUM_AT, header_checksum(bytes(header[:_CHECKSUM_AT])))
    return [header, record[header_bytes:]]


def _members(file: IO[bytes]) -> Iterator[tuple[str, memoryview]]:
    """Yield name and content of the members of a tar file that are ours, however it ends."""
    try:
        with tarfile.open(fileobj=file, mode="r|") as tar:
            while (member := tar.next()) is not None:
                _forget_members(tar)
                limit = _RECORD_BYTES_MAX if member.name.endswith(".kv") else _DOCUMENT_BYTES_MAX
                # Whatever else somebody has put there is passed over; nothing is ever extracted to a path. Of a sparse
                # file only the claimed length is large: it would be made of zeros, in memory.
                if member.type not in _PLAIN_FILES or member.issparse() or member.size > limit:
                    continue
                content = tar.extractfile(member)
                data = b"" if content is None else content.read()
                if len(data) < member.size:
                    return
                yield member.name, memoryview(data)
    except tarfile.StreamError as error:
        raise ArchiveError(f"The archive can't be read: {error}. Export it anew.") from error
    except tarfile.TarError:
        # Not a tar file, or one that ends within a header: the same as one that ends between two members.
        return
    except (ValueError, ArithmeticError, LookupError) as error:
        # The package takes some fields of extended headers as they are: sizes that are no numbers, maps cut short.
        raise ArchiveError(f"The archive is damaged: a header can't be read ({error}). Export it anew.") from error


def _add(tar: tarfile.TarFile, name: str, data: memoryview | bytes, at_s: int = 0) -> None:
    info = tarfile.TarInfo(name)
    info.size, info.mode, info.mtime = len(data), 0o600, at_s
    tar.addfile(info, io.BytesIO(data))
    _forget_members(tar)


def _forget_members(tar: Any) -> None:
    """Drop what the package keeps of every member that has passed, a kilobyte each: archives have millions."""
    tar.members.clear()


def _document(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode()


def _parsed(name: str, data: memoryview) -> dict[str, Any]:
    try:
        value = json.loads(bytes(data))
    except (ValueError, RecursionError) as error:
        raise ArchiveError(f"{name} in the archive is no JSON. Export it anew.") from error
    return value if isinstance(value, dict) else {}
