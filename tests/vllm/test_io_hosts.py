"""Where an engine's tiers do their I/O: in processes of their own, except the tier that serves peers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from kvstore.testing.waiting import eventually
from kvstore.vllm.spec import KVStoreOffloadingSpec
from tests.peer.ports import free_port
from tests.vllm.harness import Driver, key_of

RESIDENT_BYTES_MAX = 80 << 20


def tiers_of(driver: Driver) -> list[Any]:
    """Return the opened tiers of an engine with kvstore's manager."""
    return list(driver.manager.manager.tiers)


def private_bytes(pid: int) -> int:
    """Return the resident bytes of a process, without those of the primary tier, which it shares with the engine."""
    found = re.findall(r"^(?:RssAnon|RssFile):\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return sum(map(int, found)) << 10


@pytest.mark.parametrize("spec_class", [KVStoreOffloadingSpec, TieringOffloadingSpec])
def test_an_engine_gives_a_tier_a_small_process_and_ends_it(spec_class: Any, tmp_path: Path) -> None:
    """Under either manager; the process has neither vLLM nor torch, and is gone when the engine has closed."""
    tier = {"type": "file", "path": str(tmp_path), "capacity": "64MiB"}
    if spec_class is TieringOffloadingSpec:
        tier |= {"type": "KVStoreTier", "module_path": "kvstore.vllm", "backend": "file"}
    driver = Driver([tier], spec_class=spec_class)
    if spec_class is KVStoreOffloadingSpec:
        (opened,) = tiers_of(driver)
    else:
        opened = driver.tiers[0].tier
    pid = opened.io_pid
    assert pid is not None
    driver.store([key_of(number) for number in range(12)])
    assert "torch" not in Path(f"/proc/{pid}/maps").read_text()
    assert private_bytes(pid) <= RESIDENT_BYTES_MAX
    driver.close()
    eventually(lambda: not Path(f"/proc/{pid}").exists(), what="the end of the I/O process")


def test_only_the_tier_that_serves_peers_stays_in_the_engines_process(tmp_path: Path) -> None:
    """Local storage moves out, also if its blocks are sent to peers, which a reader beside it does."""
    disk = {"type": "file", "label": "disk", "path": str(tmp_path), "capacity": "64MiB"}
    loads = {"type": "peer", "label": "loads", "peers": [f"127.0.0.1:{free_port()}"]}
    serves = {"type": "peer", "label": "serves", "listen": f"127.0.0.1:{free_port()}"}
    for tiers, in_engine in (([disk, loads, serves], {"serves"}), ([disk | {"io": "thread"}], {"disk"})):
        driver = Driver(tiers, spec_class=KVStoreOffloadingSpec)
        assert {tier.name for tier in tiers_of(driver) if tier.io_pid is None} == in_engine
        driver.close()
