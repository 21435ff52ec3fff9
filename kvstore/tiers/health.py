"""Health of a tier's medium, judged by its jobs: one breaker for loads and lookups, one for stores."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from kvstore.config import TierConfig
from kvstore.runtime.breaker import Breaker
from kvstore.runtime.messages import JobKind, Probe
from kvstore.types import Outcome

logger = logging.getLogger("kvstore.tiers")


class TierHealth:
    """Decides whether calls reach the medium.

    A full disk must not stop loads, and failing reads must not stop stores, so each direction has its own breaker. The
    breaker of stores admits one store as a trial. The breaker of loads and lookups is closed by a probe, because no
    request should wait for a trial. But a probe shows only that lookups work. After a failed load, answered lookups
    therefore do not count as success, and the first failed load after the probe opens the breaker again, for longer.
    """

    def __init__(self, name: str, config: TierConfig) -> None:
        self._name = name
        self._config = config
        self.reset()

    def reset(self) -> None:
        """Close both breakers; at start, and with a new I/O half."""
        config = self._config
        numbers = (config.breaker_failures, float(config.breaker_cooldown), float(config.breaker_cooldown_max))
        self._breakers = {kind: Breaker(*numbers) for kind in JobKind}
        self._failed_loads = 0
        """Failed load jobs since the last successful one."""

    @property
    def loads_pass(self) -> bool:
        """Whether lookups and loads reach the medium."""
        return self._breakers[JobKind.LOAD].closed

    def admits_store(self, now: float) -> bool:
        """Return whether a store may go to the medium; if so, its job must be passed to :meth:`judge`."""
        breaker = self._breakers[JobKind.STORE]
        return breaker.closed or breaker.admit_trial(now)

    def state(self, kind: JobKind) -> str:
        """Return the state of a breaker, for statistics."""
        return self._breakers[kind].state.value

    def judge(self, kind: JobKind, outcomes: Sequence[Outcome], error: str, now: float) -> Probe | None:
        """Judge the medium by a job's outcomes; return the probe to send if the breaker of loads opened."""
        found = set(outcomes)
        failed = Outcome.OK not in found and any(outcome.is_failure for outcome in found)
        if kind is JobKind.LOAD:
            if failed and self._config.has_own_load_breakers:
                return None
            self._failed_loads = self._failed_loads + 1 if failed else 0
        if failed:
            return self.note_failure(kind, error, now)
        self._note_success(kind)
        return None

    def note_lookup(self) -> None:
        """Note that the medium answered a lookup."""
        if not self._failed_loads:
            self._note_success(JobKind.LOAD)

    def _note_success(self, kind: JobKind) -> None:
        breaker = self._breakers[kind]
        # An open breaker of loads is closed only by its probe, not by an earlier load that ends late.
        if (breaker.closed or kind is JobKind.STORE) and breaker.record_success():
            logger.warning("Tier %s: stores resume", self._name)

    def note_failure(self, kind: JobKind, error: str, now: float) -> Probe | None:
        """Note that the medium failed; see :meth:`judge`."""
        breaker = self._breakers[kind]
        if not breaker.record_failure(now):
            return None
        what = "loads and lookups" if kind is JobKind.LOAD else "stores"
        # Only the first opening is a warning; failed trials repeat at up to twice a minute.
        level = logging.WARNING if breaker.failures <= breaker.failures_max else logging.INFO
        logger.log(level, "Tier %s: %s stop after %d failures: %s", self._name, what, breaker.failures, error)
        if kind is JobKind.STORE:
            return None
        config = self._config
        return Probe(breaker.pause_s, float(config.breaker_cooldown_max), float(config.lookup_timeout))

    def note_probed(self, tries: int) -> None:
        """Note that the medium answered its probe."""
        breaker = self._breakers[JobKind.LOAD]
        was_closed = breaker.closed
        if self._failed_loads:
            breaker.close_on_probation()
        else:
            breaker.record_success()
        if not was_closed:
            logger.warning("Tier %s answers again after %d tries; loads resume", self._name, tries)
