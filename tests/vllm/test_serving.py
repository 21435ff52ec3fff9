"""kvstore's manager with a peer tier, without an engine: one driver loads the blocks that another serves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.testing.waiting import eventually
from kvstore.vllm.tags import remote_fields
from tests.peer.ports import free_port
from tests.vllm.harness import Drivers, key_of

PATIENT = {"lookup_timeout": 20, "load_timeout": 20}


@pytest.fixture
def drive() -> Iterator[Drivers]:
    """Start drivers."""
    drivers = Drivers()
    yield drivers
    drivers.close()


def test_only_an_engine_that_serves_keeps_blocks_for_a_decoder() -> None:
    """Elsewhere no other engine could fetch the blocks that a request hands over."""
    params = {"remote_decoder": {"kv_request_id": "r"}}
    assert set(remote_fields(params, serves=True)) == {"hand_over", "hand_over_s"}
    assert remote_fields(params, serves=False) == {}


@pytest.mark.parametrize("disk_first", [False, True])
def test_blocks_on_an_engines_disk_are_served(drive: Drivers, tmp_path: Path, disk_first: bool) -> None:
    """Blocks evicted from the primary tier are served from the disk tier beside the peer tier, in either order."""
    address = f"127.0.0.1:{free_port()}"
    peer = {"type": "peer", "listen": address, **PATIENT}
    disk = {"type": "file", "path": str(tmp_path), "capacity": "64MiB"}
    first = drive(*((disk, peer) if disk_first else (peer, disk)))
    keys = [key_of(number) for number in range(first.slots + 8)]
    for start in range(0, len(keys), 8):
        first.store(keys[start : start + 8])
    evicted = [key for key in keys if key not in first.manager.manager.primary]
    assert len(evicted) >= 8
    # The reader of the disk follows its I/O process a little later; until then the second engine finds nothing.
    second = drive({"type": "peer", "peers": [address], "negative_ttl": "10ms", **PATIENT})
    # The driver compares every byte.
    eventually(lambda: second.load(evicted) == evicted, what="every evicted block is served")
