"""Configuration of engines with a peer tier."""

from __future__ import annotations

from typing import Any


def offloading(manager: str = "kvstore", **tier: Any) -> dict[str, Any]:
    """Return ``kv_connector_extra_config`` with a peer tier alone, for requests that are handed over."""
    tiering = {"tiering": {"allow": ["remote_decoder"]}} if manager == "kvstore" else {}
    return {
        "spec_name": "KVStoreOffloadingSpec",
        "spec_module_path": "kvstore.vllm",
        "manager": manager,
        "cpu_bytes_to_use": 64 * 2**20,
        "secondary_tiers": [
            {"type": "peer", "secret": "a secret of sixteen", "lookup_timeout": 20, "load_timeout": 60, **tier}
        ],
        **tiering,
    }
