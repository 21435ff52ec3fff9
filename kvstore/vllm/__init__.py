"""kvstore for vLLM's ``OffloadingConnector``: a secondary tier, and a spec that also runs on vLLM's CPU platform.

vLLM finds both by name: ``{"type": "KVStoreTier", "module_path": "kvstore.vllm", …}`` in ``secondary_tiers`` of its own
``TieringOffloadingSpec`` (0.31 to 0.33), or ``{"spec_name": "KVStoreOffloadingSpec", "spec_module_path":
"kvstore.vllm"}``. With the plugin in :mod:`kvstore.vllm.plugin`, ``module_path`` and ``spec_module_path`` are
unnecessary.

Importing this package does not import vLLM. The classes load at first use, so the plugin costs nothing in processes
that don't use them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvstore.vllm.spec import KVStoreOffloadingSpec
    from kvstore.vllm.tier import KVStoreTier

__all__ = ["KVStoreOffloadingSpec", "KVStoreTier"]

_HOMES = {"KVStoreOffloadingSpec": "kvstore.vllm.spec", "KVStoreTier": "kvstore.vllm.tier"}


def __getattr__(name: str) -> Any:
    """Load an exported class at its first use (PEP 562)."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
