"""Plugin for vLLM that registers names of kvstore's classes, so that a configuration needs no module paths.

With the plugin, ``{"type": "file", "path": …}`` works in the ``secondary_tiers`` of vLLM's own
``TieringOffloadingSpec``, and ``KVStoreConnector`` and ``KVStoreOffloadingSpec`` need no module path. vLLM calls
:func:`register` in every process, even without a KV cache, so it only adds names; classes are imported at first use. It
also sets up logging and checks the configuration, which must happen early.
"""

from __future__ import annotations

import logging

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.v1.kv_offload.factory import OffloadingSpecFactory
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

from kvstore.vllm.compat import mark_media_of_clients
from kvstore.vllm.options import tier_types
from kvstore.vllm.startup import check_start, show_logs

logger = logging.getLogger("kvstore.vllm.plugin")

_MODULE = "kvstore.vllm"


def register() -> None:
    """Add kvstore's names to vLLM's factories; existing names are kept. Idempotent.

    Raises:
        ConfigError: The configuration of the engine under construction is invalid.
        SystemExit: The same, in a server.
    """
    show_logs()
    try:
        KVConnectorFactory.register_connector("KVStoreConnector", _MODULE, "KVStoreConnector")
    except ValueError:
        logger.debug("KVStoreConnector is already registered with vLLM")
    # Configurations of earlier releases, and --kv-offloading-size, name vLLM's connector. Ours does the same and more.
    KVConnectorFactory._registry["OffloadingConnector"] = KVConnectorFactory._registry["KVStoreConnector"]
    try:
        OffloadingSpecFactory.register_spec("KVStoreOffloadingSpec", _MODULE, "KVStoreOffloadingSpec")
    except ValueError:
        logger.debug("KVStoreOffloadingSpec is already registered with vLLM")
    for tier_type in sorted(tier_types()):
        try:
            SecondaryTierFactory.register_tier(tier_type, _MODULE, "KVStoreTier")
        except ValueError:
            logger.debug("A secondary tier %s is already registered with vLLM", tier_type)
    mark_media_of_clients()
    check_start()
