"""An engine that is killed while it stores: its segments are taken, and every reported block is there and right."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvstore.types import Outcome
from tests.disk.rig import opened
from tests.sizes import sized

_SLOTS = 64
_EVICTED_MAX = 16
"""Most blocks whose eviction was not reported before the kill: those of a batch, and some ahead of need."""


async def _store(root: Path, seed: int, engine: str) -> None:
    """Store, load and remove blocks until killed; print each stored and removed one once it is reported."""
    async with opened(root, _SLOTS, seed=seed, engine=engine) as rig:
        while True:
            values = {rig.maker.key(): rig.maker.payload() for _ in range(8)}
            outcomes = await rig.put(values)
            lines = [f"gone {key.hex()}" for key, _ in rig.removed]
            rig.removed.clear()
            for (key, payload), outcome in zip(values.items(), outcomes, strict=True):
                if outcome is Outcome.OK:
                    lines.append(f"there {key.hex()} {payload[:16].hex()}")
            first = next(iter(values))
            # Reported as gone before the removal begins, because the kill may come at any moment.
            lines.append(f"gone {first.hex()}")
            print("\n".join(lines), flush=True)
            await rig.backend.delete([first])


@pytest.mark.parametrize("engine", ["io_uring", "threads"])
def test_killed_engine_loses_no_reported_block(tmp_path: Path, engine: str) -> None:
    """After SIGKILL at a random moment, the next engine finds each block that was reported and not evicted since."""
    rng = random.Random(7)
    for life in range(sized(2, full=100)):
        command = [sys.executable, "-m", "tests.disk.test_kills", str(tmp_path / "root"), str(life), engine]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            lines = [process.stdout.readline() for _ in range(rng.randint(20, 120))]
            os.kill(process.pid, signal.SIGKILL)
            lines += process.stdout.readlines()
        held: dict[bytes, bytes] = {}
        for line in [line for line in lines if line.endswith("\n")]:
            what, key, *start = line.split()
            if what == "there":
                held[bytes.fromhex(key)] = bytes.fromhex(start[0])
            else:
                held.pop(bytes.fromhex(key), None)
        assert held
        asyncio.run(_check(tmp_path / "root", held, engine))


async def _check(root: Path, held: dict[bytes, bytes], engine: str) -> None:
    """Check the blocks; the kernel may hold the locks of the killed engine for a moment."""
    async with opened(root, _SLOTS, engine=engine) as rig:
        deadline = asyncio.get_running_loop().time() + 20
        while True:
            back = await rig.get(list(held))
            assert all(
                payload is None or payload[:16] == start for payload, start in zip(back, held.values(), strict=True)
            )
            if back.count(None) <= _EVICTED_MAX:
                break
            assert asyncio.get_running_loop().time() < deadline, f"{back.count(None)} of {len(held)} are missing"
            await asyncio.sleep(0.05)
        await rig.put_new(8)


if __name__ == "__main__":
    asyncio.run(_store(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]))
