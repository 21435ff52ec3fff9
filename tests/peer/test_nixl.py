"""Blocks that NIXL reads from a peer's memory: the right bytes, a fallback to TCP, and no late write."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from kvstore.backends.base import RecordGeometry, RecordRead
from kvstore.backends.peer import PeerBackend, PeerConfig, nixl, protocol
from kvstore.backends.peer.nixl import NixlError, NixlReader, RemoteRow, SharedMemory
from kvstore.backends.peer.protocol import Op, Part
from kvstore.codec.record import HEADER_BYTES
from kvstore.config import decode_config
from kvstore.errors import BackendClosedError, ConfigError
from kvstore.namespace import Namespace
from kvstore.primary import PrimaryTier
from kvstore.primary.lending import Lender
from kvstore.testing.tier_rig import TierRig
from tests.peer.fake_peer import FakePeer, honest
from tests.peer.ports import free_port
from tests.peer.serving import FIELDS, SLOT_BYTES, SLOTS, Serving, key_of
from tests.stopping import stop

KEYS = [key_of(number) for number in range(SLOTS)]
ROW_BYTES = 1 << 20
PATIENT = {"timeout": 20, "load_timeout": 40, "lookup_timeout": 20, "connect_timeout": 20}


def rig_of(*addresses: str, **more: Any) -> TierRig:
    """Return a rig over a tier that reads the memory of peers."""
    config = {
        "backend": "peer",
        "peers": list(addresses),
        "transport": "nixl",
        "negative_ttl": "1ms",
        **PATIENT,
        **more,
    }
    return TierRig(config, namespace=Namespace(FIELDS), slot_bytes=SLOT_BYTES, slots=SLOTS)


def counter(rig: TierRig, name: str) -> int:
    """Return a count from the backend's own statistics."""
    return rig.tier.stats().backend_counters[name]


@pytest.mark.parametrize("io", ["thread", "process"])
def test_blocks_are_read_by_nixl(tmp_path: Any, io: str) -> None:
    """All blocks of a peer arrive by NIXL and verify, also after the peer was killed and restarted."""
    with Serving(tmp_path, transport="nixl", serve_share=1.0) as serving, rig_of(serving.address, io=io) as rig:
        for _ in range(2):
            assert rig.load(KEYS).successful_keys == tuple(KEYS)
        rig.until(lambda: counter(rig, "blocks_by_nixl") == 2 * SLOTS, "the count of blocks")
        serving.kill()
        serving.start()
        rig.until(lambda: rig.load(KEYS).success, "the peer to be used again")
        rig.until(lambda: counter(rig, "blocks_by_nixl") >= 3 * SLOTS, "its blocks to be read by NIXL")
        assert counter(rig, "served_blocks_sent") == 0


def test_a_peer_without_nixl(tmp_path: Any) -> None:
    """The blocks of a peer without NIXL are sent over TCP."""
    with Serving(tmp_path) as serving, rig_of(serving.address) as rig:
        assert rig.load(KEYS).success
        rig.until(lambda: counter(rig, "connections_opened"), "statistics")
        assert counter(rig, "blocks_by_nixl") == counter(rig, "nixl_failures") == 0


def lending(
    metadata: bytes, length: int | None = None, address: int = 4096
) -> Callable[[FakePeer, socket.socket, Op, list[bytes]], None]:
    """Answer correctly, but lend rows at one address of a memory with this metadata."""

    def answer(peer: FakePeer, sock: socket.socket, op: Op, keys: list[bytes]) -> None:
        if op is Op.MEMORY:
            sock.sendall(protocol.pack_metadata(metadata))
        elif op is Op.LEND:
            for key in keys:
                record = peer.record(key)
                head = protocol.pack_part(Part.LENT, length if length is not None else len(record))
                sock.sendall(head + protocol.pack_address(address) + record[:HEADER_BYTES])
            assert sock.recv(1) == protocol.RETURNED
        else:
            honest(peer, sock, op, keys)

    return answer


