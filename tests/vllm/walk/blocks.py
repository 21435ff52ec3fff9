"""The second oracle: the numbers of each stored and each loaded block, beside those of an engine that only computes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from vllm import SamplingParams
from vllm.v1.kv_offload.base import OffloadingManager, OffloadingWorker, get_offload_group_idx

from kvstore.vllm import KVStoreOffloadingSpec
from tests.vllm.walk.engine import Weights, adapter_of, core_of, inputs_of, lora_options, started
from tests.vllm.walk.plan import TOKENS_MAX, Leg, Prompt

TOLERANCE = 1e-3
"""Of the largest number of a layer's part of a block. Batches of other sizes change it by about a millionth; another
prompt's block differs by more than a half."""

Layers = list[npt.NDArray[np.float32]]
"""The numbers of a block, layer by layer."""
Expected = list[dict[bytes, Layers]]
"""The blocks of an engine that only computes, by version of the weights, and key."""


@dataclass(frozen=True)
class Seen:
    """A block in the primary tier, before it is stored in the tiers, or copied to the device."""

    what: str  # ``"stored"`` or ``"loaded"``.
    request: str
    key: bytes
    version: int  # Version of the weights when the request asked for it.
    layers: Layers


class WatchedSpec(KVStoreOffloadingSpec):
    """kvstore's spec, which shows each block of the primary tier before it leaves for the tiers or the device."""

    version: ClassVar[int] = 0
    """Version of the weights."""
    numbers: ClassVar[torch.dtype] = torch.float32
    """Type of the numbers of a block."""
    seen: ClassVar[Callable[[Seen], None] | None] = None
    """Called with each block."""
    workers: ClassVar[dict[str, Any]] = {}  # By the id of the engine.

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        """Return the worker, and remember where it puts each layer of a block."""
        worker = super().get_worker(kv_caches)
        WatchedSpec.workers[self.config.engine_id] = self._host_worker
        return worker

    def get_manager(self) -> OffloadingManager:
        """Return the manager with three methods that show blocks first."""
        manager = super().get_manager()
        prepare_store, complete_store = manager.prepare_store, manager.complete_store
        prepare_load = manager.prepare_load
        prepared: dict[tuple[str, bytes], tuple[int, int]] = {}

        def preparing_store(keys: Any, context: Any) -> Any:
            plan = prepare_store(keys, context)
            if plan is not None:
                for key, slot in zip(plan.keys_to_store, plan.store_spec.block_ids, strict=True):
                    prepared[context.req_id, key] = slot, WatchedSpec.version
            return plan

        def completing_store(keys: Any, context: Any, success: bool = True) -> None:
            for key in keys:
                slot, version = prepared.pop((context.req_id, key))
                if success:
                    self._show("stored", context, key, slot, version)
            complete_store(keys, context, success)

        def preparing_load(keys: Any, context: Any) -> Any:
            source = prepare_load(keys, context)
            if not getattr(source, "is_void", False):
                for key, slot in zip(keys, source.block_ids, strict=True):
                    self._show("loaded", context, key, slot, WatchedSpec.version)
            return source

        manager.prepare_store, manager.prepare_load = preparing_store, preparing_load  # type: ignore[method-assign]
        manager.complete_store = completing_store  # type: ignore[method-assign]
        return manager

    def _show(self, what: str, context: Any, key: Any, slot: int, version: int) -> None:
        if WatchedSpec.seen is not None:
            layers = _layers_of(WatchedSpec.workers[self.config.engine_id], key, slot)
            WatchedSpec.seen(Seen(what, context.req_id, bytes(key), version, layers))


