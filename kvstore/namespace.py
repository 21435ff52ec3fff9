"""Namespace: the digest of all that changes the bytes of a block."""

from __future__ import annotations

__all__ = ["Namespace"]


class Namespace:
    """Placeholder until the namespace lands (same sitting)."""

    digest: bytes
    hex: str
