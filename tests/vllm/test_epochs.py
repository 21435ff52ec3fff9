"""Resets under vLLM's manager and ours: no block stored before a reset is found after it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from kvstore.tiers import AsyncTier
from kvstore.types import LookupResult
from kvstore.vllm.spec import KVStoreOffloadingSpec
from tests.vllm.engines import Engine, Start, full_blocks, prompt
from tests.vllm.harness import Driver, key_of

TEXT = prompt(1, 640)

real_engines = [pytest.mark.engine, pytest.mark.timeout(600)]


def two_tiers(directory: Path, **options: Any) -> list[dict[str, Any]]:
    """Return the JSON of two file tiers, whose I/O runs on a thread and in a process."""
    tiers = []
    for name, host in (("near", "thread"), ("far", "process")):
        (directory / name).mkdir(exist_ok=True)
        common = {"type": "KVStoreTier", "module_path": "kvstore.vllm", "backend": "file", "load_timeout": 60}
        where = {"label": name, "path": str(directory / name), "capacity": "1GiB", "io": host}
        tiers.append({**common, **where, **options})
    return tiers


def offloading(directory: Path, manager: str, **options: Any) -> dict[str, Any]:
    """Return our spec's ``kv_connector_extra_config`` with these tiers."""
    spec = {"spec_name": "KVStoreOffloadingSpec", "spec_module_path": "kvstore.vllm", "manager": manager}
    return {**spec, "cpu_bytes_to_use": 64 * 2**20, "secondary_tiers": two_tiers(directory, **options)}


@pytest.mark.parametrize("spec_class", [TieringOffloadingSpec, KVStoreOffloadingSpec])
def test_a_reset_reaches_every_tier(spec_class: Any, tmp_path: Path) -> None:
    """After a reset no tier has an earlier block, immediately or later; a new manager finds those of the base epoch."""
    old, new = [key_of(i) for i in range(8)], [key_of(i) for i in range(8, 12)]
    first = Driver(two_tiers(tmp_path), spec_class=spec_class)
    try:
        first.store(old)
        first.forget_primary()
        assert first.load(old) == []
        tiers = _tiers(first)
        assert all(tier.wait_recovered(60) and tier.stats().epoch for tier in tiers)
        first.store(new)
        assert first.load([*old, *new]) == new
        assert [tier.lookup(new[0]) for tier in tiers] == [LookupResult.HIT] * 2
    finally:
        first.close()
    second = Driver(two_tiers(tmp_path), spec_class=spec_class)
    try:
        assert second.load([*old, *new]) == old
    finally:
        second.close()


def _tiers(driver: Driver) -> list[AsyncTier]:
    return [tier.tier for tier in driver.tiers] or list(driver.manager.manager.tiers)


@pytest.fixture(scope="module")
def expected(start: Start) -> dict[str, list[int]]:
    """The expected answers before and after the weight change: those without any offloading."""
    engine = start()
    answers = {"old": engine.ask(TEXT)[0]["tokens"]}
    engine.call("change_weights")
    engine.call("forget_device")
    answers["new"] = engine.ask(TEXT)[0]["tokens"]
    engine.close()
    assert answers["old"] != answers["new"]
    return answers


class TestRealEngines:
    """The workflow of an RL trainer: the weights are changed in place, and vLLM resets its caches."""

    pytestmark = real_engines

    @pytest.mark.parametrize("manager", ["kvstore", "vllm"])
    def test_no_token_comes_from_old_weights(
        self, start: Start, tmp_path: Path, expected: dict[str, list[int]], manager: str
    ) -> None:
        """Immediately after the reset and in the new epoch, answers are those of the new weights."""
        engine = start(offloading=offloading(tmp_path, manager))
        assert engine.ask(TEXT)[0]["tokens"] == expected["old"]
        engine.call("settle")
        assert engine.call("epochs") == ["", ""]
        engine.call("change_weights")
        for wait in (False, True):
            engine.call("reset")
            if wait:
                assert all(engine.call("epochs"))
            (answer,) = engine.ask(TEXT)
            assert (answer["tokens"], answer["cached"]) == (expected["new"], 0)
            engine.call("settle")
        engine.call("forget_device")
        (answer,) = engine.ask(TEXT)
        assert (answer["tokens"], answer["cached"]) == (expected["new"], full_blocks(640))
        assert engine.call("tier_errors") == 0
        engine.close()
        # A new engine has the old weights again, because they are those on disk.
        again = start(offloading=offloading(tmp_path, manager))
        (answer,) = again.ask(TEXT)
        assert (answer["tokens"], answer["cached"]) == (expected["old"], full_blocks(640))
        again.close()

    def test_engines_share_an_epoch_that_has_a_name(
        self, start: Start, tmp_path: Path, expected: dict[str, list[int]]
    ) -> None:
        """Two engines that change their weights together share blocks again, of the new weights only."""
        name = tmp_path / "epoch"
        name.write_text("v1\n")
        config = offloading(tmp_path, "kvstore", lookup_timeout=60, epoch={"file": str(name)})
        engines: list[Engine] = [start(offloading=config), start(offloading=config)]
        assert engines[0].ask(TEXT)[0]["tokens"] == expected["old"]
        for engine in engines:
            engine.call("settle")
            engine.call("change_weights")
        name.write_text("v2\n")
        for engine in engines:
            engine.call("reset")
            assert engine.call("epochs") == ["v2", "v2"]
        one, other = engines
        (answer,) = one.ask(TEXT)
        assert (answer["tokens"], answer["cached"]) == (expected["new"], 0)
        one.call("settle")
        # It was stored a moment ago.
        other.call("known_blocks", min(one.call("known_blocks")))
        (answer,) = other.ask(TEXT)
        assert (answer["tokens"], answer["cached"]) == (expected["new"], full_blocks(640))
        for engine in engines:
            engine.close()
