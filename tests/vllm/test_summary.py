"""The summary of hits in the log, and vLLM's line of metrics."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats

from kvstore.vllm import KVStoreOffloadingSpec, metrics
from tests.vllm.harness import Driver, key_of


@pytest.mark.usefixtures("reports_at_once")
def test_traffic_is_summed_up_once_and_silence_is_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line has the hits of each tier since the last one; without lookups or transfers there is no line."""
    keys = [key_of(number) for number in range(12)]
    tier = {"type": "file", "path": str(tmp_path), "capacity": "64MiB", "reset": "keep"}
    driver = Driver([tier], spec_class=KVStoreOffloadingSpec)
    manager = driver.manager
    driver.store(keys)
    driver.forget_primary()
    assert driver.load(keys) == keys
    with caplog.at_level(logging.INFO, logger="kvstore"):
        manager.get_stats()
        assert not [text for text in caplog.messages if text.startswith("Hits")], "before a minute has passed"
        monkeypatch.setattr(metrics, "_INTERVAL_S", 0.0)
        manager.get_stats()
        manager.get_stats()
    driver.close()
    (line,) = [text for text in caplog.messages if text.startswith("Hits")]
    assert "primary 0 of 12 blocks, file 12 of 12 blocks; 0.1 MB loaded, 0.1 MB stored" in line


@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize("repeats", [False, True])
@pytest.mark.usefixtures("reports_at_once")
def test_stores_that_are_never_read_are_a_warning(
    reads: bool, repeats: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Repeated prompts without a load are one warning with the causes; loads or new prompts alone are none."""
    monkeypatch.setattr(metrics, "_UNREAD_BYTES", 1.0)
    tier = {"type": "memory", "capacity": "64MiB", "reset": "keep"}
    driver = Driver([tier], spec_class=KVStoreOffloadingSpec)
    driver.store([key_of(number) for number in range(6)])
    driver.forget_primary()
    if reads:
        driver.load([key_of(0)])
    for number in range(12):
        context = driver.request(kv_transfer_params={"kvstore": {"load": False}})
        driver.lookup([key_of(1 if repeats else number)], context)
        driver.manager.prepare_store([], context)
        driver.manager.on_request_finished(context)
    with caplog.at_level(logging.WARNING, logger="kvstore.vllm.metrics"):
        driver.manager.get_stats()
        assert "nothing was loaded" not in caplog.text, "before an hour has passed"
        monkeypatch.setattr(metrics, "_UNREAD_S", 0.0)
        driver.manager.get_stats()
        driver.manager.get_stats()
    driver.close()
    lines = [text for text in caplog.messages if "nothing was loaded" in text]
    assert len(lines) == (repeats and not reads)
    assert all("although 11 prompts were computed again" in line and "all policy 12." in line for line in lines)


def test_the_warning_is_repeated_only_after_a_load(caplog: pytest.LogCaptureFixture) -> None:
    """Further hours without a load add no line; the first one after an hour with a load does."""
    warning: Any = metrics.UnreadWarning()
    start, lines = time.monotonic(), []
    for hour, loaded in enumerate((0, 0, 1, 1, 1), start=1):
        tier = SimpleNamespace(loaded=loaded, stored=10 * hour)
        warning.note(start + 3601 * hour, SimpleNamespace(tiers=[tier], repeated=20 * hour, missed={}), 10**9)
        lines.append(caplog.text.count("nothing was loaded"))
    assert lines == [1, 1, 1, 2, 2]


def test_vllms_line_of_metrics_has_no_zeros() -> None:
    """Where metrics are declared, zeros are left out of vLLM's log line, and stay in the exported metrics."""
    for _ in range(2):
        KVStoreOffloadingSpec.build_metric_definitions({"cpu_bytes_to_use": 1, "secondary_tiers": []})
    stats = OffloadingConnectorStats()
    stats.set_gauge("vllm:kvstore_blocks", 3, ("file",))
    stats.set_gauge("vllm:kvstore_blocks", 0, ("redis",))
    stats.increase_counter("vllm:kvstore_shed_blocks", 0, ("file",))
    assert stats.reduce() == {"vllm:kvstore_blocks:('file',)": 3}
    assert set(stats.data["data"]) == {"vllm:kvstore_blocks", "vllm:kvstore_shed_blocks"}
