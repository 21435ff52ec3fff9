#!/usr/bin/env python3
"""Writes Prometheus' alerts on kvstore from the list of metrics in kvstore.vllm.metrics.

They are written to deploy/alerts.yaml, and as a PrometheusRule to deploy/kubernetes/alerts.yaml.

.venv/bin/python scripts/make_alerts.py
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from promql import series

ALERTS_FILE = Path(__file__).parents[1] / "deploy/alerts.yaml"
_RESOURCE = {"apiVersion": "monitoring.coreos.com/v1", "kind": "PrometheusRule", "metadata": {"name": "kvstore"}}
_RUNBOOKS = "docs/troubleshooting.md"
"""The page with a heading for each alert. The project has no public address."""


@dataclass(frozen=True)
class Alert:
    """One alert."""

    name: str  # Name without the prefix ``KVStore``.
    expr: str  # Its condition, in PromQL.
    minutes: int  # Time for which the condition must hold.
    severity: str  # ``"warning"``: blocks are recomputed; ``"critical"``: a tier does nothing.
    summary: str  # Text for the operator, with labels of the condition.
    faulty: tuple[tuple[str, float | None], ...]
    """Series of an engine with the fault, with values (gauges) or increases per minute (counters); None if it is
    absent."""


_BY = "by (instance, tier)"
_CORRUPT, _NO_SPACE, _ABANDONED = "='corrupt'", "='no_space'", "='abandoned'"
_REFUSED = "='credentials_refused'"
_FAILED = "=~'timeout|io_error|refused'"
_ALL = "='+Inf'"
_BLOCKS_LEAST, _JOBS_LEAST = 100, 20
"""Traffic of five minutes below which a share or a percentile says nothing."""

_STORED_LEAST, _REPEATED_LEAST = 10**9, 10
"""Bytes and repeated prompts of an hour, as for the warning in the log (``kvstore.vllm.metrics.UnreadWarning``)."""

ALERTS = (
    Alert(
        "LoadBreakerOpen",
        f"max {_BY} ({series('load_breaker_state')}) == 2",
        2,
        "critical",
        "The tier {{ $labels.tier }} fails; its lookups miss until a probe succeeds.",
        (("vllm:kvstore_load_breaker_state{tier='disk'}", 2),),
    ),
    Alert(
        "StoreBreakerOpen",
        f"max {_BY} ({series('store_breaker_state')}) == 2",
        2,
        "warning",
        "The tier {{ $labels.tier }} refuses stores: full, read-only, or failing.",
        (("vllm:kvstore_store_breaker_state{tier='disk'}", 2),),
    ),
    Alert(
        "TierDead",
        f"max {_BY} ({series('tier_dead')}) == 1",
        1,
        "critical",
        "The tier {{ $labels.tier }} raised several times in a row and gets no more work. See the engine's log.",
        (("vllm:kvstore_tier_dead{tier='disk'}", 1),),
    ),
    Alert(
        "NotReady",
        f"max {_BY} ({series('ready')}) == 0 unless max {_BY} ({series('load_breaker_state')}) == 2 "
        f"unless max {_BY} ({series('tier_dead')}) == 1",
        5,
        "critical",
        "The tier {{ $labels.tier }} answers nothing: its medium or I/O process is away, or its epoch can't begin.",
        (("vllm:kvstore_ready{tier='disk'}", 0),),
    ),
    Alert(
        "RecoveryLasts",
        f"max {_BY} ({series('recovering')}) == 1",
        15,
        "warning",
        "The tier {{ $labels.tier }} has been scanning for 15 minutes, and asks its medium for each block meanwhile.",
        (("vllm:kvstore_recovering{tier='disk'}", 1),),
    ),
    Alert(
        "CorruptBlocks",
        f"sum {_BY} (increase({series('load_blocks', outcome=_CORRUPT)}[15m])) > 0",
        0,
        "warning",
        "Blocks of the tier {{ $labels.tier }} did not verify. Check the drive; run kvstore scrub.",
        (("vllm:kvstore_load_blocks_total{tier='disk',outcome='corrupt'}", 1),),
    ),
    Alert(
        "LoadsFail",
        f"sum {_BY} (rate({series('load_blocks', outcome=_FAILED)}[5m])) "
        f"/ sum {_BY} (rate({series('load_blocks')}[5m])) > 0.05 "
        f"and sum {_BY} (increase({series('load_blocks')}[5m])) >= {_BLOCKS_LEAST}",
        5,
        "warning",
        "More than 5 % of the blocks loaded from the tier {{ $labels.tier }} failed or came late.",
        (
            ("vllm:kvstore_load_blocks_total{tier='disk',outcome='timeout'}", 10),
            ("vllm:kvstore_load_blocks_total{tier='disk',outcome='ok'}", 90),
        ),
    ),
    Alert(
        "StoresShed",
        f"sum {_BY} (rate({series('shed_blocks')}[5m])) / sum {_BY} (rate({series('store_blocks')}[5m])) > 0.1 "
        f"and sum {_BY} (increase({series('store_blocks')}[5m])) >= {_BLOCKS_LEAST}",
        10,
        "warning",
        "The tier {{ $labels.tier }} is too slow for the stores it gets, and drops more than 10 % of them.",
        (
            ("vllm:kvstore_shed_blocks_total{tier='disk'}", 30),
            ("vllm:kvstore_store_blocks_total{tier='disk',outcome='ok'}", 90),
        ),
    ),
    Alert(
        "NoSpace",
        f"sum {_BY} (increase({series('store_blocks', outcome=_NO_SPACE)}[15m])) > 0",
        15,
        "warning",
        "The medium of the tier {{ $labels.tier }} is full and nothing may be evicted for new blocks.",
        (("vllm:kvstore_store_blocks_total{tier='disk',outcome='no_space'}", 5),),
    ),
    Alert(
        "CredentialsRefused",
        f"sum {_BY} (increase({series('backend_events', event=_REFUSED)}[5m])) > 0",
        10,  # More than the window and the two minutes in which a rotation reaches all pods: those are no fault.
        "critical",
        "The server of the tier {{ $labels.tier }} refuses its credentials, and their files have not changed.",
        (("vllm:kvstore_backend_events_total{tier='disk',event='credentials_refused'}", 1),),
    ),
    Alert(
        "SlowLoads",
        f"histogram_quantile(0.99, sum by (instance, tier, le) (rate({series('load_seconds')}[5m]))) > 1 "
        f"and sum {_BY} (increase({series('load_seconds', le=_ALL)}[5m])) >= {_JOBS_LEAST}",
        10,
        "warning",
        "One in a hundred loads from the tier {{ $labels.tier }} takes more than a second.",
        (
            ("vllm:kvstore_load_seconds_bucket{tier='disk',le='1.0'}", 10),
            ("vllm:kvstore_load_seconds_bucket{tier='disk',le='2.5'}", 20),
            ("vllm:kvstore_load_seconds_bucket{tier='disk',le='+Inf'}", 20),
        ),
    ),
    Alert(
        "NeverRead",
        f"sum by (instance) (increase({series('stored_bytes')}[1h])) > {_STORED_LEAST} "
        f"and sum by (instance) (increase({series('loaded_bytes')}[1h])) == 0 "
        f"and sum by (instance) (increase({series('repeated_requests')}[1h])) >= {_REPEATED_LEAST}",
        5,
        "warning",
        "In an hour blocks were stored and none loaded, although prompts were computed again.",
        (
            ("vllm:kvstore_stored_bytes_total{tier='disk'}", 10**8),
            ("vllm:kvstore_loaded_bytes_total{tier='disk'}", 0),
            ("vllm:kvstore_repeated_requests_total", 1),
        ),
    ),
    Alert(
        "SlotsAbandoned",
        f"max by (instance) ({series('primary_slots', state=_ABANDONED)}) > 0",
        15,
        "warning",
        "Slots of the primary tier are out of use because an I/O or a copy into them has not provably ended.",
        (("vllm:kvstore_primary_slots{state='abandoned'}", 4),),
    ),
    Alert(
        "InternalErrors",
        f"sum {_BY} (increase({series('internal_errors')}[15m])) > 0",
        0,
        "warning",
        "kvstore caught an error of its own. Please report it with the engine's log.",
        (("vllm:kvstore_internal_errors_total{tier='disk'}", 1),),
    ),
    Alert(
        "MetricsAbsent",
        f"absent({series('ready')})",
        10,
        "critical",
        "No engine reports metrics of kvstore: engines are down, run without kvstore, or are not scraped.",
        (("vllm:kvstore_ready{tier='disk'}", None),),
    ),
)
"""The alerts; their thresholds are those at which an operator can act. Cache misses cause no alert."""


def rules() -> dict[str, Any]:
    """Return the content of the rules file."""
    return {
        "groups": [
            {
                "name": "kvstore",
                "rules": [
                    {
                        "alert": f"KVStore{alert.name}",
                        "expr": alert.expr,
                        "for": f"{alert.minutes}m",
                        "labels": {"severity": alert.severity},
                        "annotations": {
                            "summary": alert.summary,
                            "runbook": f"{_RUNBOOKS}#kvstore{alert.name.lower()}",
                        },
                    }
                    for alert in ALERTS
                ],
            }
        ]
    }


def texts() -> dict[Path, str]:
    """Return the text of each file."""
    documents = {ALERTS_FILE: rules(), ALERTS_FILE.parent / "kubernetes/alerts.yaml": {**_RESOURCE, "spec": rules()}}
    head = "# Made by scripts/make_alerts.py from kvstore's list of metrics; do not edit.\n"
    return {path: head + yaml.safe_dump(each, sort_keys=False, width=1000) for path, each in documents.items()}


if __name__ == "__main__":
    for path, text in texts().items():
        path.write_text(text)
