"""``kvstore-bench`` reports the cost of a measurement at the service."""

from __future__ import annotations

import json

import pytest

from kvstore.cli.bench.tables import cost_rows
from kvstore.tiers.base import TierStats
from tests.cli.cli import report_of
from tests.cli.in_process import run_here
from tests.s3.clients import options_for
from tests.s3.fault_server import FaultServer


def test_a_run_over_s3_tells_requests_bytes_and_dollars(faults: FaultServer) -> None:
    """The table and the JSON have the number of requests that the service received, the bytes moved, and the price."""
    options = options_for(faults, prices={"put_1000": 10.0}, timeout=20, lookup_timeout=20)
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
