"""A fault plan queried by another process: the same faults, stalls that either side can end, a clean shutdown."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress

import pytest

from kvstore.backends.base import RecordGeometry
from kvstore.errors import BackendUnavailableError
from kvstore.namespace import Namespace
from kvstore.registry import BACKENDS
from kvstore.testing import Fault, FaultKind, FaultPlan
from kvstore.testing.served_faults import PlanServer, ServedFaultyBackend, ServedFaultyConfig
from kvstore.testing.waiting import eventually_async


@asynccontextmanager
async def backend_of(server: PlanServer) -> AsyncIterator[ServedFaultyBackend]:
    """Open the child's backend in this process."""
    config = server.config_around({"backend": "memory", "capacity": 1 << 20, "io": "process", "load_timeout": 3})
    assert config["load_timeout"] == 3
    assert BACKENDS.find(config["backend"]) is ServedFaultyBackend
    backend = ServedFaultyBackend(ServedFaultyConfig(inner=config["inner"], plan=config["plan"]))
    try:
        await backend.open(Namespace({"suite": "served"}), RecordGeometry(backend.alignment, 4096))
        yield backend
    finally:
        with suppress(OSError):  # One of the tests ends with the plan's server closed.
            await backend.close()


async def test_faults_are_taken_and_counted_where_the_plan_is() -> None:
    """A fault hits its planned call, once, and the test's own plan counts it."""
    plan = FaultPlan([Fault("exists", FaultKind.ERROR, at=2)], seed=7)
    with PlanServer(plan) as server:
        async with backend_of(server) as backend:
            assert list(await backend.exists([b"a"])) == [False]
            with pytest.raises(BackendUnavailableError, match="injected"):
                await backend.exists([b"a"])
            assert list(await backend.exists([b"a"])) == [False]
            assert plan.injected == {FaultKind.ERROR: 1}
            assert backend.plan.seed == 7


async def test_a_stall_ends_when_either_side_lets_go() -> None:
    """A stalled call counts as stalled while it lasts, and ends by release, by cancellation, or with the server."""
    plan = FaultPlan([Fault("exists", FaultKind.STALL, times=None)])
    with PlanServer(plan) as server:
        async with backend_of(server) as backend:

            async def stalled_call() -> asyncio.Task[Sequence[bool]]:
                call = asyncio.create_task(backend.exists([b"a"]))
                await eventually_async(lambda: plan.stalled == 1, what="the stall")
                return call

            call = await stalled_call()
            plan.release()
            assert list(await call) == [False]
            call = await stalled_call()
            call.cancel()
            await eventually_async(lambda: plan.stalled == 0, what="the end of a cancelled stall")
            # A fault that is no longer planned.
            await asyncio.wait_for(backend.plan.stall(Fault("exists", FaultKind.STALL)), 30)
            call = await stalled_call()
            await asyncio.to_thread(server.close)
            assert list(await call) == [False]
            with pytest.raises(OSError):
                await backend.exists([b"a"])
    assert not [thread.name for thread in threading.enumerate() if thread.name == "kvstore-faults"]