@pytest.fixture
def liar() -> Iterator[FakePeer]:
    """A peer with blocks of our length."""
    with FakePeer(Namespace(FIELDS), SLOT_BYTES) as peer:
        yield peer


def test_metadata_that_is_none(liar: FakePeer) -> None:
    """Metadata that NIXL cannot read costs a warning; the blocks use the same connection, and NIXL is used no more."""
    liar.answer = lending(b"no metadata at all")
    with rig_of(liar.address) as rig:
        for _ in range(2):
            assert rig.load(KEYS[:8]).success
        rig.until(lambda: counter(rig, "nixl_failures") == 1, "the failure to be counted")
        assert counter(rig, "blocks_by_nixl") == 0
    assert [op for op, _ in liar.questions if op in (Op.MEMORY, Op.LEND)] == [Op.MEMORY, Op.LEND]


def test_an_address_outside_of_the_memory(liar: FakePeer) -> None:
    """NIXL refuses to read the address; the blocks are sent over TCP."""
    with remote_memory() as remote:
        liar.answer = lending(remote.metadata)
        with rig_of(liar.address) as rig:
            assert rig.load(KEYS[:8]).success
            rig.until(lambda: counter(rig, "nixl_failures") == 1, "the failure to be counted")


@pytest.mark.parametrize(
    "answer",
    [
        lending(b"metadata", HEADER_BYTES),
        lending(b"metadata", HEADER_BYTES + SLOT_BYTES + 1),
        lambda _, sock, op, keys: sock.sendall(
            b"\1" * len(keys) if op is Op.LOOKUP else protocol.pack_metadata(bytes(protocol.METADATA_MAX)) + b"\1"
        ),
        lambda peer, sock, op, keys: lending(b"")(peer, sock, Op.LEND if op is Op.LOAD else op, keys),
        lambda _, sock, op, keys: sock.sendall(b"\1" * len(keys) if op is Op.LOOKUP else b"\xff" * 4),
    ],
    ids=["no row", "longer than a block", "stray bytes", "lent without being asked", "endless metadata"],
)
def test_frames_that_lie(liar: FakePeer, answer: Any) -> None:
    """False frames end the connection and the load, and give no hit."""
    liar.answer = answer
    with rig_of(liar.address) as rig:
        assert not rig.load(KEYS[:8]).successful_keys
        rig.until(lambda: counter(rig, "connections_opened"), "statistics")
        assert counter(rig, "nixl_failures") == 0, "NIXL was not even asked"


def test_wrong_bytes_are_not_believed(liar: FakePeer) -> None:
    """Rows whose bytes do not match their headers are misses."""
    with remote_memory() as remote:
        liar.answer = lending(remote.metadata, address=remote.address)
        with rig_of(liar.address) as rig:
            assert not rig.load(KEYS[:8]).successful_keys
            rig.until(lambda: counter(rig, "peers_distrusted") == 1, "the peer to be distrusted")


def test_a_memory_that_does_not_answer(liar: FakePeer) -> None:
    """After half of the time the blocks are sent over TCP, and no slot is written late."""
    with remote_memory() as remote:
        liar.answer = lending(remote.metadata, address=remote.address)
        stop(remote.process.pid)
        with rig_of(liar.address, timeout=4) as rig:
            assert rig.load(KEYS[:8]).success
            rig.until(lambda: counter(rig, "nixl_failures") == 1, "the failure to be counted")
        os.kill(remote.process.pid, signal.SIGCONT)


async def test_a_close_in_the_middle_of_a_read(liar: FakePeer) -> None:
    """A close does not wait for the read, and leaves its memory in place."""
    with remote_memory() as remote:
        liar.answer = lending(remote.metadata, address=remote.address)
        backend = PeerBackend(PeerConfig(peers=(liar.address,), transport="nixl", **PATIENT))
        await backend.open(Namespace(FIELDS), RecordGeometry(HEADER_BYTES, SLOT_BYTES))
        assert await backend.exists(KEYS[:1]) == [True]
        reader = backend._reader
        assert reader is not None
        stop(remote.process.pid)
        read = RecordRead(KEYS[0], [memoryview(bytearray(HEADER_BYTES)), memoryview(bytearray(SLOT_BYTES))])
        load = asyncio.create_task(backend.get_into([read]))
        async with asyncio.timeout(20):
            while not reader._peers:
                await asyncio.sleep(0.01)
        left = len(nixl._left_behind)
        async with asyncio.timeout(8):
            await backend.close()
        assert len(nixl._left_behind) == left + 1
        with pytest.raises(BackendClosedError):
            await load
        os.kill(remote.process.pid, signal.SIGCONT)


