"""The canonical layout as the default on the CPU platform: rows that are the same under every tensor parallel size.

vLLM has it only on demand (``"canonical_layout": true``), as it refuses to start where a layer can't be mapped. On the
CPU platform, where it is proven, it is on if vLLM's own rules say beforehand that every layer can be mapped. They look
at the model's configuration; only a worker sees the tensors that the attention backend has made of it. Should those
look otherwise, the workers keep vLLM's direct layout. Whichever it is, they leave a note of it for the scheduler in the
region that they share: it names the blocks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
from collections.abc import Iterator
from typing import Any

import msgspec
from vllm.platforms import current_platform
from vllm.v1.kv_offload.config import OffloadingConfig

from kvstore.errors import ConfigError
from kvstore.vllm.compat import canonical_config, current_connector_config, region_path, window_groups

__all__ = ["WorkerNote", "is_certified", "leave_note", "take_note", "with_canonical_layout", "with_whole_rows"]

logger = logging.getLogger("kvstore.vllm.layout")

_NOTE_MAGIC = b"kvstore: note of a worker "
_NOTE_BYTES_MAX = 512
"""At the start of the region, before any block is there; shorter than its first page."""


class WorkerNote(msgspec.Struct, frozen=True):
    """What only a worker knows and the scheduler has to: it names the blocks.

    Attributes:
        canonical: Whether rows have the canonical layout.
        attention: The attention backends that were chosen (``chosen_attention``), if that is known.
    """

    canonical: bool
    attention: str | None = None


def with_canonical_layout(config: OffloadingConfig) -> OffloadingConfig:
    """Return vLLM's configuration with the canonical layout, if the user did not choose and vLLM can certify it.

    Only for the CPU platform: the worker that copies is ours there, and engines of ours have shared such rows. On an
    accelerator vLLM's own worker copies them, by a path that none of our tests has run.

    Args:
        config: As vLLM's connector made it, somewhere above this call.
    """
    if "canonical_layout" in config.extra_config or not current_platform.is_cpu():
        return config
    engine_config, kv_cache_config = current_connector_config()
    if engine_config is None or kv_cache_config is None:
        return config
    canonical = canonical_config(engine_config, kv_cache_config)
    if canonical is None or not canonical.canonical_layout or not canonical.parallel.is_parallelism_agnostic:
        return config
    return dataclasses.replace(
        config,
        canonical_layout=True,
        replicated_layout=canonical.replicated_layout,
        parallel=dataclasses.replace(config.parallel, is_parallelism_agnostic=True),
    )


def with_whole_rows(config: OffloadingConfig) -> OffloadingConfig:
    """Return vLLM's configuration with one block a row, where rows of several would not be right.

    vLLM stores what it still has of a row. Of a sliding window it frees blocks that the request needs no longer, not
    always the first ones first, and of the others it tells the worker only how many there are, not which. So with
    several blocks a row some land in the wrong place, and some that others need are missing; requests that find such a
    row give wrong tokens (seen with 0.32, with vLLM's manager as well). A row of one block is there or not.

    Args:
        config: As vLLM's connector made it, somewhere above this call.
    """
    per_row, (_, kv_cache_config) = config.cache.blocks_per_chunk, current_connector_config()
    if per_row == 1 or not window_groups(kv_cache_config):
        return config
    logger.warning(
        "Rows have one block instead of %d: this model has layers with a sliding window (or a state), of which vLLM "
        "does not store rows of several blocks rightly.",
        per_row,
    )
    return dataclasses.replace(config, cache=dataclasses.replace(config.cache, blocks_per_chunk=1))


def is_certified(kv_caches: Any) -> bool:
    """Tell whether vLLM has mapped every layer to bytes that don't depend on the tensor parallel size.

    Args:
        kv_caches: ``CanonicalKVCaches``, as a worker gets them.
    """
    mappings = [ref.mapping for refs in kv_caches.group_data_refs for ref in refs]
    return all(mapping is not None and mapping.parallelism_agnostic for mapping in mappings)


def leave_note(engine_id: str, note: WorkerNote, *, expects_canonical: bool) -> None:
    """Leave a note for the scheduler; to be called by a worker that has mapped the region.

    Args:
        engine_id: The engine.
        note: The note; all workers of an engine leave the same one.
        expects_canonical: Whether the scheduler takes the rows for canonical.

    Raises:
        ConfigError: The region has no name any more, and the rows are not what the scheduler takes them for.
    """
    falls_back = expects_canonical and not note.canonical
    if falls_back:
        logger.warning(
            "The canonical layout is not used: the KV cache of this attention backend has a shape that vLLM can't map. "
            "Blocks are not shared with other tensor parallel sizes."
        )
    try:
        with _opened(engine_id) as descriptor:
            os.pwrite(descriptor, _NOTE_MAGIC + msgspec.json.encode(note) + b"\n", 0)
    except FileNotFoundError as error:
        if falls_back:
            raise ConfigError(
                f"The KV cache can't have the canonical layout, and the scheduler can't be told, as "
                f"{region_path(engine_id)} is gone. Give 'canonical_layout': false."
            ) from error


def take_note(engine_id: str) -> WorkerNote | None:
    """Return the workers' note, and remove it; to be called before any block is in the region.

    Returns:
        None if there is no note.
    """
    with contextlib.suppress(FileNotFoundError), _opened(engine_id) as descriptor:
        found = os.pread(descriptor, _NOTE_BYTES_MAX, 0)
        if found.startswith(_NOTE_MAGIC):
            written, _, _ = found.removeprefix(_NOTE_MAGIC).partition(b"\n")
            os.pwrite(descriptor, bytes(len(found)), 0)
            return msgspec.json.decode(written, type=WorkerNote)
    return None


@contextlib.contextmanager
def _opened(engine_id: str) -> Iterator[int]:
    descriptor = os.open(region_path(engine_id), os.O_RDWR | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
