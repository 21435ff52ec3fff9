"""Archives of records: a tar file that can be imported into another tier on another medium.

::

    kvstore-archive.json            {"format": 1, "backend": …}
    <namespace>/namespace.json      the fields of the namespace
    <namespace>/<key, hex>.kv       a record as docs/format.md describes it, without padding at its end
    kvstore-end.json                {"blocks": …, "size_bytes": …}: missing from a truncated archive

Every record is verified before it is written to an archive, and again before it is stored in a tier.
"""

from __future__ import annotations

import io
import json
import mmap
import re
import tarfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import IO, Any, Final

from kvstore.cli.holdings.medium import Medium, check_record
from kvstore.codec.record import HEADER_BYTES, RecordHeader, moved_header
from kvstore.errors import KVStoreError, RecordError
from kvstore.types import KEY_BYTES_MAX, BlockKey, NamespaceInfo

_FORMAT: Final = 1
_START: Final = "kvstore-archive.json"
_END: Final = "kvstore-end.json"
_NAMESPACE: Final = re.compile(r"([0-9a-f]{64})/namespace\.json")
_BLOCK: Final = re.compile(rf"([0-9a-f]{{64}})/((?:[0-9a-f]{{2}}){{1,{KEY_BYTES_MAX}}})\.kv")
_DOCUMENT_BYTES_MAX: Final = 1 << 20
"""Longest JSON document to parse; parsed objects take twenty times its length. Real documents have kilobytes."""
_RECORD_BYTES_MAX: Final = 1 << 32
"""Longest record to read into memory; blocks have megabytes."""

_EMPTY_READS_MAX: Final = 16
"""Maximum reads at the end of a file; a complete archive causes at most two."""

_PLAIN_FILES: Final = frozenset({tarfile.REGTYPE, tarfile.AREGTYPE})
_NOTHING: Final = memoryview(b"")


class ArchiveError(KVStoreError):
    """A file is not an archive, is truncated, or can't be read."""


@dataclass(frozen=True, slots=True)
class ArchivedBlock:
    """One verified block of an archive; ``record`` has its header and payload without padding."""

    namespace: NamespaceInfo
    key: BlockKey
    header: RecordHeader
    record: memoryview

    @property
    def size_bytes(self) -> int:
        return len(self.record)


@dataclass(slots=True)
class ExportResult:
    """Result of an export."""

    blocks: int = 0  # Blocks in the archive.
    size_bytes: int = 0  # Bytes of their records.
    gone: int = 0  # Blocks that were evicted before they were read.
    damaged: list[dict[str, Any]] = field(default_factory=list)
    """One row per block that did not verify; it is not in the archive."""
    unread: list[dict[str, Any]] = field(default_factory=list)
    """One row per block that could not be read; it is not in the archive."""


def write_archive(
    medium: Medium,
    namespaces: Iterable[NamespaceInfo],
    file: IO[bytes] | None,
    on_block: Callable[[int], None] = lambda size_bytes: None,
) -> ExportResult:
    """Write the blocks of some namespaces to a file, without seeking; without a file, only verify the records.

    ``on_block`` is called with the length of each record.

    Raises:
        OSError: The archive cannot be written.
        BackendError: The medium no longer answers.
    """
    result = ExportResult()
    with tarfile.open(fileobj=file or io.BytesIO(), mode="w|", format=tarfile.PAX_FORMAT) as tar:
        _add(tar, _START, _document({"format": _FORMAT, "backend": medium.tier.backend}))
        for namespace in namespaces:
            document = {"digest": namespace.hex, "fields": namespace.fields}
            _add(tar, f"{namespace.hex}/namespace.json", _document(document))
            for held in medium.records(namespace):
                row = {"namespace": namespace.hex, "key": held.block.key.hex()}
                if held.error is not None:
                    result.unread.append(row | {"what": str(held.error)})
                elif held.damage is not None:
                    result.damaged.append(row | {"fault": str(held.damage.cause), "what": str(held.damage)})
                elif held.header is None or held.data is None:
                    result.gone += 1
                else:
                    size_bytes = held.header.header_bytes + held.header.stored_bytes
                    if file is not None:
                        created_s = held.header.created_ns // 10**9
                        _add(tar, f"{namespace.hex}/{held.block.key.hex()}.kv", held.data[:size_bytes], created_s)
                    result.blocks += 1
                    result.size_bytes += size_bytes
                    on_block(size_bytes)
        _add(tar, _END, _document({"blocks": result.blocks, "size_bytes": result.size_bytes}))
    return result