class RemoteMemory:
    """Memory of another process that NIXL can read: row ``i`` consists of bytes ``i``."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", SHARING], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        hello = json.loads(self.process.stdout.readline())
        self.address, self.metadata = int(hello[0]), bytes.fromhex(hello[1])


SHARING = f"""
import json, sys
import numpy as np
from kvstore.backends.peer.nixl import SharedMemory
rows = np.repeat(np.arange(8, dtype=np.uint8), {ROW_BYTES})
shared = SharedMemory(memoryview(rows))
print(json.dumps([rows.ctypes.data, shared.metadata.hex()]), flush=True)
sys.stdin.read()
"""


@contextmanager
def remote_memory() -> Iterator[RemoteMemory]:
    """Start the process; end it when the context ends."""
    remote = RemoteMemory()
    try:
        yield remote
    finally:
        remote.process.kill()
        remote.process.communicate()


async def test_a_read_that_does_not_end() -> None:
    """The read fails in time; its targets are never written, and its buffers are reused once it has ended."""
    with remote_memory() as remote:
        reader = NixlReader(ROW_BYTES)
        targets = [bytearray(b"\xff" * ROW_BYTES) for _ in range(4)]
        rows = [
            RemoteRow(remote.address + i * ROW_BYTES, [memoryview(target)[:100], memoryview(target)[100:]])
            for i, target in enumerate(targets)
        ]
        await reader.read(remote.metadata, rows, 20)
        assert [bytes(target) for target in targets] == [bytes([i]) * ROW_BYTES for i in range(4)]
        for target in targets:
            target[:] = b"\xff" * ROW_BYTES
        stop(remote.process.pid)
        with pytest.raises(NixlError, match=r"did not end within 0.2 s"):
            await reader.read(remote.metadata, rows, 0.2)
        task = asyncio.create_task(reader.read(remote.metadata, rows, 20))
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert reader._pool.free_count == reader._pool.count - 8
        os.kill(remote.process.pid, signal.SIGCONT)
        async with asyncio.timeout(30):
            while reader._pool.free_count < reader._pool.count:
                await asyncio.sleep(0.01)
        assert {bytes(target) for target in targets} == {b"\xff" * ROW_BYTES}
        reader.stop()
        with pytest.raises(NixlError, match="too late to begin"):
            await reader.read(remote.metadata, rows, 20)
        reader.close()
        assert reader._agent is None


def test_a_read_does_not_begin_after_its_time() -> None:
    """A read that waited too long for a thread fails before NIXL touches a buffer."""

    async def made() -> NixlReader:
        return NixlReader(ROW_BYTES)

    reader = asyncio.run(made())
    with pytest.raises(NixlError, match="too late to begin"):
        reader._read(b"metadata", [], time.monotonic() - 1)
    assert not reader._peers
    reader.stop()
    reader.close()


async def test_a_peer_that_is_killed() -> None:
    """A read from the peer fails, and the next one starts with a new connection."""
    with remote_memory() as remote:
        reader = NixlReader(ROW_BYTES)
        row = RemoteRow(remote.address, [memoryview(bytearray(ROW_BYTES))])
        await reader.read(remote.metadata, [row], 20)
        assert list(reader._peers) == [remote.metadata]
        stop(remote.process.pid)
        task = asyncio.create_task(reader.read(remote.metadata, [row], 20))
        await asyncio.sleep(0.1)
        remote.process.kill()
        with pytest.raises(NixlError):
            await task
        assert not reader._peers
        reader.stop()
        reader.close()


async def test_a_state_that_is_not_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """A transfer that ends in any other state is a failure."""
    with remote_memory() as remote:
        reader = NixlReader(ROW_BYTES)
        monkeypatch.setattr(reader._agent, "transfer", lambda _: "ERR")
        with pytest.raises(NixlError, match="ended as ERR"):
            await reader.read(remote.metadata, [RemoteRow(remote.address, [memoryview(bytearray(8))])], 20)
        reader.stop()
        reader.close()


def test_an_idle_agent_sleeps() -> None:
    """The agent's thread waits for work; with NIXL's default it would keep a core busy."""
    shared = SharedMemory(memoryview(bytearray(4096)))
    begun, cpu_s = time.monotonic(), time.process_time()
    time.sleep(1)
    assert time.process_time() - cpu_s < 0.2 * (time.monotonic() - begun)
    shared.close()


async def test_memory_that_is_no_longer_shared() -> None:
    """After a close the memory cannot be read."""
    backend = PeerBackend(PeerConfig(listen=f"127.0.0.1:{free_port()}", transport="nixl"))
    primary = PrimaryTier(memoryview(bytearray(4096)), 4096)
    backend.set_lender(Lender(primary))
    await backend.open(Namespace(FIELDS), RecordGeometry(HEADER_BYTES, 4096))
    assert backend._memory is not None
    metadata, address = backend._memory.metadata, backend._memory.address_of(primary.memory)
    assert address is not None
    reader = NixlReader(4096)
    row = RemoteRow(address, [memoryview(bytearray(4096))])
    await reader.read(metadata, [row], 20)
    await backend.close()
    with pytest.raises(NixlError):
        await reader.read(metadata, [row], 20)
    reader.stop()
    reader.close()


async def test_buffers_that_are_all_taken() -> None:
    """Reads without a free buffer or thread fail in time, and a close does not wait for them."""
    with remote_memory() as remote:
        reader = NixlReader(ROW_BYTES)
        row = RemoteRow(remote.address, [memoryview(bytearray(ROW_BYTES))])
        await reader.read(remote.metadata, [row], 20)
        stop(remote.process.pid)
        begun = time.monotonic()
        for error in ["did not end"] * 4 + ["earlier reads have all"]:
            with pytest.raises(NixlError, match=error):
                await reader.read(remote.metadata, [row] * reader.rows_max, 0.2)
        assert time.monotonic() - begun < 20
        left = len(nixl._left_behind)
        reader.stop()
        reader.close()
        assert len(nixl._left_behind) == left + 1
        os.kill(remote.process.pid, signal.SIGCONT)


def test_rows_are_those_of_the_memory() -> None:
    """Rows within the memory have an address; others have none."""
    memory = np.zeros(4 * 4096, np.uint8)
    shared = SharedMemory(memoryview(memory))
    view = memoryview(memory)
    assert shared.address_of(view[4096:8192]) == memory.ctypes.data + 4096
    assert shared.address_of(view[12288:]) == memory.ctypes.data + 12288
    assert shared.address_of(memoryview(bytes(4096))) is None
    assert shared.address_of(view[:0]) is None
    shared.close()
    half = SharedMemory(view[:8192])
    assert half.address_of(view[4096:8192]) is not None
    assert half.address_of(view[4096:12288]) is None
    half.close()


def test_what_is_configured_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """TLS is refused with NIXL, and without NIXL installed the error gives a remedy."""
    with pytest.raises(ConfigError, match="does not encrypt"):
        PeerConfig(peers=("127.0.0.1:5710",), transport="nixl", tls=True)
    with pytest.raises(ConfigError, match="transport"):
        decode_config(PeerConfig, {"backend": "peer", "peers": ["127.0.0.1:5710"], "transport": "pigeon"}, where="")
    monkeypatch.setattr(nixl, "_PACKAGES", ("kvstore_no_such_package",))
    with pytest.raises(ConfigError, match="pip install nixl"):
        SharedMemory(memoryview(bytearray(4096)))
