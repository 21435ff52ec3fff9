"""Traces: recorded or generated requests, in the format of Mooncake's public traces.

One JSON object per line: ``timestamp`` (milliseconds since the start), ``input_length`` and ``output_length`` (tokens),
and ``hash_ids``, one number per block of the prompt in prefix order. Prompts that are equal up to the end of a block
have the same number for it. ``kvstore``, an extension, holds the request's offload policy; other keys are ignored.

Source: Qin et al., "Mooncake: trading more storage for less computation", FAST 2025, and its published traces.
"""

from __future__ import annotations

import heapq
import itertools
import os
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
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
        ConfigError: A request has a block twice, or more blocks than its prompt fills.
    """

    def __init__(self, requests: Iterable[TraceRequest], *, block_tokens: int = BLOCK_TOKENS, name: str = "") -> None:
        if block_tokens < 1:
            raise ConfigError(f"block_tokens is {block_tokens}. Expected 1 or more.")
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
        ConfigError: The file can't be read, or a line is not a request.
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
                raise ConfigError(
                    f"Line {number} of {os.fspath(path)} is not a request of a trace: {error}. Expected a JSON object "
                    'with "timestamp", "input_length" and "hash_ids", as in Mooncake\'s traces.'
                ) from None
    if not requests:
        raise ConfigError(f"{os.fspath(path)} holds no request. Expected one JSON object a line.")
    return Trace(requests, block_tokens=block_tokens, name=Path(path).name)


def write_trace(path: str | os.PathLike[str], requests: Iterable[TraceRequest]) -> None:
    """Write a trace. ``ConfigError``: the file can't be written."""
    encoder = msgspec.json.Encoder()
    try:
        with open(path, "wb") as file:
            for request in requests:
                file.write(encoder.encode(request) + b"\n")
    except OSError as error:
        raise ConfigError(f"The trace {os.fspath(path)!r} can't be written: {error.strerror}. Name a file.") from error


