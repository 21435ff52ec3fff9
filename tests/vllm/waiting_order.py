"""Check that the engine continues while a request that does not fit waits before two with loaded blocks.

    python -m tests.vllm.waiting_order --policy priority --directory /tmp/order

Prints the names of the answered requests as JSON, in order. vLLM before 0.31 is deadlocked here.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any, ClassVar

from tests.vllm.environment import ENGINE_IN_THIS_PROCESS

os.environ |= ENGINE_IN_THIS_PROCESS

from vllm import SamplingParams
from vllm.v1.kv_offload.base import LookupResult, OffloadingWorker

from examples.tiny_llama import make_tiny_llama
from kvstore.vllm import KVStoreOffloadingSpec
from tests.vllm.walk.engine import core_of, mend_vllm, register_models, started

BLOCKS = 60
"""Blocks of the device, of 32 tokens: enough for two requests of 25 each, not for a third."""
TIMEOUT_S = 60


class HeldCopies(OffloadingWorker):
    """Delays copies to the device while they are held."""

    held: ClassVar[bool] = False

    def __init__(self, inner: OffloadingWorker) -> None:
        self._inner = inner
        self._loads: list[Any] = []

    def submit_store(self, job_id: int, *specs: Any) -> bool:
        """Copy immediately."""
        return self._inner.submit_store(job_id, *specs)

    def submit_load(self, job_id: int, *specs: Any, **options: Any) -> bool:
        """Queue the copy."""
        self._loads.append(lambda: self._inner.submit_load(job_id, *specs, **options))
        return True

    def get_finished(self) -> Any:
        """Make the copies, unless they are held."""
        while self._loads and not HeldCopies.held:
            self._loads.pop()()
        return self._inner.get_finished()

    def wait(self, job_ids: set[int]) -> None:
        """Wait for copies already made."""
        self._inner.wait(job_ids)

    def shutdown(self) -> None:
        """Shut the worker down."""
        self._inner.shutdown()


class HeldSpec(KVStoreOffloadingSpec):
    """kvstore's spec with copies that can be held."""

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        """Return the worker with held copies."""
        return HeldCopies(super().get_worker(kv_caches))


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--policy", choices=("fcfs", "priority"), required=True)
    parser.add_argument("--directory", type=Path, required=True)
    args = parser.parse_args()
    mend_vllm(speculates=False)
    register_models()
    model = make_tiny_llama(args.directory / "model")
    extra = {
        "spec_name": "HeldSpec",
        "spec_module_path": "tests.vllm.waiting_order",
        "cpu_bytes_to_use": 100 * 32768,
        "secondary_tiers": [{"type": "memory", "capacity": 2**25}],
    }
    options = {"num_gpu_blocks_override": BLOCKS, "scheduling_policy": args.policy, "max_num_batched_tokens": 256}
    with started(str(model), extra, **options) as llm:
        print(json.dumps(_answered(llm, args.policy)))
    return 0


def _answered(llm: Any, policy: str) -> list[str]:
    from tests.vllm.waiting_order import HeldCopies  # Not __main__'s: vLLM imports this module by its name.

    engine, core = llm.llm_engine, core_of(llm)
    rng = random.Random(1)
    prompts = {
        name: [rng.randrange(2, 512) for _ in range(size)] for name, size in (("A", 900), ("B", 800), ("C", 800))
    }
    answered: list[str] = []

    def add(name: str, prompt: str, priority: int) -> None:
        params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
        tokens = {"prompt_token_ids": prompts[prompt]}
        engine.add_request(name, tokens, params, priority=priority if policy == "priority" else 0)

    def step_until(condition: Any) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while not condition():
            answered.extend(output.request_id for output in engine.step() if output.finished)
            if time.monotonic() > deadline:
                raise TimeoutError(f"answered {answered}, running {len(core.scheduler.running)}")

    def loading() -> int:
        return sum(request.status.name == "WAITING_FOR_REMOTE_KVS" for request in core.scheduler.requests.values())

    for name in "BC":
        add(f"fill-{name}", name, 0)
        step_until(lambda: not core.scheduler.has_requests())
    assert engine.reset_prefix_cache(False, False)
    HeldCopies.held = True
    manager = core.scheduler.connector.connector_scheduler.manager
    lookup = manager.lookup
    if policy == "fcfs":
        # A's lookup stays pending, so that the loads of the others start although A comes first.
        manager.lookup = lambda key, ctx: LookupResult.RETRY if ctx.req_id.startswith("A") else lookup(key, ctx)
        add("A", "A", 0)
    add("B", "B", 2)
    add("C", "C", 2)
    step_until(lambda: loading() == 2)
    if policy == "priority":
        add("A", "A", 0)
    engine.step()
    manager.lookup = lookup
    HeldCopies.held = False
    step_until(lambda: not core.scheduler.has_requests())
    return [name for name in answered if len(name) == 1]


if __name__ == "__main__":
    sys.exit(main())
