"""Peer backends with other limits, for tiers that are opened from a configuration."""

from __future__ import annotations

from typing import ClassVar

from kvstore.backends.peer import PeerBackend, PeerConfig
from kvstore.backends.peer.limits import Limits


class _Limited(PeerBackend):
    limits: ClassVar[Limits]

    def __init__(self, config: PeerConfig) -> None:
        super().__init__(config, self.limits)


class Forgiving(_Limited):
    """Pauses a peer only shortly after a record that failed verification."""

    limits = Limits(distrust_s=0.02, distrust_s_max=0.2)


class FewNamed(_Limited):
    """Remembers two peers that requests named."""

    limits = Limits(named_max=2)


class FewFound(_Limited):
    """Remembers 64 peers of the directory."""

    limits = Limits(found_max=64)


class NoFurtherSummaries(_Limited):
    """Reads one batch of summaries."""

    limits = Limits(read_bytes_max=1, read_bytes_per_s=0)
