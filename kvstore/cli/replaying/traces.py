"""Traces: recorded requests, in the format of Mooncake's public traces.

One JSON object per line: ``timestamp`` (milliseconds since the start), ``input_length`` and ``output_length`` (tokens),
and ``hash_ids``, one number per block of the prompt in prefix order. Prompts that are equal up to the end of a block
have the same number for it. ``kvstore``, an extension, holds the request's offload policy; other keys are ignored.

Source: Qin et al., "Mooncake: trading more storage for less computation", FAST 2025, and its published traces.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec

from kvstore.cli.command_line import opened_input
from kvstore.errors import ConfigError

BLOCK_TOKENS: Final = 512
"""Tokens of a block in Mooncake's traces."""

_LINE_BYTES_MAX: Final = 16 << 20
"""Longest line: a prompt of a million blocks. A longer line is not part of a trace."""

_Count = Annotated[int, msgspec.Meta(ge=0)]
_BlockId = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class TraceError(ConfigError):
    """A file is not a trace or can't be written, or a trace does not fit its parameters."""


class TraceRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One request; the names are those of the format."""

    timestamp: Annotated[float, msgspec.Meta(ge=0)]  # Time of arrival, in milliseconds since the start of the trace.
    input_length: _Count  # Tokens of its prompt.
    hash_ids: tuple[_BlockId, ...]  # Its blocks in prefix order; the last one may be partial.
    output_length: _Count = 0  # Tokens that were generated.
    kvstore: dict[str, Any] = {}  # Its offload policy, as in ``kv_transfer_params["kvstore"]``.


class Trace:
    """Requests in the order of their arrival; those with equal times keep their order.

    Raises:
        TraceError: A request has a block twice, or more blocks than its prompt fills.
    """

    def __init__(self, requests: Iterable[TraceRequest], *, block_tokens: int = BLOCK_TOKENS, name: str = "") -> None:
        if block_tokens < 1:
            raise TraceError(f"block_tokens is {block_tokens}. Expected 1 or more.")
        self.requests: Sequence[TraceRequest] = sorted(requests, key=lambda request: request.timestamp)
        self.block_tokens = block_tokens
        self.name = name
        for number, request in enumerate(self.requests, 1):
            _check(request, block_tokens, f"request {number} of {name or 'the trace'}")

    def __len__(self) -> int:
        return len(self.requests)

    def __iter__(self) -> Iterator[TraceRequest]:
        return iter(self.requests)

    @property
    def blocks(self) -> int:
        """Blocks of all requests together."""
        return sum(len(request.hash_ids) for request in self.requests)

    @property
    def distinct_blocks(self) -> int:
        """Number of distinct blocks; a cache of this capacity evicts nothing."""
        return len({block for request in self.requests for block in request.hash_ids})

    @property
    def tokens(self) -> int:
        """Tokens of all prompts together."""
        return sum(request.input_length for request in self.requests)

    def tokens_of(self, request: TraceRequest, blocks: int) -> int:
        """Return the number of tokens in the first ``blocks`` blocks of a request's prompt."""
        return min(blocks * self.block_tokens, request.input_length)


def read_trace(path: str | os.PathLike[str], *, block_tokens: int = BLOCK_TOKENS, limit: int | None = None) -> Trace:
    """Read at most ``limit`` requests of a trace from a file, or from standard input if the path is ``-``.

    Raises:
        ConfigError: The file can't be read; TraceError: a line is not a request.
    """
    decoder = msgspec.json.Decoder(TraceRequest)
    requests: list[TraceRequest] = []
    with opened_input(os.fspath(path), "trace") as file:
        number = 0
        while (limit is None or len(requests) < limit) and (line := file.readline(_LINE_BYTES_MAX)):
            number += 1
            if not line.strip():
                continue
            try:
                requests.append(decoder.decode(line))
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                raise TraceError(
                    f"Line {number} of {os.fspath(path)} is not a request of a trace: {error}. Expected a JSON object "
                    'with "timestamp", "input_length" and "hash_ids", as in Mooncake\'s traces.'
                ) from None
    if not requests:
        raise TraceError(f"{os.fspath(path)} holds no request. Expected one JSON object a line.")
    return Trace(requests, block_tokens=block_tokens, name=Path(path).name)


def write_trace(path: str | os.PathLike[str], requests: Iterable[TraceRequest]) -> None:
    """Write a trace.

    Raises:
        TraceError: The file can't be written.
    """
    encoder = msgspec.json.Encoder()
    try:
        with open(path, "wb") as file:
            for request in requests:
                file.write(encoder.encode(request) + b"\n")
    except OSError as error:
        raise TraceError(f"The trace {os.fspath(path)!r} can't be written: {error.strerror}. Name a file.") from error


def _check(request: TraceRequest, block_tokens: int, what: str) -> None:
    blocks = len(request.hash_ids)
    if len(set(request.hash_ids)) != blocks:
        raise TraceError(f"A block comes twice in {what}. Expected each once: a block stands for its whole prefix.")
    if blocks > -(-request.input_length // block_tokens):
        raise TraceError(
            f"{blocks} blocks for {request.input_length} tokens in {what}, which are less than {block_tokens} tokens "
            "each. Say how many tokens a block of this trace has."
        )
