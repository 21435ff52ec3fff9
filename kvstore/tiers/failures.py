"""Memory of loads that failed, so that a lookup does not send the same request into the same failure for ever."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.bounded import BoundedDict
from kvstore.types import BlockKey, RequestContext

__all__ = ["FailedLoads"]

_KEYS_MAX = 1 << 16
"""Failed keys remembered in all; the oldest are forgotten, which costs one more failed load each."""

_REQUESTS_MAX = 1 << 12
"""Requests with failed loads remembered; more than an engine runs at once."""


class FailedLoads:
    """Keys whose last load failed: MISS for that request as long as it lives, for all others until a pause is over."""

    def __init__(self, retry_after_s: float) -> None:
        self._retry_after_s = retry_after_s
        self._until: BoundedDict[BlockKey, float] = BoundedDict(_KEYS_MAX)
        # A load may fail after its request has ended, and then nobody forgets it.
        self._by_request: BoundedDict[str, set[BlockKey]] = BoundedDict(_REQUESTS_MAX)

    def note(self, keys: Sequence[BlockKey], ctx: RequestContext | None, now: float) -> None:
        """Note a failed load of keys on behalf of a request."""
        for key in keys:
            self._until[key] = now + self._retry_after_s
        if ctx is not None:
            self._by_request.setdefault(ctx.request_id, set()).update(keys)

    def blocks(self, key: BlockKey, ctx: RequestContext | None, now: float) -> bool:
        """Whether a lookup of the key by the request must answer MISS."""
        if not self._until and not self._by_request:
            return False
        if ctx is not None and key in self._by_request.get(ctx.request_id, ()):
            return True
        until = self._until.get(key)
        if until is None:
            return False
        if now < until:
            return True
        del self._until[key]
        return False

    def forget_request(self, request_id: str) -> None:
        """Drop what is known of a request."""
        self._by_request.pop(request_id, None)
