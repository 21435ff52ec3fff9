"""Consumers of the events of real engines: Dynamo's indexer, and a model of llm-d's filter of events."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import zmq

from kvstore.testing import eventually
from tests.peer.ports import free_port

_END = (-1).to_bytes(8, "big", signed=True)
_ANSWER_MS = 20_000
_MODEL = "tiny"


class Filter:
    """Counts the reports of each block, as llm-d's router does before its index: a block is gone at zero."""

    def __init__(self) -> None:
        self.counts: dict[tuple[str, int], Counter[int]] = {}  # Reports by medium and group, and block.
        # Blocks by previous block and tokens, of all blocks ever reported with tokens.
        self.chain: dict[tuple[int | None, tuple[int, ...]], int] = {}
        self.restated: list[int] = []  # Blocks of tiers that were reported as stored while they were.

    def apply(self, event: dict[str, Any]) -> None:
        """Apply one event."""
        if event["type"] == "AllBlocksCleared":
            self.counts.clear()
            return
        medium = event.get("medium") or "GPU"
        counts = self.counts.setdefault((medium, event.get("group_idx") or 0), Counter())
        hashes = event["block_hashes"]
        if event["type"] == "BlockRemoved":
            counts.subtract(hashes)
            for block in hashes:
                if counts[block] <= 0:
                    del counts[block]
            return
        if medium != "GPU":
            self.restated += [block for block in hashes if counts[block]]
        counts.update(hashes)
        size, tokens, parent = event["block_size"], event["token_ids"], event["parent_block_hash"]
        if size and len(tokens) == size * len(hashes):
            for i, block in enumerate(hashes):
                self.chain[parent, tuple(tokens[i * size : (i + 1) * size])] = block
                parent = block

    def on(self, medium: str) -> set[int]:
        """Return the blocks on a medium."""
        return {block for (name, _), counts in self.counts.items() if name == medium for block in counts}

    def path(self, tokens: Sequence[int], block_tokens: int) -> list[int]:
        """Return the blocks of a prompt, as far as they were ever reported with their tokens."""
        found: list[int] = []
        parent: int | None = None
        for start in range(0, len(tokens) - block_tokens + 1, block_tokens):
            parent = self.chain.get((parent, tuple(tokens[start : start + block_tokens])))
            if parent is None:
                break
            found.append(parent)
        return found


