"""The identity of a model's files: samples of every tensor, and the content of the files that describe the model.

Reading all bytes would take minutes, so weights are sampled: a page at the start of every tensor of a safetensors file
and every 251 pages from there; in other formats, every 251 pages of the file. Such a page is in every tensor of a
safetensors file, and in every MiB of any file. A change of all bytes of a tensor, or of a MiB, is therefore always
found. Training, merging of adapters and quantization change whole tensors. A change of fewer bytes may be missed.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import logging
import os
import re
import stat
import uuid
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import chain, islice
from operator import index
from pathlib import Path
from typing import Any, Final

from vllm import envs
from xxhash import xxh3_128

logger = logging.getLogger("kvstore.vllm.weights")

_FILE_FORMATS: Final = frozenset(
    {
        "auto", "hf", "safetensors", "pt", "mistral", "gguf", "bitsandbytes", "fastsafetensors", "instanttensor",
        "runai_streamer", "runai_streamer_sharded", "sharded_state",
    }
)  # fmt: skip
"""Values of vLLM's ``load_format`` that load the model's own files. Others also read a cache, a server or a peer."""

_PAGE_BYTES: Final = 4096
_STRIDE_BYTES: Final = 251 * _PAGE_BYTES
"""Just below a MiB. A prime number of pages, so that the samples of a matrix pass through all of its columns."""

_THREADS: Final = 16
"""Concurrent reads: a network drive needs them, and so does an NVMe drive if the weights are not in the page cache."""
_BATCH: Final = 128
"""Samples per task of a thread."""
_WHOLE_BYTES_MAX: Final = 100 << 20
"""Longest description that is read whole. The format of safetensors limits a header to 100 MB."""

_WEIGHTS: Final = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_DESCRIPTIONS: Final = (".json", ".yaml", ".yml", ".py")
_DEPTH_MAX: Final = 3
"""Levels of directories below the model's. No format of vLLM's has more than one."""

_IRRELEVANT: Final = {
    "config.json": "is part of the engine's configuration, with its overrides",
    "generation_config.json": "has the defaults of sampling",
    "tokenizer.json": "keys of blocks have the ids of tokens",
    "tokenizer_config.json": "keys of blocks have the ids of tokens",
    "special_tokens_map.json": "keys of blocks have the ids of tokens",
    "added_tokens.json": "keys of blocks have the ids of tokens",
    "vocab.json": "keys of blocks have the ids of tokens",
    "tekken.json": "keys of blocks have the ids of tokens",
    "chat_template.json": "keys of blocks have the ids of tokens",
    "trainer_state.json": "is a log of the training",
}
"""Files of a model's directory that do not change its blocks. Others with a known suffix count, known or not."""


def weights_identity(model: Any, name: str, load_format: str, declared: str | None = None) -> dict[str, Any]:
    """Return what identifies the weights of a model.

    That is the content of its local files, or the commit of its repository. If neither is known, it is a random number,
    unless the operator has declared a name: kvstore can't prove that the next start loads the same weights.

    Args:
        model: vLLM's ``ModelConfig``.
        name: The model's name: a path, a repository or a URL.
        load_format: vLLM's option of that name.
        declared: The operator's name for the weights. It counts in any case.
    """
    source = getattr(model, "model_weights", "") or name
    found: dict[str, str | None] = {}
    if load_format == "dummy":
        # Random numbers with a constant seed.
        found = {"format": load_format}
    elif load_format in _FILE_FORMATS and "://" not in source:
        try:
            digest = files_digest(_directory(source, getattr(model, "revision", None)))
        except OSError as error:
            logger.warning("The weights of the model can't be read: %s", error)
        else:
            found = {"commit": _commit(model)} if digest is None else {"files": digest}
    if declared is not None:
        return {**found, "declared": declared}
    if not any(found.values()):
        logger.warning(
            "kvstore can't identify the weights of %r, loaded as %r, so no other engine and no later start uses the "
            "blocks of this engine. Load a local directory or a repository of a hub, or give the weights a name, "
            "'weights': '2026-11', which you change with them.",
            name,
            load_format,
        )
        return {"engine": uuid.uuid4().hex}
    return found


def _directory(source: str, revision: str | None) -> str:
    """Return the directory of a model that vLLM has loaded from ModelScope, which has no commits; or ``source``."""
    if not envs.VLLM_USE_MODELSCOPE or os.path.exists(source):
        return source
    hub = importlib.import_module("modelscope.hub.snapshot_download")
    try:
        return str(hub.snapshot_download(model_id=source, revision=revision, local_files_only=True))
    except ValueError as error:
        raise FileNotFoundError(f"{source!r} is not in the cache of ModelScope") from error


