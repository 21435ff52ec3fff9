"""Random operations on one engine agree with a model, with failing writes, evictions, restarts and kills."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest

from kvstore.testing.seeds import fresh_seed
from kvstore.types import BlockKey, Outcome
from tests.disk.rig import NoRows, Rig, clone, opened
from tests.sizes import sized

SLOTS = 48
KEYS = 90


class Walk:
    """The model: for each key its payload if it was reported as stored, and not as gone since."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.held: set[BlockKey] = set()
        self.shaky: set[BlockKey] = set()
        """Blocks that a restart may lose: the write of the row of their eviction failed, and was made all the same."""
        self.values: dict[BlockKey, bytes] = {}
        self.disk = NoRows()
        self.seen = 0

    async def step(self, rig: Rig) -> None:
        """Do one random operation and compare."""
        keys = self.rng.sample(sorted(self.values), self.rng.randint(1, 12))
        kind = self.rng.choice(["put", "put", "put", "get", "get", "delete", "quarantine", "fail", "heal", "heal"])
        if kind == "put":
            if self.disk.fails and self.disk.after:
                self.shaky |= self.held
            outcomes = await rig.put({key: self.values[key] for key in keys})
            self._note_removals(rig)
            for key, outcome in zip(keys, outcomes, strict=True):
                assert outcome in (Outcome.OK, Outcome.EXISTS) or self.disk.fails or outcome is Outcome.NO_SPACE
                if outcome is Outcome.OK and (key in await self._found(rig, [key])):
                    self.held.add(key)
                    self.shaky.discard(key)
        elif kind == "get":
            back = await rig.get(keys)
            self._note_removals(rig)
            for key, payload in zip(keys, back, strict=True):
                assert payload == (self.values[key] if key in self.held else None), key.hex()
        elif kind == "delete":
            removed = await rig.backend.delete(keys)
            self._note_removals(rig)
            assert all(found or key not in self.held for key, found in zip(keys, removed, strict=True))
            self.held.difference_update(keys)
        elif kind == "quarantine" and self.rng.random() < 0.1:
            await rig.backend.quarantine(keys[:1])
            self.held.discard(keys[0])
        elif kind in ("fail", "heal"):
            self.disk.fails, self.disk.after = kind == "fail", self.rng.random() < 0.5
        self._note_removals(rig)
        assert await self._found(rig, sorted(self.values)) == self.held

    async def _found(self, rig: Rig, keys: list[BlockKey]) -> set[BlockKey]:
        found = await rig.backend.exists(keys)
        self._note_removals(rig)
        return set(itertools.compress(keys, found))

    def _note_removals(self, rig: Rig) -> None:
        self.held.difference_update(key for key, _ in rig.removed[self.seen :])
        self.seen = len(rig.removed)


@pytest.mark.parametrize("engine", ["threads"])
async def test_one_engine_agrees_with_a_model(tmp_path: Path, engine: str) -> None:
    """No wrong byte, no block that was removed, no reported block missing; also after a kill at any moment."""
    seed = fresh_seed()
    print("seed", seed)
    walk = Walk(random.Random(seed))
    place = tmp_path / "0"
    for life in range(sized(4, full=200)):
        killed: Path | None = None
        async with opened(place, SLOTS, disk=walk.disk, seed=seed + life, engine=engine) as rig:
            walk.seen = 0
            while len(walk.values) < KEYS:
                walk.values[rig.maker.key()] = rig.maker.payload()
            found = await walk._found(rig, sorted(walk.values))
            assert walk.held - walk.shaky <= found <= walk.held
            walk.held, walk.shaky = found, set()
            for _ in range(60):
                await walk.step(rig)
            walk.disk.fails = False
            await rig.backend.probe()
            session = rig.backend._open
            assert session is not None
            await session.space.close()
            walk._note_removals(rig)
            if walk.rng.random() < 0.5:
                killed = clone(place, tmp_path / str(life + 1))
        place = killed or place