class BlockOracle:
    """Compares blocks with those of an engine that computed the same tokens without loading any."""

    def __init__(self, tolerance: float = TOLERANCE) -> None:
        self._tolerance = tolerance
        self.expected: Expected = []
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []  # Descriptions of blocks outside the tolerance.
        self.largest = 0.0  # Largest difference within the tolerance.

    def judge(self, seen: Seen) -> None:
        """Compare one block."""
        expected = self.expected[seen.version].get(seen.key)
        if expected is None:
            # After a near tie an answer may have other tokens.
            self.counts["blocks not judged"] += 1
            return
        self.counts[f"{seen.what} blocks"] += 1
        for number, (found, right) in enumerate(zip(seen.layers, expected, strict=True)):
            difference = float(np.abs(found - right).max() / np.abs(right).max())
            if not difference <= self._tolerance:
                self.wrong.append(
                    f"{seen.request}: {seen.what} block {seen.key.hex()}, weights {seen.version}, layer {number} of "
                    f"{len(expected)}: off by {difference:.2g} of its largest number{self._like(seen, number)}"
                )
                return
            self.largest = max(self.largest, difference)

    def _like(self, seen: Seen, number: int) -> str:
        """Return which other block it is, if it is one."""
        for version, blocks in enumerate(self.expected):
            for key, layers in blocks.items():
                same_group = get_offload_group_idx(key) == get_offload_group_idx(seen.key)
                if same_group and np.allclose(layers[number], seen.layers[number], atol=TOLERANCE):
                    return f"; it is block {key.hex()}, weights {version}"
        return ""


def expected_blocks(model: str, leg: Leg, prompts: list[Prompt]) -> Expected:
    """Return the blocks of all prompts and their answers, in a leg's layout, from an engine that loads none."""
    offloading = {
        **{name: leg.offloading[name] for name in ("canonical_layout", "blocks_per_chunk") if name in leg.offloading},
        "spec_name": "WatchedSpec",
        "spec_module_path": __name__,
        "cpu_bytes_to_use": sum(len(prompt.tokens) + TOKENS_MAX for prompt in prompts) * 4096,
        "secondary_tiers": [],
    }
    # A state is stored only where a step ends.
    sizes = {"max_num_batched_tokens": 64, "max_num_seqs": 1} if leg.model == "mamba" else {"max_num_seqs": 16}
    sizes |= lora_options(leg.llm)
    asked = [(prompt, TOKENS_MAX) for prompt in prompts]
    if leg.model in ("window", "mamba"):
        # Of windows and states only those at the end of a prompt are stored, and turns of sessions end anywhere.
        asked += [
            (replace(prompt, tokens=prompt.tokens[: end + 1]), 1)
            for prompt in prompts
            for end in range(64, len(prompt.tokens), 64)
        ]
    inputs, adapters = [inputs_of(prompt) for prompt, _ in asked], [adapter_of(model, prompt) for prompt, _ in asked]
    found: Expected = []
    with started(model, offloading, enable_prefix_caching=leg.model == "mamba", **sizes) as llm:
        weights = Weights(llm)
        only_computing = {"kv_transfer_params": {"kvstore": {"load": False}}}
        params = [
            SamplingParams(max_tokens=count, temperature=0, ignore_eos=True, extra_args=only_computing)
            for _, count in asked
        ]
        for version in range(leg.weights):
            blocks: dict[bytes, Layers] = {}
            WatchedSpec.seen = recording(blocks)
            weights.change(version)
            llm.generate(inputs, params, use_tqdm=False, lora_request=adapters if any(adapters) else None)
            while core_of(llm).scheduler.has_requests():
                llm.llm_engine.step()
            assert llm.reset_prefix_cache(reset_connector=True)
            found.append(blocks)
    return found


def recording(blocks: dict[bytes, Layers]) -> Callable[[Seen], None]:
    """Return a function that keeps the numbers of stored blocks in ``blocks``."""

    def record(seen: Seen) -> None:
        assert seen.what == "stored"
        blocks.setdefault(seen.key, seen.layers)

    return record


def _layers_of(worker: Any, key: Any, slot: int) -> Layers:
    """Return a copy of the numbers of a slot."""
    plan, row = worker._transfer._plan, np.asarray(worker.region.create_kv_memoryview())[slot].view(np.uint8)
    found = []
    for layer in plan.groups[get_offload_group_idx(key)]:
        pages = row[layer.slot_offset : layer.slot_offset + layer.block_bytes * plan.blocks_per_slot]
        numbers = pages.reshape(plan.blocks_per_slot, -1)[:, : layer.local_bytes]  # without padding
        found.append(torch.from_numpy(numbers.copy()).view(WatchedSpec.numbers).to(torch.float32).numpy())
    return found
