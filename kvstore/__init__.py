"""kvstore stores the KV cache of large language models on secondary media: local disks, networks, and custom backends.

This module exports the main API: :func:`open_tier` opens a secondary tier over your memory; :class:`Backend` and
:class:`SimpleBackend` are the base classes for new media. vLLM's entry points are in ``kvstore.vllm``, the only package
that imports vLLM.

The modules of tiers take half of the import time, so they are imported at the first use of one of their names.
"""

from __future__ import annotations

import importlib
import os
import warnings
from typing import TYPE_CHECKING, Any

from kvstore.backends.base import Backend, BackendStats, RecordGeometry, RecordRead, RecordWrite
from kvstore.backends.simple import SimpleBackend
from kvstore.config import TierConfig
from kvstore.errors import (
    AbsentError,
    BackendClosedError,
    BackendError,
    BackendUnavailableError,
    ConfigError,
    HostClosedError,
    KVStoreError,
    LockedError,
    NoSpaceError,
    RecordError,
)
from kvstore.namespace import Namespace
from kvstore.types import (
    BlockInfo,
    BlockKey,
    JobResult,
    Locality,
    LookupResult,
    Medium,
    MissCause,
    NamespaceInfo,
    Outcome,
    RemovalCause,
    RequestContext,
    TierEvent,
    TransferJob,
)

if TYPE_CHECKING:
    from kvstore.primary import PrimaryTier, Region
    from kvstore.tiering import OffloadPolicy, TieringConfig, TieringManager
    from kvstore.tiers import AsyncTier, JobSample, SecondaryTierManager, TierStats, open_tier

__all__ = [
    "AbsentError",
    "AsyncTier",
    "Backend",
    "BackendClosedError",
    "BackendError",
    "BackendStats",
    "BackendUnavailableError",
    "BlockInfo",
    "BlockKey",
    "ConfigError",
    "HostClosedError",
    "JobResult",
    "JobSample",
    "KVStoreError",
    "Locality",
    "LockedError",
    "LookupResult",
    "Medium",
    "MissCause",
    "Namespace",
    "NamespaceInfo",
    "NoSpaceError",
    "OffloadPolicy",
    "Outcome",
    "PrimaryTier",
    "RecordError",
    "RecordGeometry",
    "RecordRead",
    "RecordWrite",
    "Region",
    "RemovalCause",
    "RequestContext",
    "SecondaryTierManager",
    "SimpleBackend",
    "TierConfig",
    "TierEvent",
    "TierStats",
    "TieringConfig",
    "TieringManager",
    "TransferJob",
    "__version__",
    "open_tier",
]

__version__ = "0.2.0"

if os.path.exists(os.path.join(os.path.dirname(os.path.dirname(__file__)), "kvstore.py")):
    # Only the order of Python's import path decides which of the two is imported.
    warnings.warn(
        "Another package named 'kvstore' is installed with this one, whose package is 'vllm-kvstore'. Remove it: "
        "pip uninstall kvstore.",
        RuntimeWarning,
        stacklevel=2,
    )

_HOMES = {
    **dict.fromkeys(("PrimaryTier", "Region"), "kvstore.primary"),
    **dict.fromkeys(("OffloadPolicy", "TieringConfig", "TieringManager"), "kvstore.tiering"),
    **dict.fromkeys(("AsyncTier", "JobSample", "SecondaryTierManager", "TierStats", "open_tier"), "kvstore.tiers"),
}


def __getattr__(name: str) -> Any:
    """Import the modules of tiers at the first use of one of their names (PEP 562)."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(home), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
