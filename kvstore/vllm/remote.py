"""Other engines named in vLLM's requests and configuration, with the field names of vLLM's routers."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Mapping
from typing import Any, Final

from kvstore.backends.peer.config import endpoint_of
from kvstore.types import Source

_HAND_OVER_S: Final = 60.0
"""Time for which a handed-over request's blocks are kept by the sender and awaited by the receiver; the same as in
vLLM's own tier."""


def remote_fields(params: Any, *, serves: bool) -> dict[str, Any]:
    """Return the fields of a ``RequestContext`` for the source and the destination of its blocks.

    Args:
        params: The request's ``kv_transfer_params``, unchecked.
        serves: Whether this engine serves other engines.
    """
    if not isinstance(params, Mapping):
        return {}
    fields: dict[str, Any] = {}
    for role in ("remote_kv_source", "remote_prefiller"):
        named = params.get(role)
        if isinstance(named, Mapping) and (host := named.get("remote_host")) and (port := named.get("remote_port")):
            host = f"[{host}]" if ":" in str(host) else host
            fields = {"source": Source(f"{host}:{port}", _hand_over(named)), "since": time.monotonic()}
            # The prefill may still be running.
            fields["patience_s"] = _HAND_OVER_S if role == "remote_prefiller" else 0.0
            break
    decoder = params.get("remote_decoder")
    if serves and isinstance(decoder, Mapping):
        fields |= {"hand_over_s": _HAND_OVER_S, "hand_over": _hand_over(decoder)}
    return fields


def serves_peers(tiers: Iterable[Mapping[str, Any]]) -> bool:
    """Return whether any configured tier serves other engines."""
    return any(tier.get("listen") for tier in tiers)


def of_replica(options: dict[str, Any], spec: Any) -> dict[str, Any]:
    """Return the options of a tier for one data-parallel replica, each of which listens on its own port.

    The port is the configured port plus the replica's index, as in vLLM's own tier.
    """
    index = getattr(spec.config.parallel, "data_parallel_index", 0) or 0
    if not options.get("listen") or not index:
        return options
    endpoint = endpoint_of(str(options["listen"]))
    return {**options, "listen": f"{options['listen'].rpartition(':')[0]}:{endpoint.port + index}"}


def _hand_over(role: Mapping[str, Any]) -> bytes:
    """Return the digest of a hand-over's name, which has a fixed length; empty if there is no name."""
    name = role.get("kv_request_id")
    return hashlib.sha256(name.encode(errors="replace")).digest() if isinstance(name, str) and name else b""
