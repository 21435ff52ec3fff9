"""Commands and their answers: sent to the node that serves the key, redirected, and where it helps sent once more.

The one place that tries again: connections, redis-py and the layers above make one attempt each.
"""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from kvstore.backends.redis.connection import Request, Want
from kvstore.backends.redis.failures import ConnectionLostError, NodeDownError, RedisError, Remedy, read_error
from kvstore.backends.redis.node import Node
from kvstore.backends.redis.resp import ErrorReply, Filled, Reply, encode_command
from kvstore.backends.redis.topology import Topology
from kvstore.errors import ConfigError
from kvstore.runtime.limits import RetryBudget

__all__ = ["Answer", "Command", "Exchange", "SkippedError"]

_ROUNDS_MAX: Final = 5
"""Times that a command is sent at most: a slot on the move costs two redirects, a broken connection one more."""

_TOGETHER_MAX: Final = 1024
"""Commands without a value that travel as one request."""

_LATER_PAUSE_S: Final = 0.02
"""Pause before a command is sent again because its slot is on the move; a step of that takes milliseconds."""

_BUDGET_MAX: Final = 20.0
_BUDGET_SHARE: Final = 0.1
"""Tries beyond the first are at most a tenth of all commands, after an initial allowance: a failing server is not
burdened with twice the load."""

_REDIRECTS_MAX: Final = 64.0
"""The same for redirects, with an allowance for a batch of blocks whose slots have moved. One that led to an answer is
given back, so that only those which lead nowhere, or in circles, are bounded."""

_ASKING: Final = encode_command(b"ASKING")

_NODE_REFUSES: Final = frozenset({"LOADING", "MASTERDOWN", "CLUSTERDOWN", "NOPERM", "NOAUTH", "DENIED", "MISCONF"})
"""Errors that a node has for all commands alike, or for most of them."""

_PLAIN: Final = frozenset({int, str, Filled, type(None)})
"""Types of the answers to our commands that nothing is wrong with."""

Answer: TypeAlias = "Reply | RedisError"


class SkippedError(NodeDownError):
    """One node of several is down, and was not asked; the others go on."""


@dataclass(slots=True, eq=False)
class Command:
    """One command for one key.

    Attributes:
        key: As the server knows it; decides which node is asked.
        frames: The command as bytes, values as they are.
        want: Where the value in the answer goes, or the type of the answer.
        size_bytes: Length of the value, either way; 0 without one.
        reads: Whether a replica may answer it.
    """

    key: bytes
    frames: list[bytes | memoryview]
    want: Want
    size_bytes: int = 0
    reads: bool = False


@dataclass(slots=True, eq=False)
class _Attempt:
    """Where a command stands."""

    command: Command
    answer: Answer = None
    node: Node | None = None
    asking: bool = False
    master_only: bool = False
    redirects: int = 0


@dataclass(slots=True, eq=False)
class _Round:
    """How many requests of one round have not ended, and the future that ends with the last of them."""

    done: asyncio.Future[None]
    missing: int = 0

    def end_one(self, request: Request) -> None:
        self.missing -= 1
        if not self.missing and not self.done.done():
            self.done.set_result(None)


