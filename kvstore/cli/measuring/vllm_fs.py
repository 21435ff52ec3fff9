"""vLLM's own ``fs`` tier under the same measurement, by its class, as its manager would make it. Needs vLLM."""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from kvstore.cli.measuring.systems import Done, Op, System
from kvstore.errors import ConfigError
from kvstore.types import BlockKey, Outcome

__all__ = ["VllmFsSystem"]


class VllmFsSystem(System):
    """vLLM's ``FileSystemTierManager``.

    Args:
        directory: Its ``root_dir``, which it creates.
        primary: The memory of the slots.
        slot_bytes: Length of a slot.
        capacity_bytes: Payload after which a measurement ends: this tier never removes anything.

    Raises:
        ConfigError: vLLM is not installed, or lacks this tier.
    """

    name = "vllm-fs"

    def __init__(self, directory: Path, primary: memoryview, slot_bytes: int, capacity_bytes: int = 0) -> None:
        # On stdout, where vLLM would log, a program may expect a report.
        os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
        try:
            # Imported by name on request, because vLLM takes seconds to import and may not be installed.
            base = importlib.import_module("vllm.v1.kv_offload.tiering.base")
            fs = importlib.import_module("vllm.v1.kv_offload.tiering.fs.manager")
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"The baseline 'vllm-fs' needs vLLM 0.28 or later: there is no module {error.name!r}. Install it, or "
                "leave this baseline out."
            ) from error
        self.capacity_bytes = capacity_bytes
        self._job_type: Any = base.TransferJob
        self._counts: dict[int, int] = {}
        parallel = SimpleNamespace(tp_size=1, pp_size=1, pcp_size=1, dcp_size=1, rank=0, is_parallelism_agnostic=True)
        config = SimpleNamespace(
            groups=[SimpleNamespace(tokens_per_block=16, layer_names=["layer"])],
            parallel=parallel, canonical_layout=False, kv_cache_layout=None, replicated_layout=False,
            model=SimpleNamespace(name="bench", dtype="bfloat16"), cache=SimpleNamespace(tokens_per_hash=16),
        )  # fmt: skip
        spec = SimpleNamespace(config=config, blocks_per_chunk=1, kv_events_config=None)
        self._rows = primary.cast("B", (primary.nbytes // slot_bytes, slot_bytes))
        self.tier: Any = fs.FileSystemTierManager(spec, self._rows, "fs", str(directory))
        self.direct = bool(getattr(self.tier, "_use_o_direct", False))

    def submit(self, op: Op, job_id: int, keys: Sequence[BlockKey], slots: Sequence[int]) -> None:
        """See :meth:`System.submit`."""
        self._counts[job_id] = len(keys)
        job = self._job_type(
            job_id=job_id, keys=keys, chunk_ids=np.array(slots), is_promotion=op == "load", req_context=None
        )
        (self.tier.submit_store if op == "store" else self.tier.submit_load)(job)

    def finished(self) -> Sequence[Done]:
        """See :meth:`System.finished`. The tier reports only whether a whole job succeeded."""
        return [
            Done(result.job_id, [Outcome.OK if result.success else Outcome.IO_ERROR] * self._counts.pop(result.job_id))
            for result in self.tier.get_finished_jobs()
        ]

    def close(self) -> None:
        """See :meth:`System.close`."""
        self.tier.shutdown()
        del self.tier
        self._rows.release()
