"""Records as commands: what is sent to the server for one block."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from weakref import WeakValueDictionary

from kvstore.backends.base import RecordGeometry, RecordRead, RecordWrite
from kvstore.backends.redis.config import RedisConfig
from kvstore.backends.redis.exchange import Command
from kvstore.backends.redis.parts import PART_BYTES, PartsRead, in_parts, part_count, part_key
from kvstore.backends.redis.resp import Target, encode_arguments, encode_command
from kvstore.namespace import Namespace
from kvstore.types import BlockKey

__all__ = ["RecordCommands"]

_NAMESPACE_DIGITS = 32
"""Digits of the namespace in a key: 128 bits keep namespaces apart, and the record's header has them all."""


class RecordCommands:
    """Makes the commands for the blocks of one namespace.

    A block's key on the server is ``<prefix><32 digits of the namespace>:<key in hex>``, with ``:<number>`` behind it
    where records are in parts.

    Args:
        config: Of the backend.
        namespace: Of the blocks.
        geometry: Sizes; where a record may be longer than a part, all are in parts.
        part_bytes: Longest part.
    """

    def __init__(
        self, config: RedisConfig, namespace: Namespace, geometry: RecordGeometry, part_bytes: int = PART_BYTES
    ) -> None:
        self._start = f"{config.prefix}{namespace.hex[:_NAMESPACE_DIGITS]}:".encode()
        self._part_bytes = part_bytes
        self.parts_max = part_count(geometry.record_bytes_max, part_bytes)
        self.in_parts = self.parts_max > 1
        self._ttl = b"%d" % max(1, round(config.ttl))
        expiry = (b"EX", self._ttl) if config.ttl else ()
        self._end_over = len(expiry), encode_arguments(*expiry)
        self._end_new = len(expiry) + 1, encode_arguments(b"NX", *expiry)
        self._reads_replica = config.read_from == "replica"
        self._locks: WeakValueDictionary[BlockKey, asyncio.Lock] = WeakValueDictionary()

    def key_of(self, key: BlockKey) -> bytes:
        """Return the name that stands for a block: of its record, or of the first part of it."""
        name = self._start + key.hex().encode()
        return part_key(name, 0) if self.in_parts else name

    def exists(self, key: BlockKey) -> Command:
        """Return the command that asks for a block."""
        name = self.key_of(key)
        frame = b"*2\r\n$6\r\nEXISTS\r\n$%d\r\n%b\r\n" % (len(name), name)
        return Command(name, [frame], int, reads=self._reads_replica)

    def put(self, write: RecordWrite) -> Command:
        """Return the command that stores a record, unless there is one."""
        return self._set(self.key_of(write.key), write.buffers, new=True)

    def put_parts(self, write: RecordWrite) -> list[Command]:
        """Return the commands that store a record's parts; the first one is to be sent when the others are there."""
        values = in_parts(write.buffers, self._part_bytes)
        named = zip(self._names(write.key), values, strict=False)
        return [self._set(name, value, new=not i) for i, (name, value) in enumerate(named)]

    def get(self, read: RecordRead) -> Command:
        """Return the command that reads a record into its buffers."""
        return self._get(self.key_of(read.key), Target(read.buffers), reads=self._reads_replica)

    def get_parts(self, read: RecordRead, *, from_master: bool) -> tuple[PartsRead, list[Command]]:
        """Return the commands that read the parts of a record, and what makes sense of their answers."""
        parts = PartsRead(read.buffers, self._part_bytes)
        reads = self._reads_replica and not from_master
        names = self._names(read.key)
        return parts, [self._get(name, target, reads=reads) for name, target in zip(names, parts.targets, strict=False)]

    def delete(self, key: BlockKey) -> list[Command]:
        """Return the commands that remove a block, ``parts_max`` of them; the first says whether it was there."""
        return [Command(name, [encode_command(b"UNLINK", name)], int) for name in self._names(key)]

    def renew(self, key: BlockKey) -> list[Command]:
        """Return the commands that make a block's time to live begin anew."""
        return [Command(name, [encode_command(b"EXPIRE", name, self._ttl)], int) for name in self._names(key)]

    def writer_lock(self, key: BlockKey) -> asyncio.Lock:
        """Return the lock that a writer of a block in parts holds; it lives as long as somebody has it."""
        return self._locks.setdefault(key, asyncio.Lock())

    def _names(self, key: BlockKey) -> list[bytes]:
        """Return the names of the values of a block."""
        if not self.in_parts:
            return [self.key_of(key)]
        name = self._start + key.hex().encode()
        return [part_key(name, number) for number in range(self.parts_max)]

    def _get(self, name: bytes, target: Target, *, reads: bool) -> Command:
        frame = b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(name), name)
        return Command(name, [frame], target, target.capacity_bytes, reads=reads)

    def _set(self, name: bytes, value: Sequence[bytes | memoryview], *, new: bool) -> Command:
        size = sum(map(len, value))
        extra, end = self._end_new if new else self._end_over
        start = b"*%d\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (3 + extra, len(name), name, size)
        # An empty piece would never count as sent.
        return Command(name, [start, *filter(len, value), b"\r\n" + end], str, size)
