"""kvstore keeps the KV cache of large language models on storage: local files, and media of your own.

The parts that most people need are here: :func:`open_tier` opens a secondary tier over memory of yours;
:class:`Backend` and :class:`SimpleBackend` are what a new medium is written against. vLLM finds its entry points in
``kvstore.vllm``, which alone imports vLLM.

The machinery of tiers, half of what all of this costs to import, is loaded at the first use of one of its names.
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
    # The two are told apart by nothing but the order in which Python looks.
    warnings.warn(
        "Another package named 'kvstore' is installed beside this one, whose package is 'vllm-kvstore'. Remove it: "
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
    """Load the machinery of tiers when it is first asked for (PEP 562)."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(home), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
