"""Fuzz targets: each runs one parser on any bytes and checks its property.

For all of them: no exception but the named error of the parser, memory within the limits of ``fuzz.py``, and an end.
Checksums keep a fuzzer out, so most targets take a first byte that says which of them are made right.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import json
import shutil
import struct
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from kvstore.backends.disk import DiskConfig
from kvstore.backends.disk.layout import (
    PAGE,
    ROW,
    ROW_BYTES,
    Head,
    State,
    decode_head,
    decode_rows,
    encode_head,
    encode_rows,
)
from kvstore.backends.memory import MemoryBackend
from kvstore.backends.peer import protocol
from kvstore.backends.peer.config import PeerConfig
from kvstore.backends.redis.config import RedisConfig
from kvstore.backends.redis.control import Endpoint, read_shards
from kvstore.backends.redis.failures import RedisError
from kvstore.backends.redis.resp import BULK_BYTES_MAX, ProtocolError, ReplyReader, Target
from kvstore.backends.s3.config import S3Config
from kvstore.backends.s3.failures import S3Error
from kvstore.backends.s3.http import Answer, read_deleted, read_list
from kvstore.backends.s3.notes import read_note
from kvstore.backends.s3.packs import PackFormat, Unreadable
from kvstore.codec.checksum import header_checksum, payload_checksum
from kvstore.codec.record import HEADER_BYTES, RecordCodec
from kvstore.config import decode_config, encode_config
from kvstore.errors import ConfigError, KVStoreError, RecordError
from kvstore.namespace import Namespace
from tests.codec.coding import Coding, numbers
from tests.disk.rig import opened

NAMESPACE = Namespace({"fuzz": 1})
KEY = b"a key of thirty-two bytes, just.."
OWNER = 0x1122334455667788
SLOT = 2048


@dataclass(frozen=True)
class FuzzTarget:
    """A parser with its property."""

    run: Callable[[bytes], None]  # Takes an input; an exception is a finding.
    seeds: Callable[[], list[bytes]]  # Inputs to begin with.
    input_bytes_max: int = 4096  # Longest input.


def run_record(data: bytes) -> None:
    """A record is refused by a RecordError, or header, key, namespace and payload are right by another reckoning."""
    mode, record = data[:1], bytearray(data[1:].ljust(HEADER_BYTES, b"\0"))
    if mode == b"\1":
        record[128:144] = payload_checksum(memoryview(record)[HEADER_BYTES:])
    if mode >= b"\1":
        record[248:256] = struct.pack("<Q", header_checksum(bytes(record[:248])))
    view = memoryview(record)
    codec = RecordCodec(NAMESPACE, header_bytes=HEADER_BYTES)
    try:
        size = codec.verify(KEY, view[:HEADER_BYTES], view[HEADER_BYTES:], len(data) - 1)
    except RecordError:
        return
    plain, stored = struct.unpack_from("<QQ", record, 16)
    assert size == plain == stored <= len(record) - HEADER_BYTES
    assert record[32:64] == NAMESPACE.digest and record[64:96] == hashlib.sha256(KEY).digest()
    payload = bytes(record[HEADER_BYTES : HEADER_BYTES + size])
    assert record[128:144] in (
        xxhash.xxh3_128_digest(payload), xxhash.xxh3_128_digest(payload)[::-1]
    )  # fmt: skip


def record_seeds() -> list[bytes]:
    """Return whole records of several lengths."""
    found = []
    for size in (0, 1, 100):
        header = bytearray(HEADER_BYTES)
        payload = bytes(range(size))
        codec = RecordCodec(NAMESPACE, header_bytes=HEADER_BYTES)
        codec.encode_header(memoryview(header), KEY, memoryview(payload))
        found += [mode + header + payload for mode in (b"\0", b"\1", b"\2")]
    return found


CODINGS = [Coding("zstd"), Coding("byteplane+zstd:1")]


def run_coded(data: bytes) -> None:
    """An encoded record whose checksums hold is refused or fills its slot; damaged under the old ones it is refused."""
    coding = CODINGS[data[:1] > b"\x7f"]
    record = bytearray(data[1:])
    if len(record) < HEADER_BYTES:
        return
    stored = struct.unpack_from("<Q", record, 24)[0]
    record[128:144] = payload_checksum(memoryview(record)[HEADER_BYTES:][: min(stored, len(record))])
    record[248:256] = struct.pack("<Q", header_checksum(bytes(record[:248])))
    (found,) = coding.read([bytes(record)], SLOT)
    assert isinstance(found, str) or len(found) <= SLOT
    record[-1] ^= 1
    (found,) = coding.read([bytes(record)], SLOT)
    assert isinstance(found, str), "a damaged record was taken for good"


def coded_seeds() -> list[bytes]:
    """Return an encoded record of each chain."""
    block = numbers(SLOT // 2) + bytes(SLOT // 2)
    return [mode + coding.write([block])[0] for mode, coding in zip((b"\0", b"\xff"), CODINGS, strict=True)]


TABLE = Head(OWNER, 4, 8192, NAMESPACE.digest)


def run_table(data: bytes) -> None:
    """A head is None or describes at most 1 TiB; an intact row has values in range, and counts in its place only."""
    mode, content = data[:1], data[1:].ljust(100 + 4 * ROW_BYTES, b"\0")
    head = decode_head(content[:100], NAMESPACE.digest)
    assert head is None or (head.slots * head.slot_bytes <= 1 << 40 and head.slot_bytes > PAGE)
    content, slots = content[100 : 100 + 4 * ROW_BYTES], np.arange(4)
    if mode == b"\1":
        fields = np.frombuffer(content, ROW).tolist()
        values = [(number, state, size, mark, key) for number, state, _, size, mark, _, key, _ in fields]
        content = encode_rows(values, slots, OWNER).tobytes()
    rows, intact = decode_rows(content, slots, TABLE)
    used = rows[intact & (rows["state"] == State.USED)]
    assert ((used["key_length"] > 0) & (used["key_length"] <= 64)).all()
    assert ((used["size"] > 0) & (used["size"] <= 4096 + HEADER_BYTES)).all()
    assert (rows["state"][intact] <= State.RETIRED).all()
    for moved, segment in ((slots + 1, OWNER), (slots, OWNER + 1)):
        _, elsewhere = decode_rows(content, moved, TABLE._replace(segment=segment))
        assert not (elsewhere & intact).any(), "a row of another place was taken for good"


def table_seeds() -> list[bytes]:
    """Return a head and rows of all states."""
    values = [
        (1, State.USED, 5, 6, KEY), (2, State.FREE, 0, 0, b""), (3, State.RETIRED, 0, 0, b""), (4, 3, 5, 6, KEY)
    ]  # fmt: skip
    rows = encode_rows(values, range(4), OWNER).tobytes()
    return [mode + encode_head(TABLE)[:100] + rows for mode in (b"\0", b"\1")]


class _Directory:
    """The root of an engine that has closed, and the blocks that were stored in it."""

    def __init__(self) -> None:
        self.place = tempfile.TemporaryDirectory(prefix="kvstore-fuzz-")
        self.root = Path(self.place.name) / "made"
        self.values = asyncio.run(self._fill())
        self.files = sorted(path for path in self.root.rglob("*") if path.is_file() and path.suffix != ".seg")

    async def _fill(self) -> dict[bytes, bytes]:
        async with opened(self.root, 8, engine="threads", seed=1) as rig:
            return await rig.put_new(3)

    async def look(self, data: bytes) -> None:
        file = self.files[data[0] % len(self.files)]
        copy = Path(self.place.name) / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(self.root, copy)
        (copy / file.relative_to(self.root)).write_bytes(data[1:])
        try:
            async with opened(copy, 8, engine="threads", seed=2) as rig:
                await rig.scanned()
                found = await rig.get(list(self.values))
                assert all(back in (None, value) for value, back in zip(self.values.values(), found, strict=True))
                if data[1:] == file.read_bytes():
                    assert None not in found, "blocks of an intact directory were not found"
                await rig.put_new(1)
        except KVStoreError:
            return


@functools.cache
def _directory() -> _Directory:
    return _Directory()


def run_directory(data: bytes) -> None:
    """An engine opens a directory of which one file has any content, reads nothing wrong, or refuses."""
    asyncio.run(_directory().look(data or b"\0"))


def directory_seeds() -> list[bytes]:
    """Return each file of a directory as it is, and texts."""
    found = [bytes([number]) + path.read_bytes() for number, path in enumerate(_directory().files)]
    return found + [bytes([number]) + b"[" * 4000 for number in range(len(found))]


def run_pack(data: bytes) -> None:
    """Heads and notes are refused by Unreadable, or have keys of 1 to 64 bytes at places behind the head."""
    mode, head = data[:1], bytearray(data[1:])
    if mode >= b"\1" and len(head) >= 72:
        struct.pack_into("<I", head, 16, len(head))
        head[-8:] = struct.pack("<Q", header_checksum(bytes(head[:-8])))
    packs = PackFormat(NAMESPACE)
    try:
        found = packs.read_pack(bytes(head))
        if isinstance(found, int):
            assert len(head) < found <= 1 << 20
        else:
            assert all(1 <= len(entry.key) <= 64 and entry.offset >= 68 for entry in found)
    except Unreadable:
        pass
    with contextlib.suppress(Unreadable):
        assert all(isinstance(name, str) and isinstance(key, bytes) for name, key in packs.read_gone(bytes(head)))
    note = read_note("p/", bytes(head))
    assert note is None or all(name.startswith("p/") for name in note[0])


def pack_seeds() -> list[bytes]:
    """Return a head, a note of packs and a note of objects."""
    packs = PackFormat(NAMESPACE)
    head, _ = packs.pack_head([(KEY, 5000), (KEY[:1], 1)])
    gone = packs.gone_note([("00ff.pack", KEY), ("1", b"k")])
    note = json.dumps({"format": 1, "cause": "evicted", "names": ["a/b"]}).encode()
    return [mode + text for text in (head, gone, note) for mode in (b"\0", b"\1")]


def run_resp(data: bytes) -> None:
    """Replies end in a ProtocolError or are as many as were asked for; memory is bounded."""
    most, data = data[:1] or b"\1", data[1:]
    reader = ReplyReader()
    room = memoryview(bytearray(512))
    reader.expect([None, Target([room[:100], room[100:256]]), None, None])
    replies: list[Any] = []
    at = 0
    try:
        while at < len(data):
            taken = 0
            for buffer in reader.buffers():
                part = data[at + taken : at + max(1, most[0])][: buffer.nbytes]
                buffer[: len(part)] = part
                taken += len(part)
                if len(part) < buffer.nbytes:
                    break
            replies += reader.advance(taken)
            at += taken
            assert taken
            assert reader._string is None or len(reader._string) <= BULK_BYTES_MAX
    except ProtocolError as error:
        replies += error.replies
    assert len(replies) <= 4
    assert not any(room[256:]), "bytes behind the target"
    end = 0
    for _ in replies:
        end = _reply_end(data, end)
    for reply in replies:
        with contextlib.suppress(RedisError):
            read_shards(reply, Endpoint("10.0.0.1", 7000))


def _reply_end(data: bytes, start: int) -> int:
    """Return the end of the reply at ``start``, and check that each of its strings ends where its length says."""
    end = data.index(b"\r\n", start) + 2
    kind, count = data[start : start + 1], data[start + 1 : end - 2]
    if kind == b"*":
        for _ in range(int(count)):
            end = _reply_end(data, end)
    elif kind == b"$" and count != b"-1":
        end += int(count) + 2
        assert data[end - 2 : end] == b"\r\n", "a string has another length"
    return end


def resp_seeds() -> list[bytes]:
    """Return replies of all types."""
    shards = b"*1\r\n*3\r\n:0\r\n:16383\r\n*3\r\n$8\r\n10.0.0.1\r\n:7000\r\n$2\r\nid\r\n"
    value = b"$256\r\n" + bytes(256) + b"\r\n"
    return [
        b"\xff" + b"+OK\r\n" + value + b":1\r\n-MOVED 1 10.0.0.1:7000\r\n",
        b"\x07" + shards + b"$-1\r\n" + shards + b"*-1\r\n",
        b"\x01" + b"$3\r\nabc\r\n$0\r\n\r\n*2\r\n$1\r\na\r\n*0\r\n:-5\r\n",
    ]


def run_http(data: bytes) -> None:
    """An answer is whole, incomplete or refused by an S3Error, and takes no more than its buffers; texts likewise."""
    most, kind, data = max(1, (data[:1] or b"\1")[0]), data[1:2], data[2:]
    room = memoryview(bytearray(512))
    answer = Answer([room[:100], room[100:300]] if kind < b"\x80" else (), bodiless=kind == b"\xff")
    at = 0
    try:
        while at < len(data) and not answer.whole:
            (buffer, *_) = answer.buffers()
            part = data[at : at + most][: buffer.nbytes]
            buffer[: len(part)] = part
            answer.advance(len(part))
            at += len(part)
        if not answer.whole:
            answer.advance(0)
        assert answer.whole and answer.status >= 200
        assert answer.filled_bytes <= 300
        assert answer.filled_bytes in (0, int(answer.headers.get("content-length", 0))), "a part of an object"
    except S3Error:
        pass
    assert not any(room[300:]), "bytes behind the buffers"
    for read in (read_list, read_deleted):
        with contextlib.suppress(S3Error):
            read(data)


def http_seeds() -> list[bytes]:
    """Return answers with a length, in chunks and without a body, and the texts of lists and removals."""
    page = (
        b"<?xml version='1.0'?><ListBucketResult xmlns='http://s3.amazonaws.com/doc/2006-03-01/'>"
        b"<IsTruncated>false</IsTruncated><EncodingType>url</EncodingType><Contents><Key>a%2Fb</Key>"
        b"<Size>5</Size><LastModified>2026-01-01T00:00:00.000Z</LastModified><ETag>&quot;e&quot;</ETag></Contents>"
        b"</ListBucketResult>"
    )
    deleted = b"<DeleteResult><Error><Key>a</Key><Code>AccessDenied</Code></Error></DeleteResult>"
    return [
        b'\xff\0HTTP/1.1 200 OK\r\nContent-Length: 300\r\nETag: "e"\r\n\r\n' + bytes(300),
        b"\x05\0HTTP/1.1 206 Partial\r\nContent-Length: 5\r\nContent-Range: bytes 0-4/9\r\n\r\nhello",
        b"\xff\x90HTTP/1.1 404 No\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\nx: y\r\n\r\n",
        b"\xff\xffHTTP/1.1 200 OK\r\nContent-Length: 300\r\nConnection: close\r\n\r\n",
        b"\xff\0HTTP/1.1 100 Continue\r\n\r\nHTTP/1.0 200 OK\r\nContent-Length: 1\r\n\r\nx",
        b"\xff\0" + page,
        b"\xff\0" + deleted,
    ]


def run_peer(data: bytes) -> None:
    """Frames are refused by a PeerProtocolError, or are written back to the same bytes."""
    which, data = (data[:1] or b"\0")[0] % 4, data[1:]
    sizes = (protocol.HELLO_BYTES, protocol.WELCOME_BYTES, protocol.QUESTION_BYTES, protocol.PART_BYTES)
    start, rest = data[: sizes[which]].ljust(sizes[which], b"\0"), data[sizes[which] :]
    try:
        if which <= 1:
            protocol.check_head(start[: protocol.HEAD_BYTES])
            if which == 0:
                hello = protocol.read_hello(start)
                assert protocol.read_hello(protocol.pack_hello(hello)) == hello
            else:
                welcome = protocol.read_welcome(start)
                assert protocol.read_welcome(protocol.pack_welcome(welcome)) == welcome
        elif which == 2:
            question = protocol.read_question(start)
            assert question.body_bytes <= 65 * protocol.KEYS_MAX
            keys = protocol.read_keys(rest, question.count)
            assert len(keys) == question.count and all(1 <= len(key) <= 64 for key in keys)
            assert protocol.pack_question(question.op, keys)[protocol.QUESTION_BYTES :] == rest
        else:
            part, size = protocol.read_part(start)
            assert protocol.pack_part(part, size) == start
    except protocol.PeerProtocolError:
        pass


def peer_seeds() -> list[bytes]:
    """Return a frame of each kind."""
    return [
        b"\0"
        + protocol.pack_hello(protocol.Hello(bytes(32), NAMESPACE.digest, protocol.address_of("127.0.0.1", 5710))),
        b"\1" + protocol.pack_welcome(protocol.Welcome(bytes(32), protocol.Note.FOREIGN)),
        b"\2" + protocol.pack_question(protocol.Op.LOAD, [KEY, b"k"]),
        b"\3" + protocol.pack_part(protocol.Part.RECORD, 5000),
    ]


CONFIGS: tuple[type[Any], ...] = (
    DiskConfig, S3Config, RedisConfig, PeerConfig, MemoryBackend.config_type
)  # fmt: skip


def run_config(data: bytes) -> None:
    """A configuration is refused by a ConfigError of at most 4,000 characters, or can be shown as JSON."""
    cls = CONFIGS[(data[:1] or b"\0")[0] % len(CONFIGS)]
    try:
        config = decode_config(cls, json.loads(data[1:]), where="fuzzed tier")
    except ConfigError as error:
        assert len(str(error)) <= 4000, f"an error of {len(str(error))} characters"
        return
    except (ValueError, RecursionError):
        return  # Not JSON.
    json.dumps(encode_config(config))


def config_seeds() -> list[bytes]:
    """Return a configuration of each kind, and one with every type of value."""
    texts = [
        {"path": "/cache", "capacity": "10GiB", "reserve": "5%", "engine": "threads", "durability": "data"},
        {
            "bucket": "blocks",
            "endpoint": "https://localhost:1",
            "access_key_id": "A",
            "secret_access_key": {"env": "S"},
        },
        {"url": "redis://127.0.0.1:7001/0", "password": {"file": "/p"}, "ttl": "1h"},
        {"listen": "127.0.0.1:9000", "peers": ["127.0.0.1:9001"], "secret": {"env": "S"}},
        {"capacity": "64MiB", "load_timeout": 2.5, "required": False, "label": "a", "epoch": {"file": "/e"}},
    ]
    return [bytes([number]) + json.dumps(text).encode() for number, text in enumerate(texts)]


TARGETS = {
    "record": FuzzTarget(run_record, record_seeds, 1024),
    "coded": FuzzTarget(run_coded, coded_seeds, 3000),
    "table": FuzzTarget(run_table, table_seeds, 512),
    "directory": FuzzTarget(run_directory, directory_seeds, 8192),
    "pack": FuzzTarget(run_pack, pack_seeds, 2048),
    "resp": FuzzTarget(run_resp, resp_seeds, 2048),
    "http": FuzzTarget(run_http, http_seeds, 2048),
    "peer": FuzzTarget(run_peer, peer_seeds, 512),
    "config": FuzzTarget(run_config, config_seeds, 2048),
}