def read_archive(
    file: IO[bytes], on_damage: Callable[[NamespaceInfo, BlockKey, RecordError], None]
) -> Iterator[ArchivedBlock]:
    """Yield the intact blocks of an archive, in one pass; call ``on_damage`` for blocks that do not verify.

    Raises:
        ArchiveError: The file is not an archive, is truncated, or can't be read; all blocks before were yielded.
    """
    # Only the current namespace is kept, because an archive may have any number of them.
    namespace = NamespaceInfo("")
    members = _members(file)
    name, data = next(members, ("", _NOTHING))
    if name != _START or _parsed(name, data).get("format") != _FORMAT:
        raise ArchiveError(f"This is not an archive of format {_FORMAT}. Give a file that 'kvstore export' wrote.")
    is_ended = False
    for name, data in members:
        if match := _NAMESPACE.fullmatch(name):
            fields = _parsed(name, data).get("fields")
            namespace = NamespaceInfo(match[1], fields if isinstance(fields, dict) else None)
        elif match := _BLOCK.fullmatch(name):
            if namespace.hex != match[1]:
                namespace = NamespaceInfo(match[1])
            key = bytes.fromhex(match[2])
            try:
                header = check_record(data, namespace.hex, key, alignment=1)
            except RecordError as error:
                on_damage(namespace, key, error)
                continue
            yield ArchivedBlock(namespace, key, header, data)
        is_ended = name == _END
    if not is_ended:
        raise ArchiveError("The archive was cut off. Its intact blocks have been read; export it again.")


def aligned_to(block: ArchivedBlock, header_bytes: int) -> list[memoryview] | None:
    """Return header and payload of a record for a medium with headers of this length.

    None if a sealed record has a header of another length, because the seal covers that length.
    """
    if block.header.mac_key_id and block.header.header_bytes != header_bytes:
        return None
    payload = block.record[block.header.header_bytes :]
    # Copied into whole pages, as direct I/O requires.
    record = memoryview(mmap.mmap(-1, header_bytes + len(payload)))
    record[:HEADER_BYTES] = moved_header(block.header, header_bytes)
    record[header_bytes:] = payload
    return [record[:header_bytes], record[header_bytes:]]


def _members(file: IO[bytes]) -> Iterator[tuple[str, memoryview]]:
    """Yield name and content of the regular files in a tar file, until its end or truncation."""
    # tarfile only calls read().
    ending: Any = _Ending(file)
    try:
        with tarfile.open(fileobj=ending, mode="r|") as tar:
            while (member := tar.next()) is not None:
                _forget_members(tar)
                limit = _RECORD_BYTES_MAX if member.name.endswith(".kv") else _DOCUMENT_BYTES_MAX
                # Nothing is extracted to a path. A sparse file would expand to its claimed length in memory.
                if member.type not in _PLAIN_FILES or member.issparse() or member.size > limit:
                    continue
                content = tar.extractfile(member)
                data = b"" if content is None else content.read()
                yield member.name, memoryview(data)
    except tarfile.StreamError as error:
        raise ArchiveError(f"The archive cannot be read: {error}. Export it again.") from error
    except OSError as error:
        raise ArchiveError(f"The archive cannot be read: {error.strerror or error}. Check its disk.") from error
    except tarfile.TarError:
        # Not a tar file, or truncated within a header; the caller reports both.
        return
    except (ValueError, ArithmeticError, LookupError) as error:
        # tarfile does not check some fields of extended headers, such as sizes and sparse maps.
        raise ArchiveError(f"The archive is damaged: a header can't be read ({error}). Export it again.") from error


class _Ending:
    """A file that raises after too many reads at its end.

    tarfile skips a member by reading its claimed length, which would take years for a claim of exabytes.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._empty = 0

    def read(self, size_bytes: int) -> bytes:
        """Return up to ``size_bytes`` bytes; raise ``ReadError`` after too many reads at the end."""
        data = self._file.read(size_bytes)
        self._empty += not data
        if self._empty > _EMPTY_READS_MAX:
            raise tarfile.ReadError("a member is longer than the file")
        return data


def _add(tar: tarfile.TarFile, name: str, data: memoryview | bytes, at_s: int = 0) -> None:
    info = tarfile.TarInfo(name)
    info.size, info.mode, info.mtime = len(data), 0o600, at_s
    tar.addfile(info, io.BytesIO(data))
    _forget_members(tar)


def _forget_members(tar: Any) -> None:
    """Clear tarfile's list of past members, which would take a kilobyte for each of millions of blocks."""
    tar.members.clear()


def _document(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode()


def _parsed(name: str, data: memoryview) -> dict[str, Any]:
    try:
        value = json.loads(bytes(data))
    except (ValueError, RecursionError) as error:
        raise ArchiveError(f"{name} in the archive is not JSON. Export it again.") from error
    return value if isinstance(value, dict) else {}