def _check(request: TraceRequest, block_tokens: int, what: str) -> None:
    blocks = len(request.hash_ids)
    if len(set(request.hash_ids)) != blocks:
        raise ConfigError(f"A block comes twice in {what}. Expected each once: a block stands for its whole prefix.")
    if blocks > -(-request.input_length // block_tokens):
        raise ConfigError(
            f"{blocks} blocks for {request.input_length} tokens in {what}, which are less than {block_tokens} tokens "
            "each. Say how many tokens a block of this trace has."
        )


@dataclass(frozen=True, slots=True)
class TraceShape:
    """Shape of a generated trace. Lengths are means in tokens; the defaults are near Mooncake's conversation trace."""

    requests: int = 4000  # Number of requests.
    seed: int = 0  # Seed of all random choices: equal shapes give equal traces.
    block_tokens: int = BLOCK_TOKENS
    systems: int = 20  # Number of system prompts; each chat begins with one.
    system_tokens: int = 1200  # Length of a system prompt.
    documents: int = 400  # Number of documents.
    document_tokens: int = 12000  # Length of a document.
    document_share: float = 0.5  # Share of chats with a document, which follows the system prompt.
    popularity: float = 1.0
    """Exponent of Zipf's law for the choice of system prompt and document: 0 makes all equally popular, with 1 the
    second is chosen half as often as the first."""
    turns: float = 3.0  # Turns of a chat.
    question_tokens: int = 800  # Tokens that a user adds per turn.
    answer_tokens: int = 350  # Tokens generated per turn, which are part of the next turn's prompt.
    chats_per_s: float = 1.0  # Chats that begin per second.
    think_s: float = 60.0  # Time between two turns of a chat, in seconds.
    tool_share: float = 0.0
    """Share of turns, except the last of a chat, that are followed by a tool's result instead of a user's question."""
    tool_s: float = 10.0  # Median time of a tool call, in seconds.
    tool_spread: float = 0.3  # Standard deviation of the logarithm of that time; 0 makes it constant.
    hints: bool = False
    """Whether requests carry hints (``retain`` and ``demote``) based on a chat program's knowledge: a tool call, an
    expected answer of the user, or the end of the chat."""

    def __post_init__(self) -> None:
        for name in ("requests", "block_tokens", "systems", "system_tokens", "question_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)!r}. Expected 1 or more.")
        for name in ("documents", "document_tokens", "popularity", "answer_tokens", "think_s", "tool_s", "tool_spread"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} is {getattr(self, name)!r}. Expected 0 or more.")
        for name in ("document_share", "tool_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name} is {getattr(self, name)!r}. Expected a share, 0 to 1.")
        if self.turns < 1 or self.chats_per_s <= 0:
            raise ConfigError(
                f"{self.turns!r} turns, {self.chats_per_s!r} chats per second. Expected 1 or more, above 0."
            )


def generate_trace(shape: TraceShape | None = None) -> Trace:
    """Make a trace. The same shape gives the same trace on every machine."""
    shape = shape or TraceShape()
    return Trace(
        itertools.islice(_Maker(shape).requests(), shape.requests),
        block_tokens=shape.block_tokens,
        name=f"generated-{shape.requests}-{shape.seed}",
    )


@dataclass(slots=True)
class _Prompt:
    """A growing prompt: its full blocks have constant ids, the rest has a new id in each request."""

    tokens: int = 0
    full: list[int] = field(default_factory=list)

    def grow(self, tokens: int, block_tokens: int, ids: Iterator[int]) -> None:
        self.tokens += tokens
        self.full += itertools.islice(ids, self.tokens // block_tokens - len(self.full))

    def hash_ids(self, block_tokens: int, ids: Iterator[int]) -> tuple[int, ...]:
        return (*self.full, *([next(ids)] if self.tokens % block_tokens else []))


@dataclass(slots=True)
class _Chat:
    prompt: _Prompt
    turns_left: int
    shared_tokens: int


class _Maker:
    def __init__(self, shape: TraceShape) -> None:
        self._shape = shape
        self._random = random.Random(shape.seed)
        self._ids = itertools.count()
        self._systems = [self._started(_Prompt(), shape.system_tokens) for _ in range(shape.systems)]
        self._system_weights = _weights(shape.systems, shape.popularity)
        self._document_lengths = [self._length(shape.document_tokens) for _ in range(shape.documents)]
        self._document_weights = _weights(shape.documents, shape.popularity)
        self._about: dict[tuple[int, int], _Prompt] = {}
        """Documents after system prompts, by both. Ids depend on both, because a block's key covers its prefix."""

    def requests(self) -> Iterator[TraceRequest]:
        """Yield an endless sequence of requests in the order of their arrival."""
        shape = self._shape
        next_chat_s = 0.0
        numbers = itertools.count()
        waiting: list[tuple[float, int, _Chat]] = []
        while True:
            if not waiting or next_chat_s <= waiting[0][0]:
                heapq.heappush(waiting, (next_chat_s, next(numbers), self._new_chat()))
                next_chat_s += self._random.expovariate(shape.chats_per_s)
                continue
            now_s, number, chat = heapq.heappop(waiting)
            chat.turns_left -= 1
            is_tool = chat.turns_left > 0 and shape.tool_share > 0 and self._random.random() < shape.tool_share
            yield self._turn(chat, now_s, is_tool)
            if chat.turns_left:
                if is_tool:
                    pause_s = shape.tool_s * self._random.lognormvariate(0.0, shape.tool_spread)
                else:
                    pause_s = self._random.expovariate(1 / shape.think_s) if shape.think_s else 0.0
                heapq.heappush(waiting, (now_s + pause_s, number, chat))

    def _new_chat(self) -> _Chat:
        shape, random_ = self._shape, self._random
        (system,) = random_.choices(range(shape.systems), self._system_weights)
        start = self._systems[system]
        if shape.documents and random_.random() < shape.document_share:
            (document,) = random_.choices(range(shape.documents), self._document_weights)
            about = self._about.get((system, document))
            if about is None:
                about = _Prompt(start.tokens, list(start.full))
                about.grow(self._document_lengths[document], shape.block_tokens, self._ids)
                self._about[system, document] = about
            start = about
        # Geometric, so that the mean is the requested one and long chats are rare.
        turns = 1
        while random_.random() < 1 - 1 / shape.turns:
            turns += 1
        return _Chat(_Prompt(start.tokens, list(start.full)), turns, start.tokens)

    def _turn(self, chat: _Chat, now_s: float, is_tool: bool) -> TraceRequest:
        shape, prompt = self._shape, chat.prompt
        prompt.grow(self._length(shape.question_tokens), shape.block_tokens, self._ids)
        answer = self._length(shape.answer_tokens)
        request = TraceRequest(
            timestamp=round(now_s * 1000),
            input_length=prompt.tokens,
            output_length=answer,
            hash_ids=prompt.hash_ids(shape.block_tokens, self._ids),
            kvstore=self._hints(chat, is_tool) if shape.hints else {},
        )
        prompt.grow(answer, shape.block_tokens, self._ids)
        return request

    def _hints(self, chat: _Chat, is_tool: bool) -> dict[str, Any]:
        """Return the hints of a turn: the shared part of the prompt, and the expected time until the next turn."""
        shared = {"after": chat.shared_tokens}
        if not chat.turns_left:
            return {"demote": shared}
        mean_s = self._shape.tool_s if is_tool else self._shape.think_s
        return {"retain": [{"priority": 90}, {"priority": 50, "duration": 2 * max(1.0, mean_s), **shared}]}

    def _started(self, prompt: _Prompt, mean_tokens: int) -> _Prompt:
        prompt.grow(self._length(mean_tokens), self._shape.block_tokens, self._ids)
        return prompt

    def _length(self, mean_tokens: int) -> int:
        """Return an exponentially distributed length with this mean: at least 1, or 0 for a mean of 0."""
        return max(1, round(self._random.expovariate(1 / mean_tokens))) if mean_tokens else 0


def _weights(count: int, popularity: float) -> Sequence[float]:
    """Return weights by Zipf's law, for ``random.choices``."""
    return [rank**-popularity for rank in range(1, count + 1)]
