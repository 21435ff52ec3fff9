"""Load times of a tier that stalls for 1 s at one block in a hundred, with and without hedged reads.

    python bench/hedge.py [--quick] [--json FILE] [--directory DIR]

Two disk tiers hold every block; the fault wrapper of kvstore.testing stalls the first. Requests load one block each,
one after another, with steps of a millisecond, and the bytes are compared. ``p99_cut`` is the ``latency_s_p99`` of
``alone`` divided by that of the row, ``extra_reads`` the hedges per load. The stalls are much longer than a load, so
the load of the machine hardly matters.
"""

from __future__ import annotations

import random
import sys
import time
from functools import partial
from pathlib import Path

# The repository replaces this directory, whose modules have the names of packages.
sys.path[0] = str(Path(__file__).resolve().parent.parent)

from bench.common import Row, arguments, percentile, reporting, scratch, shared_memory
from kvstore import LookupResult, Namespace, RequestContext, open_tier
from kvstore.primary import PrimaryTier
from kvstore.testing import Fault, FaultKind, FaultPlan, FaultyBackend
from kvstore.tiering import TieringConfig, TieringManager

_SLOT_BYTES = 128 * 1024
_SLOTS = 128
_BLOCKS = 512
"""More than the primary tier holds, so that each has to be loaded in turn."""
_WARM_UP = 200
"""Loads before the first stall, from which the manager learns the tier's usual time."""
_STEP_S = 0.001
_STALL_S = 1.0
_COLUMNS = [
    "system", "op", "block_bytes", "loads", "stalls", "latency_s_p50", "latency_s_p99", "latency_s_max", "p99_cut",
    "extra_reads", "won", "verified",
]  # fmt: skip


def hedge_row(directory: Path, loads: int, *, hedge: bool) -> Row:
    """Store all blocks in both tiers, and load them one at a time."""
    memory, plan = memoryview(shared_memory(_SLOT_BYTES * _SLOTS)), FaultPlan()
    tiers = [
        open_tier(
            {"backend": "file", "path": str(directory / name), "capacity": "1GiB", "reserve": 0},
            primary=memory, slot_bytes=_SLOT_BYTES, namespace=Namespace({"bench": "hedge"}), name=name,
            wrap_backend=partial(FaultyBackend, plan=plan) if name == "near" else None,
        )
        for name in ("near", "far")
    ]  # fmt: skip
    primary = PrimaryTier(memory, _SLOT_BYTES)
    manager = TieringManager(primary, tiers, TieringConfig(hedge=hedge))
    keys = [b"%032d" % number for number in range(_BLOCKS)]
    content = dict(zip(keys, map(random.Random(1).randbytes, [_SLOT_BYTES] * _BLOCKS), strict=True))
    for first in range(0, _BLOCKS, 16):
        _store(manager, {key: content[key] for key in keys[first : first + 16]})
    for number in range(_WARM_UP):
        _load(manager, keys[number % _BLOCKS])
    plan.add(*[Fault("get", FaultKind.DELAY, at, seconds=_STALL_S) for at in range(50, loads, 100)])
    hedged, times, verified = manager.stats().hedges.hedged, [], True
    for number in range(loads):
        seconds, row = _load(manager, key := keys[(_WARM_UP + number) % _BLOCKS])
        times.append(seconds)
        verified &= row == content[key]
    counts = manager.stats().hedges
    assert manager.close(60.0)
    primary.close()
    return {
        "bench": "hedge", "system": "hedged" if hedge else "alone", "op": "load", "block_bytes": _SLOT_BYTES,
        "loads": loads, "stalls": plan.injected[FaultKind.DELAY], "latency_s_p50": percentile(times, 0.5),
        "latency_s_p99": percentile(times, 0.99), "latency_s_max": max(times),
        "extra_reads": (counts.hedged - hedged) / loads, "won": counts.won, "verified": verified,
    }  # fmt: skip


def _store(manager: TieringManager, content: dict[bytes, bytes]) -> None:
    """Store blocks, and wait until both tiers have them."""
    ctx = RequestContext("store")
    store = manager.prepare_store(list(content), ctx)
    assert store is not None
    for key, slot in zip(store.keys, store.slots, strict=True):
        manager.primary.row(slot)[:] = content[key]
    manager.complete_store(store.keys, ctx)
    manager.on_request_finished(ctx)
    while manager.has_pending_work:
        manager.on_step_end()
        time.sleep(_STEP_S)
    assert all(not flow.failed_stores for flow in manager.stats().tiers)


def _load(manager: TieringManager, key: bytes) -> tuple[float, bytes]:
    """Load a block; return the time that it took and its bytes."""
    ctx, begun = RequestContext("load"), time.perf_counter()
    manager.on_new_request(ctx, [key])
    while manager.lookup(key, ctx) is not LookupResult.HIT:
        manager.on_step_end()
        time.sleep(_STEP_S)
    seconds, slots = time.perf_counter() - begun, manager.prepare_load([key], ctx)
    assert slots is not None
    row = bytes(manager.primary.row(slots[0]))
    manager.complete_load([key], ctx)
    manager.on_request_finished(ctx)
    return seconds, row


def main() -> None:
    """Measure and print."""
    parser = arguments(__doc__)
    parser.add_argument("--directory", type=Path, default=Path(), help="on the drive to measure")
    options = parser.parse_args()
    with reporting(options, _COLUMNS) as rows:
        for hedge in (False, True):
            with scratch(options.directory) as directory:
                rows.append(hedge_row(directory, 400 if options.quick else 2000, hedge=hedge))
            rows[-1]["p99_cut"] = rows[0]["latency_s_p99"] / rows[-1]["latency_s_p99"]


if __name__ == "__main__":
    main()
