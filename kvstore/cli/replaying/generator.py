"""Generated traces: chats of several turns that begin with system prompts and documents of different popularity."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvstore.cli.replaying.traces import BLOCK_TOKENS, Trace, TraceError, TraceRequest


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
                raise TraceError(f"{name} is {getattr(self, name)!r}. Expected 1 or more.")
        for name in ("documents", "document_tokens", "popularity", "answer_tokens", "think_s", "tool_s", "tool_spread"):
            if getattr(self, name) < 0:
                raise TraceError(f"{name} is {getattr(self, name)!r}. Expected 0 or more.")
        for name in ("document_share", "tool_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise TraceError(f"{name} is {getattr(self, name)!r}. Expected a share, 0 to 1.")
        if self.turns < 1 or self.chats_per_s <= 0:
            raise TraceError(
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
