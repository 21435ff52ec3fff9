"""Costs of requests, and the lifecycle rules by which a service deletes old objects."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections import Counter
from typing import Any

import pytest

from kvstore.backends.s3 import S3Config
from kvstore.backends.s3.client import Traffic
from kvstore.backends.s3.config import Prices
from kvstore.cli.bench.tables import cost_rows
from kvstore.cli.lifecycle import lifecycle_rules, merged_rules
from kvstore.config import decode_config
from kvstore.errors import ConfigError
from kvstore.tiers.base import TierStats
from tests.cli.cli import report_of
from tests.cli.in_process import run_here
from tests.s3.clients import EACH_CLIENT, config_for, opened, options_for
from tests.s3.fault_server import Fault, FaultServer
from tests.s3.packed import blocks_of, reads_of, writes_of
from tests.s3.servers import S3Server


def test_costs_are_those_of_the_price_list() -> None:
    """A million PUTs, GETs, HEADs and LISTs, and charged bytes, cost what the price list says."""
    kinds = ("put", "get", "head", "list", "delete")
    traffic = Traffic(Counter(dict.fromkeys(kinds, 10**6)), 5 * 10**9, 7 * 10**9)
    prices = Prices(sent_gb=0.01, received_gb=0.02)
    dollars = {what: round(usd, 6) for what, usd in traffic.costs_usd(prices, stored_bytes=10**12).items()}
    assert dollars == {
        "put": 5.05,
        "get": 0.54,
        "head": 0.4,
        "list": 5.0,
        "delete": 0.0,
        "total": 10.99,
        "stored_month": 23.0,
    }
    assert "stored_month" not in traffic.costs_usd(prices)


@pytest.mark.parametrize("client", EACH_CLIENT)
async def test_every_request_is_counted(faults: FaultServer, rng: random.Random, client: str) -> None:
    """The table counts as many requests as the service received, including failures and retries."""
    faults.clear()
    prices = Prices(put_1000=1000.0, get_1000=1.0, list_1000=100.0)
    backend = await opened(faults, client=client, prices=prices)
    blocks = blocks_of(rng, 20)
    faults.plan(Fault.INTERNAL, every=5)
    await backend.put(writes_of(blocks))
    await backend.get_into(reads_of(blocks))
    await backend.exists(list(blocks))
    faults.plan(None)
    counts = faults.counts()
    gauges = backend.stats().gauges
    assert counts["fault_internal"] > 5
    assert gauges["cost_usd_put"] == pytest.approx(counts["PUT"] * 1.0)
    assert gauges["cost_usd_get"] == pytest.approx(counts["GET"] * 0.001)
    assert gauges["cost_usd_head"] == pytest.approx(counts["HEAD"] * 0.001)
    assert gauges["cost_usd_total"] == pytest.approx(counts["PUT"] + (counts["GET"] + counts["HEAD"]) * 0.001)


async def test_packing_cuts_the_cost_by_its_factor(faults: FaultServer, rng: random.Random) -> None:
    """Sixteen blocks in a pack cost a sixteenth of the PUTs of sixteen objects."""
    dollars = []
    for more in ({}, {"pack_below": 1 << 20, "pack_blocks": 16}):
        backend = await opened(faults, **more)
        costs = []
        # The first batch also stores the fields of the namespace.
        for _ in range(2):
            await backend.put(writes_of(blocks_of(rng, 64)))
            costs.append(backend.stats().gauges["cost_usd_put"])
        dollars.append(costs[1] - costs[0])
        await backend.close()
    assert dollars[0] == pytest.approx(16 * dollars[1])


def test_prices_are_checked(faults: FaultServer) -> None:
    """Prices come from a configuration as numbers, and none is negative."""
    options: dict[str, Any] = {"bucket": "kv-cache", "prices": {"put_1000": 0.01}}
    assert decode_config(S3Config, options, where="s3 tier").prices.put_1000 == 0.01
    for wrong in (-1, "free"):
        with pytest.raises(ConfigError, match="get_1000"):
            decode_config(S3Config, {"bucket": "kv-cache", "prices": {"get_1000": wrong}}, where="s3 tier")


def test_rules_follow_the_configuration() -> None:
    """Without a ttl no object in use expires; with one, objects expire after that many whole days."""
    plain = lifecycle_rules(S3Config(bucket="kv-cache"), prefix_is_ours=True)["Rules"]
    assert [rule["ID"] for rule in plain] == ["kvstore:kv/:notes", "kvstore:kv/:versions"]
    assert all(rule["Filter"]["Prefix"].startswith("kv/_") for rule in plain if "Days" in rule.get("Expiration", {}))
    for ttl, days in (("1m", 1), ("1d", 1), ("25h", 2), ("30d", 30)):
        rules = lifecycle_rules(S3Config(bucket="kv-cache", ttl=ttl), prefix_is_ours=True)["Rules"]
        assert rules[-1]["Expiration"] == {"Days": days}, ttl
        assert rules[-1]["Filter"] == {"Prefix": "kv/"}


@pytest.mark.matrix
async def test_services_take_the_rules(moto_server: S3Server, weed_server: S3Server) -> None:
    """A service accepts the rules beside existing ones and returns them; adding them twice changes nothing."""
    config = config_for(moto_server, ttl="3d")
    foreign = {"ID": "logs", "Status": "Enabled", "Filter": {"Prefix": "logs/"}, "Expiration": {"Days": 9}}
    both = merged_rules([foreign], config, prefix_is_ours=True)
    assert both["Rules"][0] == foreign
    assert merged_rules(both["Rules"], config, prefix_is_ours=True) == both
    for server in (moto_server, weed_server):
        with contextlib.closing(server.admin()) as client:
            put = client.put_bucket_lifecycle_configuration
            await asyncio.to_thread(put, Bucket=server.bucket, LifecycleConfiguration=both)
            found = await asyncio.to_thread(client.get_bucket_lifecycle_configuration, Bucket=server.bucket)
            days = {rule["ID"]: rule["Expiration"].get("Days") for rule in found["Rules"]}
            assert (days["logs"], days[f"kvstore:{config.prefix}:ttl"]) == (9, 3)
            await asyncio.to_thread(client.delete_bucket_lifecycle, Bucket=server.bucket)


def test_run_over_s3_reports_requests_bytes_and_dollars(faults: FaultServer) -> None:
    """The table and the JSON have the number of requests that the service received, the bytes moved, and the price."""
    options = options_for(faults, prices={"put_1000": 10.0})
    tier = json.dumps({"type": "s3", **options})
    arguments = ["bench", "run", "--tier", tier, "--ops", "20", "--block-size", "64KiB", "--working-set", "2MiB"]
    arguments += ["--baseline", "none", "--reuse", "--jobs", "2", "--blocks-per-job", "4"]
    done = run_here(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    report = report_of(done)
    costs = {row["what"]: row for row in report["costs"]}
    seen = faults.counts()
    # The removal afterwards adds to this.
    assert costs["put"]["requests"] == seen["PUT"] >= 32
    assert 32 <= costs["get"]["requests"] <= seen["GET"]
    assert costs["put"]["dollars"] == pytest.approx(seen["PUT"] / 100)
    assert costs["put"]["size_bytes"] >= 32 * 65536
    assert costs["total"]["requests"] == sum(row["requests"] for what, row in costs.items() if what != "total")
    shown = run_here(*arguments).stdout
    assert "Costs" in shown
    assert "dollars" in shown


def test_a_tier_that_costs_nothing_has_no_table() -> None:
    """Without prices the table has no rows."""
    assert cost_rows("kvstore-file", 4096, TierStats("file")) == []
