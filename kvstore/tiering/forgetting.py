"""Forgetting a tenant: all of its blocks leave every tier, and meanwhile it finds and stores nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from kvstore.primary.tier import PrimaryTier
from kvstore.tenants import TAG_BYTES
from kvstore.tiering.jobs import JobTable
from kvstore.tiering.link import TierLink
from kvstore.types import BlockKey

__all__ = ["Forgetting"]

_PENDING_S: Final = 60.0
"""How long an idle engine makes steps for it; after that it goes on with the next request."""


@dataclass(slots=True)
class _Case:
    """What is left to do for a tenant.

    Attributes:
        keys: Its blocks in the primary tier, some of which may still be in use.
        links: Tiers that may still have blocks of it.
        since: When it began.
    """

    keys: set[BlockKey]
    links: list[TierLink]
    since: float


class Forgetting:
    """Tenants that are being forgotten, by their tags.

    A block leaves the primary tier as soon as nothing uses its slot. A tier is asked once no store of such blocks is
    under way in it, and no new one begins, so what it removes is all there is.

    Args:
        primary: The primary tier.
        jobs: The unfinished jobs.
        links: The tiers.
        drop: Removes those blocks from the primary tier that are not in use.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        primary: PrimaryTier,
        jobs: JobTable,
        links: Sequence[TierLink],
        drop: Callable[[Sequence[BlockKey]], None],
        clock: Callable[[], float],
    ) -> None:
        self._primary = primary
        self._jobs = jobs
        self._links = [link for link in links if link.takes_stores]
        self._drop = drop
        self._clock = clock
        self._cases: dict[bytes, _Case] = {}

    def __bool__(self) -> bool:
        return bool(self._cases)

    def __len__(self) -> int:
        return len(self._cases)

    @property
    def pending(self) -> bool:
        """Whether steps are needed: there is work, and not for long. A medium that is down is not waited for."""
        since = self._clock() - _PENDING_S
        return any(case.since > since for case in self._cases.values())

    def covers(self, key: BlockKey) -> bool:
        """Whether a block is one of a tenant that is being forgotten."""
        return key[:TAG_BYTES] in self._cases

    def begin(self, tag: bytes) -> None:
        """Forget a tenant; nothing if that is under way."""
        if tag not in self._cases:
            keys = {key for key in self._primary.keys() if key.startswith(tag)}  # noqa: SIM118 (not a mapping)
            self._cases[tag] = _Case(keys, list(self._links), self._clock())

    def advance(self) -> None:
        """Do what can be done now; once per step."""
        for tag, case in list(self._cases.items()):
            self._drop(list(case.keys))
            case.keys = {key for key in case.keys if key in self._primary}
            stores = [job for job in self._jobs if not job.is_load]
            storing = {job.link for job in stores if any(key.startswith(tag) for key in job.transfer.keys)}
            case.links = [link for link in case.links if link in storing or not link.forget(tag)]
            if not case.keys and not case.links:
                del self._cases[tag]
