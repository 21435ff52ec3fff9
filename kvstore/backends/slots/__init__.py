"""Blocks on drives: segments of equal slots, each described by a table that is written in place."""

from __future__ import annotations

from kvstore.backends.slots.backend import SlotsBackend
from kvstore.backends.slots.config import SlotsConfig

__all__ = ["SlotsBackend", "SlotsConfig"]
