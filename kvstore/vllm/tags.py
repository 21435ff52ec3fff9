"""Attributes of vLLM's requests besides their keys: tenant, content of the LoRA adapter, and other engines.

kvstore's keys are vLLM's keys with the request's tag in front. vLLM's block hashes contain an adapter's name and path,
not its content, so a digest of its files is part of the tag.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from stat import S_ISLNK
from typing import Any, Final

from kvstore.backends.peer.config import endpoint_of
from kvstore.tenants import TAG_BYTES, Tags, Tenants
from kvstore.types import Source
from kvstore.vllm.compat import adapter_directory, has_adapters, hashes_adapter_paths, on_adapter_loaded
from kvstore.vllm.connector import EngineContext

logger = logging.getLogger("kvstore.vllm.tags")

DIGEST_BYTES: Final = 16
"""Length of an adapter's digest within a tag."""

NO_ADAPTER: Final = bytes(DIGEST_BYTES)
"""The digest of requests without an adapter."""

_FILES: Final = ("adapter_config.", "adapter_model.", "new_embeddings.")
"""Prefixes of the names of files that vLLM loads. The directory may also contain gigabytes of a trainer's state."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of the checks of adapters."""

    # Time after which a request no longer waits for the check of its adapter. Reading gigabytes takes seconds.
    check_s: float = 10.0
    # Adapters checked at once. One on a file system that hangs keeps a thread until the file system answers.
    threads_max: int = 32
    # Adapters that wait for a thread: more than an engine has requests for.
    waiting_max: int = 1024
    # Adapters with a digest (some 16 MB). Further ones get none: if an old one were dropped, a change of its files
    # would stay undetected.
    known_max: int = 16384


_Version = tuple[str, int, int, int, int]
"""Name, size, times of modification and change, and inode of a file."""

_Signature = tuple[_Version, ...]
"""The versions of all files, by name."""


class _Known:
    """An adapter in use by this engine."""

    def __init__(self) -> None:
        self.signature: _Signature = ()
        self.digest: bytes | None = None
        self.has_changed = False


class Check:
    """The check of an adapter, for the requests that came before its start."""

    def __init__(self, name: str, path: str, *, download: bool, limit_s: float) -> None:
        self.name, self.path, self.download = name, path, download
        # Digest of the adapter's content; None if it is ambiguous or late.
        self.digest: bytes | None = None
        self.signature: _Signature = ()  # Versions of the files with this digest, and of a link to their directory.
        self.has_ended = False
        self._deadline = time.monotonic() + limit_s

    @property
    def is_done(self) -> bool:
        """Whether the check has ended, or takes too long."""
        return self.has_ended or time.monotonic() > self._deadline