class Indexer:
    """Dynamo's indexer in its own process, with one engine."""

    def __init__(self, folder: Path, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        port = free_port()
        self._url = f"http://127.0.0.1:{port}"
        arguments = ["--block-size", str(block_tokens), "--port", str(port), "--threads", "1", "--model-name", _MODEL]
        with (folder / "indexer.log").open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "dynamo.indexer", *arguments],
                env={**os.environ, "DYN_LOG": "warn"},
                stdout=log,
                stderr=log,
            )
        eventually(self._is_up, 60, what="Dynamo's indexer answers")

    def follow(self, endpoint: str, replay_endpoint: str) -> None:
        """Subscribe to a running engine. It never subscribes if no one listens at the second endpoint."""
        engine = {"instance_id": 1, "endpoint": endpoint, "replay_endpoint": replay_endpoint}
        self._call("/register", {**engine, "model_name": _MODEL, "block_size": self._block_tokens})

    def match(self, tokens: Sequence[int]) -> tuple[int, int, int]:
        """Return the tokens of a prompt that it expects in device memory, there or in host memory, and in any tier."""
        instances = self._call("/query", {"token_ids": list(tokens), "model_name": _MODEL}).get("instances", {})
        engine = instances.get("1", {})
        return engine.get("gpu", 0), engine.get("cpu", 0), engine.get("disk", 0)

    def close(self) -> None:
        """End the process."""
        self._process.terminate()
        self._process.wait(30)

    def _is_up(self) -> bool:
        try:
            self._call("/workers")
        except OSError:
            return False
        return True

    def _call(self, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, {"content-type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return json.loads(answer.read())
        except urllib.error.HTTPError as error:
            if error.code == 404:  # No block is known yet.
                return {}
            raise AssertionError(f"{path}: {error.code} {error.read()[:500]!r}") from error


class Stream:
    """A subscriber to one engine, which passes its messages to both consumers."""

    def __init__(self, folder: Path, block_tokens: int) -> None:
        self.filter = Filter()
        self.lost = self.replayed = 0
        self._block_tokens = block_tokens
        # VLLM does not listen at a TCP endpoint of one interface, and Dynamo's indexer connects to TCP only.
        self._endpoint, self._replay_endpoint = f"ipc://{folder}/events", f"tcp://127.0.0.1:{free_port()}"
        # Messages of which one is lost; 0 for none. Once set, each consumer requests replays itself.
        self.lose_every: int | None = None
        self._received = 0
        self._next = 0
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.connect(self._endpoint)
        self._socket.subscribe(b"")
        self._forward = self._context.socket(zmq.XPUB)
        self._forward.setsockopt(zmq.SNDHWM, 0)
        self._port = self._forward.bind_to_random_port("tcp://127.0.0.1")
        self.indexer = Indexer(folder, block_tokens)
        self._has_follower = False

    def config(self) -> dict[str, Any]:
        """Return the engine's ``--kv-events-config``."""
        return {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": self._endpoint,
            "replay_endpoint": self._replay_endpoint,
        }

    def pump(self) -> Filter:
        """Process all messages that have arrived from the running engine."""
        if not self._has_follower:
            self.indexer.follow(f"tcp://127.0.0.1:{self._port}", self._replay_endpoint)
            assert self._forward.poll(_ANSWER_MS), "Dynamo's indexer did not subscribe"
            self._has_follower = True
        while self._socket.poll(0):
            frames = self._socket.recv_multipart()
            self._received += 1
            if self.lose_every and self._received % self.lose_every == 0:
                self.lost += 1
                continue
            sequence = int.from_bytes(frames[1], "big")
            if sequence > self._next:
                self.replay()
            # After a replay, also what it contained; the indexer ignores repeated messages.
            self._forward.send_multipart(frames)
            self._take(sequence, frames[2])
        return self.filter

    def replay(self) -> None:
        """Request all messages since the last one."""
        with self._context.socket(zmq.DEALER) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(self._replay_endpoint)
            socket.send_multipart([b"", self._next.to_bytes(8, "big")])
            while True:
                assert socket.poll(_ANSWER_MS), "no replay"
                *_, number, payload = socket.recv_multipart()
                if number == _END:
                    return
                self.replayed += 1
                if self.lose_every is None:
                    self._forward.send_multipart([b"", number, payload])
                self._take(int.from_bytes(number, "big"), payload)

    def mistakes(self, prompts: Sequence[Sequence[int]]) -> list[str]:
        """Return the prompts for which Dynamo expects other tokens than are in the tiers according to the filter."""
        wrong = []
        for place, tokens in enumerate(prompts):
            device, *answer = self.indexer.match(tokens)
            path, at, expected = self.filter.path(tokens, self._block_tokens), device // self._block_tokens, []
            for medium in ("CPU", "STORAGE"):
                held = self.filter.on(medium)
                while at < len(path) and path[at] in held:
                    at += 1
                expected.append(at * self._block_tokens)
            if answer != expected:
                wrong.append(f"prompt {place}: {answer} instead of {expected}, {device} on the device")
        return wrong

    def close(self) -> None:
        """Close the sockets and end the indexer."""
        self.indexer.close()
        self._socket.close(linger=0)
        self._forward.close(linger=0)
        self._context.term()

    def _take(self, sequence: int, payload: bytes) -> None:
        if sequence < self._next:
            return
        assert sequence == self._next, "messages are missing from the replay"
        self._next = sequence + 1
        for event in msgspec.msgpack.decode(payload)[1]:
            self.filter.apply(event)
