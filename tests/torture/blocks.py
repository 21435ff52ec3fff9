"""Self-verifying blocks: the payload of a key is a function of the key."""

from __future__ import annotations

import hashlib
import mmap
import time
from collections.abc import Sequence
from typing import Any

from kvstore import AsyncTier, JobResult, Namespace, TransferJob, open_tier


def key_of(number: int) -> bytes:
    """Return the key of block ``number``."""
    return hashlib.sha256(b"block %d" % number).digest() + b"\0\0\0\1"


def payload_of(number: int, slot_bytes: int) -> bytes:
    """Return the bytes of block ``number``; no two blocks, and no two pages of a block, are equal."""
    page = hashlib.shake_256(b"payload %d" % number).digest(64)
    pages = [(page + i.to_bytes(4, "little")) * 64 for i in range(-(-slot_bytes // 4096))]
    return b"".join((p + bytes(4096))[:4096] for p in pages)[:slot_bytes]


def lent_by(tier: AsyncTier) -> dict[str, int]:
    """Return the bytes in flight and the header buffers in use of a tier on a thread; both are 0 if it is idle."""
    mover = tier._channel._side._parts.mover  # type: ignore[attr-defined]
    return {"bytes": mover._bytes.in_use, "headers": mover._headers.count - mover._headers.free_count}


class Client:
    """A tier with a small primary tier of its own, used as an engine would."""

    def __init__(
        self, config: dict[str, Any], *, slots: int = 8, slot_bytes: int = 16384, wrap_backend: Any = None
    ) -> None:
        self.slot_bytes = slot_bytes
        self.slots = slots
        self.memory = mmap.mmap(-1, slots * slot_bytes)
        self.view = memoryview(self.memory)
        self.tier: AsyncTier = open_tier(
            config,
            primary=self.view,
            slot_bytes=slot_bytes,
            namespace=Namespace({"model": "m"}),
            wrap_backend=wrap_backend,
        )
        self._job = 0

    def store(self, numbers: Sequence[int], timeout_s: float = 90) -> JobResult:
        """Store blocks and wait for the result."""
        for slot, number in enumerate(numbers):
            self._slot(slot)[:] = payload_of(number, self.slot_bytes)
        return self._run(self.tier.submit_store, numbers, timeout_s)

    def load(self, numbers: Sequence[int], timeout_s: float = 90) -> JobResult:
        """Load blocks and wait for the result; :meth:`wrong` checks the loaded bytes."""
        for slot in range(len(numbers)):
            self._slot(slot)[:] = b"\xee" * self.slot_bytes
        return self._run(self.tier.submit_load, numbers, timeout_s)

    def wrong(self, numbers: Sequence[int], result: JobResult) -> list[int]:
        """Return the blocks of a load that were reported as good but are wrong."""
        good = set(result.successful_keys)
        return [
            number
            for slot, number in enumerate(numbers)
            if key_of(number) in good and bytes(self._slot(slot)) != payload_of(number, self.slot_bytes)
        ]

    def close(self) -> None:
        """Close the tier and check that no view of the memory is left: a mapping in use cannot be closed."""
        self.tier.close()
        self.view.release()
        self.memory.close()

    def _slot(self, slot: int) -> memoryview:
        return self.view[slot * self.slot_bytes : (slot + 1) * self.slot_bytes]

    def _run(self, submit: Any, numbers: Sequence[int], timeout_s: float) -> JobResult:
        self._job += 1
        submit(TransferJob(self._job, [key_of(n) for n in numbers], range(len(numbers))))
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            for result in self.tier.get_finished():
                return result
            self.tier.wait(0.05)
        raise TimeoutError(f"job {self._job} was not reported within {timeout_s} s")
