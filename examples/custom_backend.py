"""A backend of your own in a few lines, and a cache that uses it.

Run it: ``python examples/custom_backend.py``. It stores a block, overwrites its memory, and loads it back from a file.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from kvstore import BlockInfo, Namespace, NamespaceInfo, SimpleBackend, TransferJob, open_tier
from kvstore.backends.threads import run_in_thread
from kvstore.backends.vectored import scatter
from kvstore.config import TierConfig

NAME = re.compile("[0-9a-f]{64}-(?:[0-9a-f]{2}){1,64}")


class FilesConfig(TierConfig, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """The backend's option, in addition to the common options of all tiers: an existing directory."""

    path: str


class FilesBackend(SimpleBackend):
    """Keeps each record in a file of its own; replace this by the client of your medium."""

    name = "files"
    config_type = FilesConfig

    async def put_one(self, key: bytes, buffers: Sequence[memoryview]) -> bool:
        """Publish a record unless its key exists; a file receives its final name only when complete."""
        return await run_in_thread(_publish, self._path(key), buffers)

    async def get_one_into(self, key: bytes, buffers: Sequence[memoryview]) -> int | None:
        """Fill the buffers; return the length of the record, or None without one."""
        try:
            record = await run_in_thread(self._path(key).read_bytes)
        except FileNotFoundError:
            return None
        return scatter(record, buffers)

    async def exists_one(self, key: bytes) -> bool:
        """Return whether there is a record."""
        return await run_in_thread(self._path(key).exists)

    async def delete_one(self, key: bytes) -> bool:
        """Remove a record; return whether there was one. The tier also uses this to remove damaged records."""
        try:
            await run_in_thread(self._path(key).unlink)
        except FileNotFoundError:
            return False
        return True

    async def scan(self) -> AsyncIterator[BlockInfo]:
        """Yield every block of the namespace, for the admin tools."""
        self.check_open()
        start = f"{self.namespace.hex}-"
        for name, status in await run_in_thread(self._files):
            if name.startswith(start):
                yield BlockInfo(bytes.fromhex(name.removeprefix(start)), status.st_size, status.st_mtime)

    async def namespaces(self) -> Sequence[NamespaceInfo]:
        """Return the namespaces in the directory, for the admin tools."""
        used_at: dict[str, float] = {}
        for name, status in await run_in_thread(self._files):
            namespace = name.partition("-")[0]
            used_at[namespace] = max(used_at.get(namespace, 0.0), status.st_mtime)
        return [NamespaceInfo(namespace, used_at=at) for namespace, at in used_at.items()]

    def _path(self, key: bytes) -> Path:
        return Path(self._directory, f"{self.namespace.hex}-{key.hex()}")

    def _files(self) -> list[tuple[str, os.stat_result]]:
        found = []
        with os.scandir(self._directory) as entries:
            for entry in filter(lambda entry: NAME.fullmatch(entry.name), entries):
                with contextlib.suppress(FileNotFoundError):  # Meanwhile deleted by an engine.
                    found.append((entry.name, entry.stat()))
        return found

    @property
    def _directory(self) -> str:
        assert isinstance(self.config, FilesConfig)
        return self.config.path


def _publish(path: Path, buffers: Sequence[memoryview]) -> bool:
    begun = path.with_suffix(f".{secrets.token_hex(8)}")
    try:
        with begun.open("xb") as file:
            file.writelines(buffers)
        path.hardlink_to(begun)
    except FileExistsError:
        return False
    finally:
        begun.unlink()
    return True


def main() -> None:
    """Store a block of 4096 bytes, overwrite its memory, load it back."""
    with tempfile.TemporaryDirectory() as directory:
        _store_and_load(directory)


def _store_and_load(directory: str) -> None:
    memory = bytearray(b"\x07" * 4096 + bytes(4096))
    tier = open_tier(
        {"backend": f"{__name__}:FilesBackend", "path": directory},
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
