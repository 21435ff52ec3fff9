"""Consumers of the events of real engines: a plain set per owner, and Dynamo's prefix index."""

from __future__ import annotations

import contextlib
import json
import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import zmq

# Set before the import, because Dynamo logs each event that it refuses.
os.environ.setdefault("DYN_LOG", "error")
from dynamo._core import RadixTree, compute_block_hash_for_seq

_END = (-1).to_bytes(8, "big", signed=True)
_ANSWER_MS = 20_000


class Router:
    """A consumer's view of one engine.

    Attributes:
        blocks: Hashes by owner; blocks of the engine itself are under their medium.
        parents: The previous block of each block that was reported with its tokens.
        stated: Blocks reported as stored, repetitions included.
    """

    def __init__(self) -> None:
        self.blocks: dict[str, set[int]] = {}
        self.parents: dict[int, int | None] = {}
        self.stated = 0
        self._trees: dict[str, RadixTree] = {}
        self._events = 0

    def apply(self, event: dict[str, Any]) -> None:
        """Apply one event."""
        if event["type"] == "AllBlocksCleared":
            self.forget()  # As Dynamo does, even if only the device's cache was reset.
            return
        owner = str(event.get("ownership") or event.get("medium"))
        blocks = self.blocks.setdefault(owner, set())
        hashes = event["block_hashes"]
        if event["type"] == "BlockRemoved":
            blocks.difference_update(hashes)
            self._tell(owner, {"removed": {"block_hashes": hashes}})
            return
        self.stated += len(hashes)
        blocks.update(hashes)
        # As in Dynamo's conversion of vLLM's events, a block without all of its tokens is skipped.
        size, tokens, parent = event["block_size"], event["token_ids"], event["parent_block_hash"]
        if not size or len(tokens) < size * len(hashes):
            return
        self.parents.update(zip(hashes, [parent, *hashes], strict=False))
        local = compute_block_hash_for_seq(tokens, size, lora_name=event.get("lora_name"))
        named = [{"block_hash": block, "tokens_hash": h} for block, h in zip(hashes, local, strict=True)]
        self._tell(owner, {"stored": {"parent_hash": parent, "blocks": named}})

    def forget(self) -> None:
        """Drop all blocks of the engine."""
        self.blocks.clear()
        self._trees.clear()

    def indexed(self, owner: str) -> set[int]:
        """Return the blocks that Dynamo finds from the start of a prompt."""
        if owner not in self._trees:
            return set()
        found: set[int] = set()
        for text in self._trees[owner].dump_tree_as_events():
            stored = json.loads(text)["event"]["data"]["stored"]
            found.update(block["block_hash"] for block in stored["blocks"])
        return found

    def reachable(self, among: set[int]) -> set[int]:
        """Return the blocks with all ancestors present up to the start of a prompt."""
        reached: dict[int, bool] = {}

        def reaches(block: int | None) -> bool:
            line: list[int] = []
            while block is not None and block not in reached:
                line.append(block)
                if block not in among or block not in self.parents:
                    reached[block] = False
                    break
                block = self.parents[block]
            answer = True if block is None else reached[block]
            reached.update(dict.fromkeys(line, answer))
            return answer

        return {block for block in among if reaches(block)}

    def match(self, owner: str, tokens: Sequence[int], block_tokens: int) -> int:
        """Return the number of a prompt's blocks that Dynamo would expect at this engine."""
        if owner not in self._trees:
            return 0
        local = compute_block_hash_for_seq(list(tokens), block_tokens)
        scores: dict[Any, int] = self._trees[owner].find_matches(local).scores
        return max(scores.values(), default=0)

    def _tell(self, owner: str, data: dict[str, Any]) -> None:
        tree = self._trees.setdefault(owner, RadixTree())
        self._events += 1
        # Dynamo refuses blocks with an unknown parent, and removals of refused blocks.
        with contextlib.suppress(RuntimeError):
            tree.apply_event(1, json.dumps({"event_id": self._events, "data": data, "dp_rank": 0}).encode())


class Stream:
    """A subscriber to one engine that requests a replay if a message is missing.

    Args:
        folder: Directory for its sockets.
        loss: Share of the messages that are lost.
        seed: Seed of the losses.
    """

    def __init__(self, folder: Path, *, loss: float = 0.0, seed: int = 0) -> None:
        self.router = Router()
        self.lost = self.replayed = self.dropped = 0
        """Lost messages; replayed messages; the number of times that all state was dropped."""
        self.endpoint, self._replay_endpoint = f"ipc://{folder}/events", f"ipc://{folder}/replay"
        self._random, self._loss, self._next = random.Random(seed), loss, 0
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.connect(self.endpoint)
        self._socket.subscribe(b"")

    def config(self, **more: Any) -> dict[str, Any]:
        """Return the engine's ``--kv-events-config``."""
        return {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": self.endpoint,
            "replay_endpoint": self._replay_endpoint,
            **more,
        }

    def pump(self) -> Router:
        """Process all messages that have arrived."""
        while self._socket.poll(0):
            _, number, payload = self._socket.recv_multipart()
            if self._random.random() < self._loss:
                self.lost += 1
                continue
            sequence = int.from_bytes(number, "big")
            if sequence > self._next:
                self.replay()
            self._take(sequence, payload)
        return self.router

    def replay(self) -> None:
        """Request all messages since the last one; if some are no longer available, drop all state."""
        with self._context.socket(zmq.DEALER) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(self._replay_endpoint)
            socket.send_multipart([b"", self._next.to_bytes(8, "big")])
            while True:
                assert socket.poll(_ANSWER_MS), "no replay"
                *_, number, payload = socket.recv_multipart()
                if number == _END:
                    return
                sequence = int.from_bytes(number, "big")
                self.replayed += 1
                if sequence > self._next:
                    self.router.forget()
                    self.dropped += 1
                    self._next = sequence
                self._take(sequence, payload)

    def close(self) -> None:
        """Close the sockets."""
        self._socket.close(linger=0)
        self._context.term()

    def _take(self, sequence: int, payload: bytes) -> None:
        if sequence < self._next:
            return
        if sequence > self._next:
            self.router.forget()
            self.dropped += 1
        self._next = sequence + 1
        for event in msgspec.msgpack.decode(payload)[1]:
            self.router.apply(event)
