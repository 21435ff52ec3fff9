"""The feed of requests to a recorder on the same machine (``kvstore-bench record``)."""

from __future__ import annotations

import contextlib
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Final

import msgspec
import xxhash

from kvstore.types import BlockKey

SOCKET_PATH_BYTES_MAX: Final = 107
"""Linux limit."""

DATAGRAM_BYTES_MAX: Final = 200_000
"""Slightly below the Linux default limit."""

_BLOCKS_MAX: Final = 16384
"""Maximum blocks sent per request; at nine bytes each, they fit into a datagram."""


class RecordedRequest(msgspec.Struct, frozen=True, array_like=True):
    """One request."""

    feed: int  # Random number that identifies the sender.
    number: int  # Position among the sender's requests, from 0; a gap means lost requests.
    at_s: float  # Monotonic seconds.
    block_tokens: int  # Tokens per block.
    tokens: int  # Length of the prompt, or of its full blocks.
    blocks: Sequence[int]  # Hashes of the keys in prefix order.


class RequestFeed:
    """Sends each request to the recorder bound to a Unix datagram socket, if there is one.

    It never waits: requests are lost while the recorder's queue is full, and the recorder counts them. Used by one
    thread.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._feed = secrets.randbits(63)
        self._number = 0

    def send(self, ends: Mapping[BlockKey, int], tokens: int) -> None:
        """Send a request, if it has blocks.

        ``ends``: its blocks with their ends in tokens, group by group, each in prefix order.
        """
        if not ends:
            return
        with (
            contextlib.suppress(OSError),
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as recorder,
        ):
            recorder.connect(self._path)
            keys, block_tokens = _longest_group(ends)
            blocks = [xxhash.xxh3_64_intdigest(key) for key in keys[:_BLOCKS_MAX]]
            request = RecordedRequest(self._feed, self._number, time.monotonic(), block_tokens, tokens, blocks)
            self._number += 1
            recorder.send(msgspec.msgpack.encode(request))


def _longest_group(ends: Mapping[BlockKey, int]) -> tuple[list[BlockKey], int]:
    """Return the keys of the group with the most blocks, and its tokens per block."""
    keys, positions = list(ends), list(ends.values())
    starts = [0, *(i for i in range(1, len(keys)) if positions[i] <= positions[i - 1]), len(keys)]
    start, end = max(pairwise(starts), key=lambda group: group[1] - group[0])
    steps = [later - earlier for earlier, later in pairwise(positions[start:end])]
    return keys[start:end], min([*steps, positions[start]])
