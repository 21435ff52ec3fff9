"""Loads that must not be made: how a worker says that a request lacks blocks which the scheduler takes for loaded.

By design there are none: what a lookup answered HIT stays until the step ends, and vLLM loads in the same step. Should
a block be missing all the same, to raise would end the engine, and to copy anything would give wrong tokens. So the
worker copies nothing and reports the load as failed. vLLM then ends the request with an error, or computes its tokens
(``kv_load_failure_policy``).
"""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

from vllm.v1.kv_offload.base import GPULoadStoreSpec

__all__ = ["LoadFailures"]

logger = logging.getLogger("kvstore.vllm.load_failures")


class LoadFailures:
    """Reports failed loads through vLLM's connector on the worker's side.

    vLLM can be told of blocks, where all layers share one kind of them, or (0.30 and later) of requests that wait.

    Args:
        connector: ``OffloadingConnector``; None if unknown.
        connector_worker: Its ``OffloadingConnectorWorker``.
    """

    def __init__(self, connector: Any = None, connector_worker: Any = None) -> None:
        self._requests: set[str] = set()
        self._blocks: set[int] = set()
        self._request_of: dict[int, str | None] = getattr(connector_worker, "_load_jobs", {})
        groups = getattr(getattr(connector_worker, "kv_cache_config", None), "kv_cache_groups", ())
        self._by_block = connector is not None and len(groups) == 1
        self._results = getattr(connector, "get_transfer_results", None)
        if self._by_block:
            connector.get_block_ids_with_load_errors = self._take_blocks
        elif self._results is not None:
            connector.get_transfer_results = self._with_failed_requests

    def note(self, job_id: int, destination: GPULoadStoreSpec) -> bool:
        """Note that a load was not made.

        Returns:
            Whether vLLM will be told, so that the load is to be reported as ended. If not, it never may be: its request
            would go on with what lies in its blocks; so the request waits until it is aborted.

        Raises:
            RuntimeError: The request computes in this very step, and vLLM has no way to be told.
        """
        request = self._request_of.get(job_id)
        logger.error(
            "A load of %d blocks of request %s is not made: a block is missing.", len(destination.block_ids), request
        )
        if self._by_block:
            self._blocks.update(int(block) for block in destination.block_ids)
            return True
        if request is None and job_id in self._request_of:
            raise RuntimeError(f"Load {job_id} lacks a block, and its request would compute with wrong ones.")
        if self._results is None or request is None:
            return False
        self._requests.add(request)
        return True

    def _take_blocks(self) -> set[int]:
        blocks, self._blocks = self._blocks, set()
        return blocks

    def _with_failed_requests(self, finished_req_ids: set[str]) -> Any:
        assert self._results is not None
        results = self._results(finished_req_ids)
        failed = self._requests & results.finished_recving
        self._requests -= failed
        return dataclasses.replace(results, failed_recving=results.failed_recving | failed) if failed else results
