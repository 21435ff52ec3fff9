"""The peer tier: engines serve each other the blocks of their primary tiers."""

from kvstore.backends.peer.backend import PeerBackend
from kvstore.backends.peer.config import PeerConfig

__all__ = ["PeerBackend", "PeerConfig"]
