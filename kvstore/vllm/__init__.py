"""kvstore for vLLM 0.31 to 0.33: a connector, a spec that also runs on vLLM's CPU platform, and a secondary tier.

vLLM finds them by name: ``{"kv_connector": "KVStoreConnector", "kv_connector_module_path": "kvstore.vllm"}``;
``{"spec_name": "KVStoreOffloadingSpec", "spec_module_path": "kvstore.vllm"}`` in its ``kv_connector_extra_config``; or
there ``{"type": "KVStoreTier", "module_path": "kvstore.vllm", …}`` in ``secondary_tiers`` of vLLM's own
``TieringOffloadingSpec``. With the plugin in :mod:`kvstore.vllm.plugin`, no module path is necessary.

Importing this package does not import vLLM. The classes load at first use, so the plugin costs nothing in processes
that don't use them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvstore.vllm.connector import KVStoreConnector
    from kvstore.vllm.spec import KVStoreOffloadingSpec
    from kvstore.vllm.tier import KVStoreTier

__all__ = ["KVStoreConnector", "KVStoreOffloadingSpec", "KVStoreTier"]

_HOMES = {
    "KVStoreConnector": "kvstore.vllm.connector",
    "KVStoreOffloadingSpec": "kvstore.vllm.spec",
    "KVStoreTier": "kvstore.vllm.tier",
}


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
