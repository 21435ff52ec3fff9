"""The peer tier: engines serve blocks of their primary tiers to each other."""

from kvstore.backends.peer.backend import PeerBackend
from kvstore.backends.peer.config import PeerConfig

__all__ = ["PeerBackend", "PeerConfig"]
