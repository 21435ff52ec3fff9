"""A connector that promises an asynchronous load, and spoils the device's blocks before it fills them."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, ClassVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)

from tests.vllm.walk.slow_copies import DELAY_S_MEAN

SPOILT = 7.5
"""The value of each number of a block that is being filled; another prompt's attention shows it in its tokens."""


@dataclass
class Loads(KVConnectorMetadata):
    """The loads that begin in a step: request, and its new blocks in each group."""

    begun: list[tuple[str, list[list[int]]]] = field(default_factory=list)


class LateConnector(KVConnectorBase_V1, SupportsHMA):
    """Serves requests with ``{"late": true}`` in their transfer parameters, and fills their blocks with zeros.

    The other connector's option ``"early"``: whether blocks are spoilt while connectors prepare for a step, or after.
    """

    promised: ClassVar[int] = 0

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self._block_size = vllm_config.cache_config.block_size
        self._is_early = vllm_config.kv_transfer_config.kv_connector_extra_config["early"]
        self._layers = [list(group.layer_names) for group in kv_cache_config.kv_cache_groups]
        self._blocks = kv_cache_config.num_blocks
        self._served: set[str] = set()
        self._loads = Loads()
        self._running: list[tuple[float, str, list[list[int]]]] = []
        self._caches: dict[str, Any] = {}

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Promise all but the last block."""
        if not (request.kv_transfer_params or {}).get("late") or request.request_id in self._served:
            return 0, False
        found = (request.num_prompt_tokens - 1) // self._block_size * self._block_size - num_computed_tokens
        return found, found > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Begin the load in the next step."""
        if num_external_tokens:
            self._served.add(request.request_id)
            LateConnector.promised += 1
            self._loads.begun.append((request.request_id, [list(group) for group in blocks.get_block_ids()]))

    def build_connector_meta(self, scheduler_output: Any) -> Loads:
        """Return the loads that begin."""
        loads, self._loads = self._loads, Loads()
        return loads

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        """Keep no blocks."""
        return False, None

    request_finished_all_groups = request_finished

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Remember the device's memory."""
        self._caches = kv_caches

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        """Begin, if early."""
        if self._is_early:
            self._begin(kv_connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Begin, if not early."""
        if not self._is_early:
            self._begin(self._get_connector_metadata())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: loads end between steps."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Store nothing."""

    def wait_for_save(self) -> None:
        """Do nothing."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[None, set[str] | None]:
        """End the loads that are due."""
        now = time.monotonic()
        ended = [load for load in self._running if load[0] <= now]
        self._running = [load for load in self._running if load[0] > now]
        for _, _, blocks in ended:
            self._fill(blocks, 0.0)
        return None, {request for _, request, _ in ended} or None

    def _begin(self, metadata: Any) -> None:
        for request, blocks in metadata.begun:
            self._fill(blocks, SPOILT)
            self._running.append((time.monotonic() + 2 * DELAY_S_MEAN, request, blocks))

    def _fill(self, blocks: list[list[int]], value: float) -> None:
        for group, layers in zip(blocks, self._layers, strict=True):
            for layer in layers:
                cache = self._caches[layer]
                by_block = cache.movedim(cache.shape.index(self._blocks), 0)
                for block in group:
                    if block:
                        by_block[block] = value