class Adapters:
    """Digests of the content of LoRA adapters, computed on threads, and again when the files change.

    Each adapter has at most one running check, and one waiting. If the files of an adapter change after its first use,
    the content in the workers and in vLLM's own cache is unknown. From then on the adapter has no digest in this
    engine.
    """

    def __init__(self, limits: Limits = Limits()) -> None:
        self._limits = limits
        self._changed = threading.Condition()
        """Protects all fields."""
        self._known: dict[tuple[str, ...], _Known] = {}
        self._waiting: dict[tuple[str, str], Check] = {}
        self._running: set[tuple[str, str]] = set()
        self._threads = 0
        self._by_path = hashes_adapter_paths()

    def check(self, adapter: Any) -> Check:
        """Begin to check an adapter. ``adapter``: vLLM's ``LoRARequest``."""
        return self._begin(str(adapter.lora_name), str(adapter.lora_path), download=True)

    def check_again(self, first: Check) -> Check:
        """Begin another check of an adapter, which a worker may have loaded by now, without asking a hub."""
        return self._begin(first.name, first.path, download=False)

    def is_unchanged(self, first: Check, again: Check) -> bool:
        """Return whether the files were the same at two checks; if they were not, the adapter has no digest any more.

        Equal content does not suffice: a worker may have loaded other files in between.
        """
        if again.digest is not None and again.signature != first.signature:
            with self._changed:
                self._known[self._names_of(first)].has_changed = True
            _warn_of_change(first)
            return False
        return again.digest is not None

    def _begin(self, name: str, path: str, *, download: bool) -> Check:
        """Begin a check, unless one of the adapter waits to begin; return the one that begins after this call."""
        with self._changed:
            check = self._waiting.get((name, path))
            if check is not None:
                return check
            check = Check(name, path, download=download, limit_s=self._limits.check_s)
            if len(self._waiting) >= self._limits.waiting_max:
                check.has_ended = True
                return check
            self._waiting[name, path] = check
            if self._threads < min(self._limits.threads_max, len(self._running) + len(self._waiting)):
                # At a limit of threads, the check waits for a running thread, or is late.
                with suppress(RuntimeError, MemoryError):
                    # A daemon, because a file system that hangs must not prevent the exit of the process.
                    threading.Thread(target=self._run, name="kvstore-adapters", daemon=True).start()
                    self._threads += 1
            self._changed.notify()
        return check

    def _run(self) -> None:
        while True:
            with self._changed:
                while (place := next((one for one in self._waiting if one not in self._running), None)) is None:
                    self._changed.wait()
                check = self._waiting.pop(place)
                self._running.add(place)
            try:
                check.digest = self._digest_of(check)
            except Exception as error:  # Any error, such as a hub's, concerns only this adapter.
                logger.warning("LoRA adapter %s at %s: %s. Its blocks are not kept.", check.name, check.path, error)
            check.has_ended = True
            with self._changed:
                self._running.discard(place)

    def _digest_of(self, check: Check) -> bytes | None:
        names = self._names_of(check)
        directory = adapter_directory(check.path, download=check.download)
        place = os.lstat(directory)
        signature = _signature_of(directory)
        check.signature = (_version_of("", place), *signature) if S_ISLNK(place.st_mode) else signature
        with self._changed:
            known = self._known.get(names)
            if known is None:
                if len(self._known) >= (most := self._limits.known_max):
                    raise RuntimeError(f"this engine has used {most} other adapters since its start")
                known = self._known[names] = _Known()
            if known.has_changed or signature == known.signature:
                return None if known.has_changed else known.digest
        digest, opened = hashlib.sha256(), []
        for name, size_bytes, *_ in signature:
            digest.update(f"{name}\0{size_bytes}\0".encode())
            with open(os.path.join(directory, name), "rb") as file:
                opened.append(_version_of(name, os.fstat(file.fileno())))
                digest.update(hashlib.file_digest(file, "sha256").digest())
        found = digest.digest()[:DIGEST_BYTES]
        # The path may have led to another directory only while its files were opened.
        is_whole = _signature_of(directory) == tuple(opened) == signature
        with self._changed:
            if known.has_changed:
                return None
            known.has_changed = not is_whole or known.digest not in (None, found)
            if not known.has_changed:
                known.signature, known.digest = signature, found
                return found
        _warn_of_change(check)
        return None

    def _names_of(self, check: Check) -> tuple[str, ...]:
        return (check.name, check.path) if self._by_path else (check.name,)


def _warn_of_change(check: Check) -> None:
    logger.warning(
        "The files of LoRA adapter %s at %s changed while this engine used it. Its blocks are neither stored "
        "nor loaded until the engine restarts. Load changed adapters from a new path.",
        check.name,
        check.path,
    )


def _signature_of(directory: str) -> _Signature:
    """Return the signature of an adapter's files. ``OSError``: there is no such directory, or it has no such files."""
    with os.scandir(directory) as entries:
        files = sorted((entry.name, entry.stat()) for entry in entries if entry.name.startswith(_FILES))
    if not files:
        raise FileNotFoundError(f"{directory} has no file adapter_config.json or adapter_model.*")
    return tuple(_version_of(name, stat) for name, stat in files)


def _version_of(name: str, stat: os.stat_result) -> _Version:
    return name, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino


class RequestTags:
    """Finds the tags of requests.

    Args:
        tenants: The rule of tenants; None without tenants.
        engine: The engine, which shows the request being added: vLLM does not pass a request's cache salt or adapter to
            the manager.
    """

    def __init__(self, tenants: Tenants | None, engine: EngineContext) -> None:
        needs_adapters = has_adapters(engine.engine_config)
        self._tags = None if tenants is None else Tags(tenants)
        self._by = "" if tenants is None else tenants.by
        self.adapters = Adapters() if needs_adapters else None
        self.parts = ["tenants"] * (tenants is not None) + ["adapters"] * needs_adapters  # Names of the parts of a tag.
        # Length of a tag.
        self.tag_bytes = (TAG_BYTES if tenants is not None else 0) + (DIGEST_BYTES if needs_adapters else 0)
        self._engine = engine
        if self.adapters is not None:
            on_adapter_loaded(self.adapters.check)

    def of(self, params: Any) -> tuple[bytes, Check | None]:
        """Return the tag for the request being added, and the check whose digest is still to be appended to it."""
        tag = b"" if self._tags is None else self._tags.of(self._tenant(params))
        if self.adapters is None:
            return tag, None
        adapter = getattr(self._engine.request, "lora_request", None)
        if adapter is None:
            return tag + NO_ADAPTER, None
        return tag, self.adapters.check(adapter)

    def _tenant(self, params: Any) -> str:
        if self._by == "parameter":
            value = params.get("tenant") if isinstance(params, Mapping) else None
            return value if isinstance(value, str) else ""
        if self._by == "cache_salt":
            return str(getattr(self._engine.request, "cache_salt", None) or "")
        adapter = getattr(self._engine.request, "lora_request", None)
        return "" if adapter is None else str(adapter.lora_name)


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