def _commit(model: Any) -> str | None:
    """Return the commit of a hub's repository that a model was loaded from; None if unknown."""
    revision = getattr(model, "revision", None)
    commit = getattr(revision, "resolved", None) or revision
    if commit is None or not re.fullmatch("[0-9a-f]{40}", commit):
        # The configuration has the weights' commit, unless it is another repository's.
        is_own = getattr(model, "hf_config_path", None) in (None, getattr(model, "model", None))
        commit = getattr(getattr(model, "hf_config", None), "_commit_hash", None) if is_own else None
    return commit


def files_digest(model: str) -> str | None:
    """Return a digest of the files of a model's directory, or of a single file's; None if there are no weights.

    Times and the place of the directory don't count.

    Raises:
        OSError: A file can't be read.
    """
    root = Path(model).expanduser()
    # A file in GGUF may need others of its directory.
    files = dict(_files(root if root.is_dir() else root.parent)) if root.exists() else {}
    if not any(name.endswith(_WEIGHTS) for name in files):
        return None
    digest = hashlib.sha256()
    with ThreadPoolExecutor(_THREADS, "kvstore-weights") as threads:
        for name, path in sorted(files.items()):
            digest.update(f"{name}\0".encode(errors="surrogateescape"))
            digest.update(_sampled(path, threads))
    return digest.hexdigest()


def _files(directory: Path, depth: int = 0) -> Iterator[tuple[str, Path]]:
    """Yield the names, relative to the directory, and paths of the files that count."""
    for path in directory.iterdir():
        if path.name.startswith(".") or (depth == 0 and path.name in _IRRELEVANT):
            continue
        if path.is_dir():
            if depth < _DEPTH_MAX:
                yield from ((f"{path.name}/{name}", below) for name, below in _files(path, depth + 1))
        elif path.name.endswith(_WEIGHTS + _DESCRIPTIONS):
            yield path.name, path


def _sampled(path: Path, threads: ThreadPoolExecutor) -> bytes:
    """Return the length of a file with the digests of its samples."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # Waits for no writer of a pipe.
    reads: list[Future[bytes]] = []
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(f"{path} is not a regular file. Remove it.")
        size_bytes = status.st_size
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        places = iter(_places(path, fd, size_bytes))
        while batch := list(islice(places, _BATCH)):
            reads.append(threads.submit(_read, fd, batch))
        return b"".join([size_bytes.to_bytes(8, "little"), *(read.result() for read in reads)])
    finally:
        wait(reads)
        os.close(fd)


def _read(fd: int, places: Iterable[tuple[int, int]]) -> bytes:
    digest = xxh3_128()
    for start, length in places:
        found = os.pread(fd, length, start)
        if len(found) != length:
            raise OSError(f"A file of the model became shorter: expected {length} bytes at {start}, got {len(found)}.")
        digest.update(found)
    return digest.digest()


def _places(path: Path, fd: int, size_bytes: int) -> Iterator[tuple[int, int]]:
    """Return offset and length of each sample of a file."""
    if path.suffix in _DESCRIPTIONS and size_bytes <= _WHOLE_BYTES_MAX:
        return _every_stride(0, size_bytes, _STRIDE_BYTES)
    header_bytes, tensors = _tensors(fd, size_bytes) if path.suffix == ".safetensors" else (0, [(0, size_bytes)])
    samples = (_every_stride(start, end, _PAGE_BYTES) for start, end in tensors)
    return chain(_every_stride(0, header_bytes, _STRIDE_BYTES), *samples)


def _every_stride(start: int, end: int, length: int) -> Iterator[tuple[int, int]]:
    return ((at, min(length, end - at)) for at in range(start, end, _STRIDE_BYTES))


def _tensors(fd: int, size_bytes: int) -> tuple[int, list[tuple[int, int]]]:
    """Return the length of a safetensors file's header, and start and end of each tensor.

    A malformed file has no header and one tensor. In others, the tensors follow each other without gaps.
    """
    malformed = 0, [(0, size_bytes)]
    data = 8 + int.from_bytes(os.pread(fd, 8, 0), "little")
    if data > min(size_bytes, _WHOLE_BYTES_MAX):
        return malformed
    try:
        header: Any = json.loads(os.pread(fd, data - 8, 8))
        offsets = [tensor["data_offsets"] for name, tensor in header.items() if name != "__metadata__"]
        tensors = sorted((data + index(start), data + index(end)) for start, end in offsets)
        edges = [data, *(end for _, end in tensors)]
        is_whole = edges[-1] == size_bytes and [start for start, _ in tensors] == edges[:-1]
    except (AttributeError, LookupError, RecursionError, TypeError, ValueError):
        return malformed
    return (data, tensors) if is_whole else malformed
