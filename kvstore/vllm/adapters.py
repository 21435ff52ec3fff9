"""Digests of LoRA adapters: vLLM's block hashes have an adapter's name and path, not its content."""

from __future__ import annotations

import hashlib
import logging
import os
import queue
import threading
import time
from typing import Any, Final

from kvstore.vllm.compat import adapter_directory, hashes_adapter_paths

logger = logging.getLogger("kvstore.vllm.adapters")

DIGEST_BYTES: Final = 16
"""Length of an adapter's digest, in the tag of its blocks' keys."""

NO_ADAPTER: Final = bytes(DIGEST_BYTES)
"""In place of a digest for requests without an adapter."""

_FILES: Final = ("adapter_config.", "adapter_model.", "new_embeddings.")
"""Beginnings of the names of the files that vLLM loads; the directory may also have a trainer's state of gigabytes."""

_CHECK_S: Final = 10.0
"""Time after which a request no longer waits for the check of its adapter. Reading gigabytes takes seconds."""

_Signature = tuple[tuple[str, int, int, int, int], ...]
"""Name, size, times of modification and change, and inode of each file."""


class _Known:
    """An adapter in use by this engine. Only the thread changes it."""

    def __init__(self) -> None:
        self.signature: _Signature = ()
        self.digest: bytes | None = None
        self.has_changed = False


class Check:
    """The check of one request's adapter."""

    def __init__(self, name: str, path: str) -> None:
        self.name, self.path = name, path
        # Digest of the adapter's content; None if it is not known exactly, or not in time.
        self.digest: bytes | None = None
        self.has_ended = False
        self._deadline = time.monotonic() + _CHECK_S

    @property
    def is_done(self) -> bool:
        """Whether the check has ended, or takes too long."""
        return self.has_ended or time.monotonic() > self._deadline


class Adapters:
    """Digests of the content of LoRA adapters, computed on a thread, and again when the files change.

    Once an engine has used an adapter, a change of its files leaves open which content its workers and vLLM's own cache
    have. From then on the adapter has no digest in this engine.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[str, ...], _Known] = {}
        self._checks: queue.SimpleQueue[Check] = queue.SimpleQueue()
        self._by_path = hashes_adapter_paths()
        self._thread: threading.Thread | None = None

    def check(self, adapter: Any) -> Check:
        """Begin to check an adapter.

        Args:
            adapter: vLLM's ``LoRARequest``.
        """
        check = Check(str(adapter.lora_name), str(adapter.lora_path))
        if self._thread is None:
            # A daemon, because a file system that hangs must not prevent the exit of the process.
            self._thread = threading.Thread(target=self._run, name="kvstore-adapters", daemon=True)
            self._thread.start()
        self._checks.put(check)
        return check

    def _run(self) -> None:
        while True:
            check = self._checks.get()
            try:
                check.digest = self._digest_of(check)
            except Exception as error:  # Such as a hub's errors; the thread must go on for the other adapters.
                logger.warning("LoRA adapter %s at %s: %s. Its blocks are not kept.", check.name, check.path, error)
            check.has_ended = True

    def _digest_of(self, check: Check) -> bytes | None:
        names = (check.name, check.path) if self._by_path else (check.name,)
        known = self._known.setdefault(names, _Known())
        directory = adapter_directory(check.path)
        signature = _signature_of(directory)
        if known.has_changed or signature == known.signature:
            return None if known.has_changed else known.digest
        digest = hashlib.sha256()
        for name, size_bytes, *_ in signature:
            digest.update(f"{name}\0{size_bytes}\0".encode())
            with open(os.path.join(directory, name), "rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        found = digest.digest()[:DIGEST_BYTES]
        if _signature_of(directory) != signature or known.digest not in (None, found):
            known.has_changed = True
            logger.warning(
                "The files of LoRA adapter %s at %s changed while this engine used it. Its blocks are neither stored "
                "nor loaded until the engine restarts. Load changed adapters from a new path.",
                check.name,
                check.path,
            )
            return None
        known.signature, known.digest = signature, found
        return found


def _signature_of(directory: str) -> _Signature:
    """Return the signature of an adapter's files.

    Raises:
        OSError: There is no such directory, or it has no such files.
    """
    with os.scandir(directory) as entries:
        files = sorted((entry.name, entry.stat()) for entry in entries if entry.name.startswith(_FILES))
    if not files:
        raise FileNotFoundError(f"{directory} has no file adapter_config.json or adapter_model.*")
    return tuple((name, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino) for name, stat in files)
