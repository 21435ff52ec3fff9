"""Opening a tier: from a configuration to its two halves, joined by a channel."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kvstore.backends.base import Backend
from kvstore.config import decode_config
from kvstore.errors import ConfigError
from kvstore.namespace import Namespace
from kvstore.registry import BACKENDS
from kvstore.runtime.host import ThreadHost, shared_thread_host
from kvstore.tiers.async_tier import AsyncTier
from kvstore.tiers.tier_io import TierIO, TierIOSpec

__all__ = ["open_tier"]

_OPEN_TIMEOUT_S = 60.0
"""A backend opens in milliseconds and recovers in the background; a medium that takes this long is not there."""


_RECOVERY_WAIT_S = 1.0
"""Time that an opening tier waits for its recovery, so that the first lookups are answered at once; a snapshot of a
hundred thousand blocks needs a fraction of it. Recovery that takes longer goes on in the background."""


def open_tier(
    config: Mapping[str, Any],
    *,
    primary: memoryview,
    slot_bytes: int,
    namespace: Namespace,
    name: str = "",
    wrap_backend: Callable[[Backend], Backend] | None = None,
    host: ThreadHost | None = None,
) -> AsyncTier:
    """Open a secondary tier.

    Args:
        config: The JSON object of the tier: ``backend`` (or ``type``) names the backend, the rest are its options.
        primary: Memory of the primary tier; C-contiguous, writable, rows of ``slot_bytes``. Page-aligned rows that are
            multiples of 4096 bytes travel without a copy. It is held until the tier is closed.
        slot_bytes: Length of a row in bytes.
        namespace: All that changes the bytes of a block; the option ``namespace`` is added to it.
        name: Name in statistics; by default the option ``label``, else the backend's name.
        wrap_backend: Puts something around the backend, such as ``kvstore.testing.FaultyBackend``.
        host: Where the I/O half runs; by default the process's own loop thread, shared by all tiers.

    Raises:
        ConfigError: The configuration can't be used; nothing was changed.
        BackendError: The medium refuses, and the tier is ``required``.
    """
    options = dict(config)
    kind = options.pop("backend", None) or options.pop("type", None)
    options.pop("type", None)
    if not isinstance(kind, str):
        raise ConfigError('A tier needs "backend": the name of its backend, such as "file".')
    cls = BACKENDS.find(kind)
    decoded = decode_config(cls.config_type, options, where=f"{kind} tier")
    if decoded.io != "thread":
        raise ConfigError(f'"io": {decoded.io!r} is not available in this version. Use "thread" (the default).')
    if decoded.namespace:
        namespace = namespace.with_fields(user_namespace=decoded.namespace)

    backend: Backend = cls(decoded)
    if wrap_backend is not None:
        backend = wrap_backend(backend)
    spec = TierIOSpec(backend, decoded, namespace, primary, slot_bytes)
    channel = (host or shared_thread_host()).attach(lambda post: TierIO(spec, post))
    try:
        channel.open(_OPEN_TIMEOUT_S)
    except BaseException:
        channel.close(_OPEN_TIMEOUT_S)
        raise
    tier = AsyncTier(
        channel,
        decoded,
        name=name or decoded.label or backend.name,
        medium=backend.medium,
        locality=backend.locality,
        exclusive=backend.exclusive,
        slot_bytes=slot_bytes,
    )
    tier.wait_recovered(_RECOVERY_WAIT_S)
    return tier
