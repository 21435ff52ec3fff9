"""Cost of sharing blocks in a fleet of engines, with a list of peers and with a directory. A simulation, no network.

    python bench/fleet.py --json out.json

Engines hold prefixes of equal length, popular ones more often. kvstore's own code creates the summaries and chooses the
engines to query; network traffic is calculated from these and from kvstore's constants. The age of an engine's summary
follows from the read rate, and part of its prefixes has been replaced in that time.
"""

from __future__ import annotations

import hashlib
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

sys.path[0] = str(Path(__file__).resolve().parents[1])  # In place of this folder, whose redis.py is not the package.

from bench.common import Row, arguments, reporting
from kvstore.backends.peer import summary
from kvstore.backends.peer.limits import LIMITS
from kvstore.backends.peer.summary import Index, Section

INTERVAL_S: Final = 5.0
PREFIX_BLOCKS: Final = 250
PREFIXES: Final = 4000
ENGINE_BLOCKS: Final = 100_000
LOOKUPS_PER_S: Final = 10
IDLE_S: Final = 30
TURNOVER_S: Final = 1800.0
"""Time in which an engine replaces all its blocks: 55 blocks (of 16 tokens: 890 tokens) per second."""
KEY_BYTES: Final = 37
MEMBER_BYTES: Final = len("10.100.200.100:5710 0123456789abcdef") + 24
"""Bytes of an engine in the list, including the overhead of the Redis protocol."""

COLUMNS: Final = (
    "system", "engines", "asked_per_lookup", "found", "asked_in_vain", "connections", "summary_age_s", "index_mb",
    "search_ms", "server_connects_per_s", "server_in_mb_per_s", "server_out_mb_per_s", "peer_questions_per_s",
    "peer_mb_per_s",
)  # fmt: skip


@dataclass(slots=True)
class Fleet:
    """Engines, and the prefixes that each holds."""

    keys: list[list[bytes]]  # Keys of each prefix.
    hashes: np.ndarray  # Hashes of these keys, one row per prefix.
    held: list[np.ndarray]  # Prefixes in the summary of each engine.
    kept: list[set[int]]  # Prefixes in the summary that the engine still holds when the summary is used.


def main() -> None:
    """Command line."""
    args = arguments(__doc__).parse_args()
    # The choice between equal engines is random.
    np.random.seed(1)
    with reporting(args, COLUMNS) as rows:
        for engines in (10, 100) if args.quick else (10, 100, 1000):
            rows.append(of_list(engines))
            rows.append(of_directory(engines, lookups=300 if args.quick else 2000))


def of_list(engines: int) -> Row:
    """Return the cost with a list of all other engines; ``possible`` is False above the limit of 64 peers."""
    others = engines - 1
    questions = others * LOOKUPS_PER_S
    return {
        "bench": "fleet",
        "system": "list",
        "engines": engines,
        "possible": engines <= 65,
        "asked_per_lookup": float(others),
        "found": 1.0,
        "connections": 2.0 * others,
        "peer_questions_per_s": float(questions),
        "peer_mb_per_s": questions * PREFIX_BLOCKS * KEY_BYTES / 1e6,
    }