class Exchange:
    """Sends commands and collects their answers; see the module."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._budget = RetryBudget(_BUDGET_MAX, _BUDGET_SHARE)
        self._redirect_budget = RetryBudget(_REDIRECTS_MAX, _BUDGET_SHARE)
        self.retries = 0
        self.redirects = 0

    async def run(self, commands: Sequence[Command]) -> list[Answer]:
        """Return the answer to each command; a failure is an answer too.

        However it ends, also by cancellation, no buffer of a command is touched afterwards.
        """
        self._budget.earn(len(commands))
        self._redirect_budget.earn(len(commands))
        attempts = [_Attempt(command) for command in commands]
        pending = attempts
        for number in range(_ROUNDS_MAX):
            await self._send(pending)
            if number + 1 == _ROUNDS_MAX:
                break
            pending, pause_s = self._again(pending)
            if not pending:
                break
            if pause_s:
                await asyncio.sleep(pause_s * random.uniform(0.5, 1.5))
        return [_settled(attempt.answer) for attempt in attempts]

    async def _send(self, attempts: Sequence[_Attempt]) -> None:
        this = _Round(asyncio.get_running_loop().create_future())
        members: list[tuple[Request, list[_Attempt]]] = []
        by_node: list[tuple[Node, list[Request]]] = []
        for node, group in self._by_node(attempts).items():
            made = [(_request(together, this), together) for together in _grouped(group)]
            by_node.append((node, [request for request, _ in made]))
            members += made
        if not members:
            return
        this.missing = len(members)
        try:
            for node, requests in by_node:
                node.submit(requests)
            await this.done
        finally:
            if this.missing:
                for node, requests in by_node:
                    node.cancel([request for request in requests if not request.ended])
        for request, together in members:
            step = 2 if together[0].asking else 1
            for index, attempt in enumerate(together):
                attempt.answer = request.error or request.replies[index * step + step - 1]

    def _by_node(self, attempts: Sequence[_Attempt]) -> dict[Node, list[_Attempt]]:
        found: dict[Node, list[_Attempt]] = defaultdict(list)
        for attempt in attempts:
            command = attempt.command
            if attempt.node is None:
                reading = command.reads and not attempt.master_only
                attempt.node = self._topology.node_for(command.key, reading=reading)
            if attempt.node is None:
                attempt.answer = SkippedError("no node serves this slot at present")
            elif self._topology.has_many_nodes and not attempt.node.admits():
                attempt.answer = SkippedError(f"{attempt.node.endpoint} is down, or refuses")
            else:
                found[attempt.node].append(attempt)
        return found

    def _again(self, attempts: Sequence[_Attempt]) -> tuple[list[_Attempt], float]:
        """Return which attempts to make once more, and the pause before."""
        again: list[_Attempt] = []
        pause_s = 0.0
        for attempt in attempts:
            # What nearly all are: good answers of a master.
            if type(attempt.answer) in _PLAIN and attempt.node is not None and not attempt.node.is_replica:
                attempt.node.note_answer()
                if attempt.redirects:
                    self._redirect_budget.give_back(attempt.redirects)
                continue
            remedy = self._prepared(attempt)
            if remedy is Remedy.NOTHING:
                continue
            again.append(attempt)
            pause_s = max(pause_s, _LATER_PAUSE_S if remedy is Remedy.LATER else 0.0)
        return again, pause_s

    def _prepared(self, attempt: _Attempt) -> Remedy:
        """Decide whether an answer stands (NOTHING), and make the attempt ready for the next round if not."""
        answer, asked = attempt.answer, attempt.node
        attempt.asking = False
        from_replica = asked is not None and asked.is_replica
        # What a replica lacks, be it the value or, of EXISTS, the key.
        if from_replica and (answer is None or answer == 0):
            attempt.node, attempt.master_only = None, True
            return Remedy.ASK
        if isinstance(answer, ErrorReply) and asked is not None:
            return self._prepared_after_error(attempt, answer, asked)
        # A connection that broke may be all there is to it. A node that can't be had is not waited for: who takes its
        # place is found out in the background. Of a replica that fails in any way, the master knows.
        if not (isinstance(answer, ConnectionLostError) or (from_replica and isinstance(answer, RedisError))):
            return Remedy.NOTHING
        if not self._budget.spend():
            return Remedy.NOTHING
        attempt.node, attempt.master_only = None, attempt.master_only or from_replica
        self.retries += 1
        return Remedy.ASK

    def _prepared_after_error(self, attempt: _Attempt, answer: ErrorReply, asked: Node) -> Remedy:
        error = read_error(answer)
        if error.error.code in _NODE_REFUSES:
            asked.note_refusal()
        if error.remedy in (Remedy.MOVED, Remedy.ASK):
            if not self._redirect_budget.spend():
                attempt.answer = SkippedError("more redirects than a tenth of all commands")
                return Remedy.NOTHING
            attempt.redirects += 1
            if asked.is_replica:
                attempt.node, attempt.master_only = None, True
                return Remedy.ASK
            for_good = error.remedy is Remedy.MOVED
            try:
                node = self._topology.redirect(attempt.command.key, error.host, error.port, asked, for_good=for_good)
            except (ConfigError, NodeDownError) as refused:
                attempt.answer = NodeDownError(str(refused).removeprefix("[redis] "))
                return Remedy.NOTHING
            if node is None:
                return Remedy.NOTHING
            attempt.node, attempt.asking = node, not for_good
            self.redirects += 1
            return error.remedy
        if error.remedy is Remedy.REFRESH:
            self._topology.note_trouble()
            if not asked.is_replica:
                return Remedy.NOTHING
        elif error.remedy is Remedy.NOTHING:
            return Remedy.NOTHING
        if not self._budget.spend():
            return Remedy.NOTHING
        attempt.node, attempt.master_only = None, True
        self.retries += 1
        return error.remedy


def _grouped(attempts: Sequence[_Attempt]) -> list[list[_Attempt]]:
    """Return the attempts of one node as they travel: values each for itself, the rest together."""
    if len(attempts) == 1:
        return [[*attempts]]
    groups: list[list[_Attempt]] = []
    short: list[_Attempt] = []
    for attempt in attempts:
        if attempt.command.size_bytes or attempt.asking:
            groups.append([attempt])
        else:
            short.append(attempt)
    return [short[i : i + _TOGETHER_MAX] for i in range(0, len(short), _TOGETHER_MAX)] + groups


def _request(attempts: Sequence[_Attempt], this: _Round) -> Request:
    if len(attempts) > 1:
        # One piece, as all of them are short.
        frames: list[bytes | memoryview] = [b"".join([frame for a in attempts for frame in a.command.frames])]
        return Request(frames, [attempt.command.want for attempt in attempts], 0, this.end_one)
    command = attempts[0].command
    wants: list[Want] = [command.want]
    frames = list(command.frames)
    if attempts[0].asking:
        frames, wants = [_ASKING, *frames], [str, command.want]
    return Request(frames, wants, command.size_bytes, this.end_one)


def _settled(answer: Answer) -> Answer:
    return read_error(answer).error if isinstance(answer, ErrorReply) else answer
