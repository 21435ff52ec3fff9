"""vLLM's plugin: names for kvstore's classes, so that a configuration needs no module paths.

With it, ``{"type": "file", "path": …}`` works in the ``secondary_tiers`` of vLLM's own ``TieringOffloadingSpec``, and
``"spec_name": "KVStoreOffloadingSpec"`` without ``spec_module_path``. vLLM calls :func:`register` in every process,
also in those that never see a KV cache, so it only adds names; the classes are imported when one is used.
"""

from __future__ import annotations

import logging

from vllm.v1.kv_offload.factory import OffloadingSpecFactory
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

from kvstore.registry import BACKENDS

__all__ = ["register"]

logger = logging.getLogger("kvstore.vllm.plugin")

_MODULE = "kvstore.vllm"


def register() -> None:
    """Add kvstore's names to vLLM's factories; a name that is taken stays as it is. May be called again."""
    try:
        OffloadingSpecFactory.register_spec("KVStoreOffloadingSpec", _MODULE, "KVStoreOffloadingSpec")
    except ValueError:
        logger.debug("vLLM knows KVStoreOffloadingSpec already")
    for tier_type in ["KVStoreTier", *BACKENDS.names()]:
        try:
            SecondaryTierFactory.register_tier(tier_type, _MODULE, "KVStoreTier")
        except ValueError:
            logger.debug("vLLM knows a secondary tier %s already", tier_type)