def of_directory(engines: int, lookups: int) -> Row:
    """Return the cost with a directory."""
    rng = np.random.default_rng(engines)
    size = len(summary.pack([Section(0, np.arange(summary.SAMPLE_MAX, dtype=np.uint32))]))
    age_s = max(INTERVAL_S, (engines - 1) * size / LIMITS.read_bytes_per_s)
    # All engines but the querying one.
    fleet = simulated(engines - 1, min(1.0, age_s / TURNOVER_S), rng)
    index = Index.of([[section(fleet, engine)] for engine in range(engines - 1)])
    asked = found = vain = there = searched = 0
    spent_s = 0.0
    partners: list[set[int]] = []
    per_window = LOOKUPS_PER_S * IDLE_S
    for number, prefix in enumerate(popular(rng, lookups)):
        if number % per_window == 0:
            partners.append(set())
        # The querying engine is empty, so every lookup goes to others.
        begun = time.perf_counter()
        chosen = index.best(fleet.keys[prefix], 2)
        spent_s += time.perf_counter() - begun
        partners[-1].update(chosen)
        right = [engine for engine in chosen if prefix in fleet.kept[engine]]
        asked, searched = asked + len(chosen), searched + 1
        found, vain = found + bool(right), vain + len(chosen) - len(right)
        there += any(prefix in kept for kept in fleet.kept)
    strangers = [
        [hashlib.sha256(b"%d %d" % (n, i)).digest() + bytes(4) for i in range(PREFIX_BLOCKS)] for n in range(200)
    ]
    read_per_s = min(LIMITS.read_bytes_per_s, (engines - 1) * size / INTERVAL_S)
    listed_per_s = engines * MEMBER_BYTES / INTERVAL_S
    windows = partners if len(partners) == 1 else partners[:-1]
    asked_per_lookup = asked / searched
    return {
        "bench": "fleet",
        "system": "directory",
        "engines": engines,
        "asked_per_lookup": asked_per_lookup,
        "found": found / max(1, there),
        "asked_in_vain": vain / max(1, asked),
        "asked_of_strangers": sum(bool(index.best(keys, 2)) for keys in strangers) / len(strangers),
        "connections": 2 * sum(min(len(one), summary.ENGINES_MAX) for one in windows) / len(windows),
        "summary_age_s": age_s,
        "summary_bytes": size,
        "index_mb": index._entries.nbytes / 1e6,
        "search_ms": 1000 * spent_s / searched,
        "server_connects_per_s": engines / INTERVAL_S,
        "server_in_mb_per_s": engines * size / INTERVAL_S / 1e6,
        "server_out_mb_per_s": engines * (read_per_s + listed_per_s) / 1e6,
        "peer_questions_per_s": asked_per_lookup * LOOKUPS_PER_S,
        "peer_mb_per_s": asked_per_lookup * LOOKUPS_PER_S * PREFIX_BLOCKS * KEY_BYTES / 1e6,
    }


def simulated(engines: int, replaced: float, rng: np.random.Generator) -> Fleet:
    """Return a fleet in which a share of each engine's prefixes was replaced since its summary."""
    keys = [
        [hashlib.sha256(b"%d-%d" % (prefix, block)).digest() + bytes(4) for block in range(PREFIX_BLOCKS)]
        for prefix in range(PREFIXES)
    ]
    hashes = np.stack([summary._hashes(one) for one in keys])
    weights = popularity()
    held = [rng.choice(PREFIXES, ENGINE_BLOCKS // PREFIX_BLOCKS, replace=False, p=weights) for _ in range(engines)]
    kept = [set(one[rng.random(len(one)) >= replaced].tolist()) for one in held]
    return Fleet(keys, hashes, held, kept)


def section(fleet: Fleet, engine: int) -> Section:
    """Return the section of an engine, sampled from hashes like in ``Sample``."""
    hashes = np.partition(fleet.hashes[fleet.held[engine]].ravel(), summary.SAMPLE_MAX)[: summary.SAMPLE_MAX]
    return Section(int(hashes.max() >> np.uint64(32)), np.unique(hashes.astype(np.uint32)))


def popularity() -> np.ndarray:
    """Return the probability of each prefix: the n-th is used 1/sqrt(n) times as often as the first."""
    weights = 1 / np.sqrt(np.arange(1, PREFIXES + 1))
    return weights / weights.sum()


def popular(rng: np.random.Generator, count: int) -> list[int]:
    """Return the prefixes of ``count`` random requests."""
    found: list[int] = rng.choice(PREFIXES, count, p=popularity()).tolist()
    return found


if __name__ == "__main__":
    main()
