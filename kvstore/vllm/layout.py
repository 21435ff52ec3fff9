"""The canonical layout as the default on the CPU platform: rows that are the same under every tensor parallel size.

In vLLM, this layout is opt-in (``"canonical_layout": true``), and vLLM does not start if a layer can't be mapped. On
the CPU platform, where it is tested, it is on if vLLM's rules allow it for every layer. Those rules use only the
model's configuration, while the tensors of the attention backend exist only in workers. If these tensors can't be
mapped, the workers keep vLLM's direct layout. They leave a note for the scheduler in the shared region, because the
layout is part of the namespace.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from vllm.platforms import current_platform
from vllm.v1.kv_offload.config import OffloadingConfig

from kvstore.errors import ConfigError
from kvstore.vllm.compat import canonical_config, has_states, window_groups
from kvstore.vllm.connector import EngineContext
from kvstore.vllm.region import region_path

logger = logging.getLogger("kvstore.vllm.layout")

_NOTE_MAGIC = b"kvstore: note of a worker "
_NOTE_BYTES_MAX = 512
"""Maximum length of the note, less than a page. It is at the start of the region while the region holds no block."""


class WorkerNote(msgspec.Struct, frozen=True):
    """Facts from a worker that the scheduler needs for the namespace."""

    canonical: bool  # Whether rows have the canonical layout.
    attention: str | None = None  # The attention backends (``chosen_attention``), if known.


def with_canonical_layout(config: OffloadingConfig, engine: EngineContext) -> OffloadingConfig:
    """Return vLLM's configuration with the canonical layout, if the user did not choose and vLLM can certify it.

    Only for the CPU platform: it uses our worker, and tests cover engines that share such rows. On an accelerator,
    vLLM's own worker copies the rows, on a path that our tests do not cover.
    """
    if "canonical_layout" in config.extra_config or not current_platform.is_cpu() or engine.kv_cache_config is None:
        return config
    canonical = canonical_config(engine.engine_config, engine.kv_cache_config)
    if canonical is None or not canonical.canonical_layout or not canonical.parallel.is_parallelism_agnostic:
        return config
    return dataclasses.replace(
        config,
        canonical_layout=True,
        replicated_layout=canonical.replicated_layout,
        parallel=dataclasses.replace(config.parallel, is_parallelism_agnostic=True),
    )


def with_whole_rows(config: OffloadingConfig, engine: EngineContext) -> OffloadingConfig:
    """Return vLLM's configuration with one block per row, if rows of several blocks would be stored wrongly.

    vLLM frees blocks of a sliding window while the request runs, in no fixed order, and stores the remaining blocks of
    a row. The worker receives only the number of blocks. With several blocks per row, some are stored at the wrong
    place and others are missing. Requests that load such a row give wrong tokens (seen with 0.32, also with vLLM's
    manager).
    """
    per_row = config.cache.blocks_per_chunk
    if per_row == 1 or not window_groups(engine.kv_cache_config):
        return config
    logger.warning(
        "Rows have one block instead of %d: this model has layers with a sliding window (or a state), and vLLM stores "
        "rows of several such blocks incorrectly.",
        per_row,
    )
    return dataclasses.replace(config, cache=dataclasses.replace(config.cache, blocks_per_chunk=1))


def without_synchronous_loads(config: OffloadingConfig, engine: EngineContext) -> OffloadingConfig:
    """Return vLLM's configuration without loads within the step (0.33), if the model has layers with a state.

    vLLM copies the state of the last cached block to the request's next block before it starts the loads of the step.
    If the cached block is loaded in the same step, its old contents are copied, and the request gives wrong tokens.
    """
    if not config.extra_config.get("sync_load_budget_bytes") or not has_states(engine.kv_cache_config):
        return config
    logger.warning(
        "'sync_load_budget_bytes' is 0 for this model: it has layers with a state (Mamba), and vLLM copies such a "
        "state before a load of the same step has ended."
    )
    return dataclasses.replace(config, extra_config={**config.extra_config, "sync_load_budget_bytes": 0})


def useful_bytes(spec: Any, engine: EngineContext) -> list[int]:
    """Return how many bytes of a row a block of each group of layers fills; empty if the groups are unknown.

    All rows are as long as the longest block. ``spec``: vLLM's ``CPUOffloadingSpec``.
    """
    if engine.kv_cache_config is None:
        return []
    copies = 1 if spec.replicated_layout else spec.config.parallel.world_size
    return [
        sum(_filled_bytes(group.kv_cache_spec, layer) for layer in group.layer_names) * spec.blocks_per_chunk * copies
        for group in engine.kv_cache_config.kv_cache_groups
    ]


def _filled_bytes(kv_cache_spec: Any, layer: str) -> int:
    spec = getattr(kv_cache_spec, "kv_cache_specs", {}).get(layer, kv_cache_spec)
    if getattr(spec, "page_size_padded", None) is not None:
        spec = dataclasses.replace(spec, page_size_padded=None)
    return int(spec.page_size_bytes)


def warn_of_waste(useful: Sequence[int], row_bytes: int) -> None:
    """Log that blocks of a group of layers fill less than half of a row."""
    wasted = [str(group) for group, filled in enumerate(useful) if 2 * filled < row_bytes]
    if wasted:
        logger.warning(
            "Blocks of the groups of layers %s fill less than half of a row of %d bytes: %s. For windows, "
            "--disable-hybrid-kv-cache-manager makes one group of all layers; for states, give a smaller --block-size. "
            "Otherwise enlarge 'cpu_bytes_to_use' by as much, and compress the tiers with 'codec'.",
            ", ".join(wasted),
            row_bytes,
            ", ".join(map(str, useful)),
        )


def is_certified(kv_caches: Any) -> bool:
    """Return whether vLLM has mapped every layer to bytes independent of the tensor parallel size.

    ``kv_caches``: ``CanonicalKVCaches`` of a worker.
    """
    mappings = [ref.mapping for refs in kv_caches.group_data_refs for ref in refs]
    return all(mapping is not None and mapping.parallelism_agnostic for mapping in mappings)


def leave_note(engine_id: str, note: WorkerNote, *, expects_canonical: bool) -> None:
    """Leave a note for the scheduler. The worker must have mapped the region.

    Args:
        note: The note; all workers of an engine leave the same one.
        expects_canonical: Whether the scheduler expects canonical rows.

    Raises:
        ConfigError: The region's file was already unlinked, and the scheduler expects another layout.
    """
    falls_back = expects_canonical and not note.canonical
    if falls_back:
        logger.warning(
            "The canonical layout is off: vLLM can't map the KV cache shape of this attention backend. Blocks are not "
            "shared with other tensor parallel sizes."
        )
    try:
        with _opened(engine_id) as descriptor:
            os.pwrite(descriptor, _NOTE_MAGIC + msgspec.json.encode(note) + b"\n", 0)
    except FileNotFoundError as error:
        if falls_back:
            raise ConfigError(
                f"vLLM can't map this KV cache to the canonical layout that the scheduler expects, and "
                f"{region_path(engine_id)} no longer exists to correct it. Set 'canonical_layout': false."
            ) from error


def take_note(engine_id: str) -> WorkerNote | None:
    """Return and remove the workers' note, or return None. The region must hold no block yet."""
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
