"""A lease: of all engines on a bucket, one at a time does the housekeeping. Needs conditional writes, and no clocks."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Final

import msgspec

from kvstore.backends.s3.client import ObjectClient

__all__ = ["Lease"]

_BYTES_MAX: Final = 4096
_NO_OWNER: Final = ""


class _Body(msgspec.Struct, frozen=True):
    """Content of the object. Others look at whether it has changed, and whether it has an owner."""

    owner: str
    renewals: int


class Lease:
    """An object that its holder writes anew, again and again; another engine takes it when it has not changed for long.

    No two clocks are compared: the holder counts from before its renewal, the others from when they saw it. So there is
    one holder at a time, as long as clocks run at about the same speed. (The scheme is that of Kubernetes' leader
    election.) ``length_s`` is for how long a renewal holds, ``timeout_s`` for each request.
    """

    def __init__(
        self,
        client: ObjectClient,
        name: str,
        length_s: float,
        timeout_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._name = name
        self._length_s = length_s
        self._timeout_s = timeout_s
        self._clock = clock
        self._owner = os.urandom(8).hex()
        self._renewals = 0
        self._etag = ""
        self._renewed_at = 0.0
        self._seen = ""
        self._seen_at = 0.0

    @property
    def is_held(self) -> bool:
        """Whether no other engine can hold it now."""
        return bool(self._etag) and self._clock() - self._renewed_at < self._length_s

    async def hold(self) -> bool:
        """Take or renew it; False if another engine has it.

        Raises:
            S3Error: The service could not be asked; a lease that is held runs on until its end.
        """
        if self._etag:
            if await self._write(if_match=self._etag):
                return True
            self._etag = ""
        body = memoryview(bytearray(_BYTES_MAX))
        found = await self._client.get_into(self._name, [body], timeout_s=self._timeout_s)
        if found is None:
            return await self._write(if_absent=True)
        now = self._clock()
        if found.etag != self._seen:
            self._seen, self._seen_at = found.etag, now
        # Given back; or a write of ours whose answer was lost.
        is_free = _owner_of(bytes(body[: found.size_bytes])) in (_NO_OWNER, self._owner)
        if not is_free and now - self._seen_at < self._length_s:
            return False
        return await self._write(if_match=found.etag)

    async def give_back(self, timeout_s: float) -> None:
        """Let another engine take it at once, if it is held.

        Raises:
            S3Error: The service failed; the others wait until it has run out.
        """
        etag, self._etag = self._etag, ""
        if etag:
            body = msgspec.json.encode(_Body(_NO_OWNER, self._renewals + 1))
            await self._client.put(self._name, [body], timeout_s=timeout_s, if_match=etag)

    async def _write(self, *, if_match: str = "", if_absent: bool = False) -> bool:
        self._renewals += 1
        body = msgspec.json.encode(_Body(self._owner, self._renewals))
        began = self._clock()
        etag = await self._client.put(
            self._name, [body], timeout_s=self._timeout_s, if_match=if_match, if_absent=if_absent
        )
        self._etag = etag or ""
        self._renewed_at = began
        return bool(etag)


def _owner_of(body: bytes) -> str | None:
    """Return who owns it; None if it is no lease of ours, which runs out as any other."""
    try:
        return msgspec.json.decode(body, type=_Body).owner
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
