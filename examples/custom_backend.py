"""A backend of your own in a few lines, and a cache that uses it.

Run it: ``python examples/custom_backend.py``. It stores a block, forgets it, and loads it back.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from kvstore import Namespace, SimpleBackend, TransferJob, open_tier
from kvstore.backends.vectored import scatter


class DictBackend(SimpleBackend):
    """Keeps records in a dict: stands for the client of your medium."""

    name = "dict"
    records: dict[bytes, bytes] = {}  # noqa: RUF012 - shared by all of the process, so that it outlives a close.

    async def put_one(self, key: bytes, buffers: Sequence[memoryview]) -> bool:
        """Publish a record unless there is one; the buffers are read now and never again."""
        name = self.namespace.digest + key
        return self.records.setdefault(name, record := b"".join(buffers)) is record

    async def get_one_into(self, key: bytes, buffers: Sequence[memoryview]) -> int | None:
        """Fill the buffers; say how long the record is, or that there is none."""
        record = self.records.get(self.namespace.digest + key)
        return None if record is None else scatter(record, buffers)

    async def exists_one(self, key: bytes) -> bool:
        """Say whether there is a record."""
        return self.namespace.digest + key in self.records

    async def delete_one(self, key: bytes) -> bool:
        """Remove a record; lets the tier take bad ones out of the way."""
        return self.records.pop(self.namespace.digest + key, None) is not None


def main() -> None:
    """Store a block of 4096 bytes, overwrite its memory, load it back."""
    memory = bytearray(b"\x07" * 4096 + bytes(4096))
    tier = open_tier(
        {"backend": f"{__name__}:DictBackend"},
        primary=memoryview(memory),
        slot_bytes=4096,
        namespace=Namespace({"model": "example"}),
    )
    try:
        tier.submit_store(TransferJob(1, [b"key of the block"], [0]))
        tier.drain()
        print(tier.get_finished()[0])
        memory[:4096] = bytes(4096)
        tier.submit_load(TransferJob(2, [b"key of the block"], [1]))
        started = time.monotonic()
        while not (finished := tier.get_finished()) and time.monotonic() < started + 5:
            time.sleep(0.001)  # An engine would compute meanwhile.
        print(finished[0])
        print("the same bytes:", memory[4096:] == b"\x07" * 4096)
    finally:
        tier.close()


if __name__ == "__main__":
    main()
