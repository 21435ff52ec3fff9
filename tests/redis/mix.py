"""A mix of operations whose answers are all checked against a model."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence

from kvstore.backends.base import Backend, RecordGeometry
from kvstore.codec.record import RecordCodec
from kvstore.errors import BackendError, RecordError
from kvstore.testing.records import RecordMaker, Target
from kvstore.types import BlockKey, Outcome
from tests.redis.clients import NAMESPACE

PAYLOAD_BYTES = 4096
WORKERS = 8
FAILED_PAUSE_S = 0.002
CALL_LIMIT_S = 15.0
"""Maximum duration of any call, whatever happens to the server; a backend without deadlines has its own."""


class Mix:
    """Workers with their own keys put, get, look up and delete in batches.

    A key's payload is a function of the key, so that another block's bytes or a partial block are detected. Without
    faults the model is exact; after failed calls, a block may be present or absent, and must be right if present.

    Args:
        backend: Open, with slots of ``PAYLOAD_BYTES``.
        seed: Seed of all random choices.
        calm: Whether any failure or lost block is an error.
    """

    def __init__(self, backend: Backend, seed: int, *, calm: bool) -> None:
        self.backend = backend
        self.seed = seed
        self.calm = calm
        self.flips = False
        self.operations = 0
        self.counts: Counter[str] = Counter()
        self._workers: list[_Worker] = []

    async def run(self, operations: int, *, goes_on: bool = False) -> None:
        """Do ``operations`` operations, counted by block; raise ``AssertionError`` at the first wrong answer.

        With ``goes_on``, the workers keep the keys and the model of the last run; ``backend`` may be another one.
        """
        goal = self.operations + operations
        if not goes_on:
            self._workers = [_Worker(self, random.Random(f"{self.seed}-{n}-{goal}")) for n in range(WORKERS)]
        async with asyncio.TaskGroup() as group:
            for worker in self._workers:
                group.create_task(worker.run(goal))

    def __str__(self) -> str:
        return f"seed {self.seed}, {self.operations} operations: {dict(self.counts)}; {self.backend.stats().counters}"


class _Worker:
    def __init__(self, mix: Mix, rng: random.Random) -> None:
        self.mix, self.rng = mix, rng
        self.maker = RecordMaker(NAMESPACE, RecordGeometry(256, PAYLOAD_BYTES), rng)
        self.codec = RecordCodec(NAMESPACE, header_bytes=256)
        self.keys = [rng.randbytes(32) for _ in range(60)]
        # True: present; False: absent; None: unknown, as a call failed.
        self.there: dict[BlockKey, bool | None] = dict.fromkeys(self.keys, False)
        self.targets = [self.maker.target(self.keys[0]) for _ in range(12)]

    async def run(self, goal: int) -> None:
        while self.mix.operations < goal:
            keys = self.rng.sample(self.keys, self.rng.randrange(1, 13))
            self.mix.operations += len(keys)
            verb = self.rng.choices([self.put, self.get, self.exists, self.delete], [4, 6, 2, 1])[0]
            failed_before = self.mix.counts["failed"]
            try:
                async with asyncio.timeout(CALL_LIMIT_S):
                    await verb(keys)
            except TimeoutError as error:
                raise AssertionError(f"{self.mix}: a call hung") from error
            except BackendError as error:
                self.failed(keys, f"{verb.__name__}: {error}")
            if self.mix.counts["failed"] != failed_before:
                # Calls to a failed node return without waiting: a loop of them leaves no time to reconnect to
                # it.
                await asyncio.sleep(FAILED_PAUSE_S)

    def failed(self, keys: Sequence[BlockKey], why: str) -> None:
        assert not self.mix.calm, f"{self.mix}: {why}"
        self.mix.counts["failed"] += len(keys)
        self.there.update(dict.fromkeys(keys))

    async def put(self, keys: list[BlockKey]) -> None:
        outcomes = await self.mix.backend.put([self.maker.write(key, payload_of(key)) for key in keys])
        for key, outcome in zip(keys, outcomes, strict=True):
            self.mix.counts[f"put {outcome.name}"] += 1
            if not outcome.ok:
                self.failed([key], f"put: {outcome!r} {self.mix.backend.last_error}")
                continue
            expected = Outcome.EXISTS if self.there[key] else Outcome.OK
            assert not self.mix.calm or outcome is expected, f"{self.mix}: put {outcome!r}, expected {expected!r}"
            self.there[key] = True

    async def get(self, keys: list[BlockKey]) -> None:
        targets = self.targets[: len(keys)]
        for key, target in zip(keys, targets, strict=True):
            target.fill()
            target.key = target.read.key = key
            target.read.filled_bytes = 0
        outcomes = await self.mix.backend.get_into([target.read for target in targets])
        for key, target, outcome in zip(keys, targets, outcomes, strict=True):
            self.mix.counts[f"get {outcome.name}"] += 1
            if outcome is Outcome.OK:
                if self.is_damaged(target):
                    self.mix.counts["damaged"] += 1
                    self.there[key] = None
                    continue
                assert self.maker.content(target) == payload_of(key), f"{self.mix}: wrong bytes"
                assert self.there[key] is not False or not self.mix.calm, f"{self.mix}: a block that was not put"
            elif outcome is Outcome.MISS:
                if self.there[key]:
                    assert not self.mix.calm, f"{self.mix}: a block was lost"
                    self.mix.counts["lost"] += 1
                    self.there[key] = None
            else:
                self.failed([key], f"get: {outcome!r} {self.mix.backend.last_error}")

    def is_damaged(self, target: Target) -> bool:
        """Return whether a network that flips bits damaged a record, which a tier detects and counts as a miss."""
        if not self.mix.flips:
            return False
        try:
            self.codec.verify(target.key, target.header.view, target.payload.view, target.read.filled_bytes)
        except RecordError:
            return target.guards_intact
        return False

    async def exists(self, keys: list[BlockKey]) -> None:
        found = await self.mix.backend.exists(keys)
        for key, there in zip(keys, found, strict=True):
            known = self.there[key]
            assert not self.mix.calm or known is None or bool(there) == known, f"{self.mix}: exists says {there}"

    async def delete(self, keys: list[BlockKey]) -> None:
        gone = await self.mix.backend.delete(keys)
        for key, there in zip(keys, gone, strict=True):
            known = self.there[key]
            assert not self.mix.calm or known is None or bool(there) == known, f"{self.mix}: delete says {there}"
            # Under faults, a failed node is skipped, and still holds the block when it recovers.
            self.there[key] = False if self.mix.calm or there else None


_payloads: dict[BlockKey, bytes] = {}


def payload_of(key: BlockKey) -> bytes:
    """Return the payload of a key."""
    if key not in _payloads:
        if len(_payloads) > 4096:
            _payloads.clear()
        _payloads[key] = random.Random(key).randbytes(PAYLOAD_BYTES)
    return _payloads[key]
