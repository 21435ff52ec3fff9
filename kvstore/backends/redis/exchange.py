"""Commands and their answers: sent to the node that serves the key, redirected, and where it helps sent once more.

The one place that tries again: connections, redis-py and the layers above make one attempt each.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from typing import Final

from kvstore.backends.redis.connection import Answer, Pending, Request, Want
from kvstore.backends.redis.failures import (
    ConnectionLostError,
    NodeDownError,
    RedisError,
    ServerRefusedError,
    SkippedError,
)
from kvstore.backends.redis.node import Node
from kvstore.backends.redis.resp import Filled
from kvstore.backends.redis.topology import Topology
from kvstore.errors import ConfigError
from kvstore.runtime.limits import RetryBudget

__all__ = ["Command", "Exchange"]

_ROUNDS_MAX: Final = 5
"""Times that a command is sent at most: a slot on the move costs two redirects, a broken connection one more."""

_LATER_PAUSE_S: Final = 0.02
"""Pause before a command is sent again because its slot is on the move; a step of that takes milliseconds."""

_BUDGET_MAX: Final = 20.0
_BUDGET_SHARE: Final = 0.1
"""Tries beyond the first are at most a tenth of all commands, after an initial allowance: a failing server is not
burdened with twice the load."""

_REDIRECTS_MAX: Final = 64.0
"""The same for redirects, with an allowance for a batch of blocks whose slots have moved. One that led to an answer is
given back, so that only those which lead nowhere, or in circles, are bounded."""

_NODE_REFUSES: Final = frozenset({"LOADING", "MASTERDOWN", "CLUSTERDOWN", "NOPERM", "NOAUTH", "DENIED", "MISCONF"})
"""Errors that a node has for all commands alike, or for most of them."""

_STALE: Final = frozenset({"CLUSTERDOWN", "READONLY", "MASTERDOWN", "LOADING"})
"""Errors of a node that is not, or no longer, the one to ask: the map of nodes is asked for, for commands to come."""

_PLAIN: Final = frozenset({int, str, Filled, type(None)})
"""Types of good answers to the commands of the backend."""


class Command(Request):
    """A request about one key as the server knows it, which decides which node is asked.

    Attributes:
        reads: Whether a replica may answer it.
        node: The node to ask, or that was asked; None: the one that serves the key.
        redirects: How many were followed.
    """

    node: Node | None = None
    redirects: int = 0

    def __init__(
        self, key: bytes, frames: list[bytes | memoryview], want: Want, size_bytes: int = 0, *, reads: bool = False
    ) -> None:
        super().__init__(frames, want, size_bytes)
        self.key = key
        self.reads = reads


class Exchange:
    """Sends commands and collects their answers; see the module."""

    def __init__(self, topology: Topology, counters: Counter[str]) -> None:
        self._topology = topology
        self._counters = counters
        self._budget = RetryBudget(_BUDGET_MAX, _BUDGET_SHARE)
        self._redirect_budget = RetryBudget(_REDIRECTS_MAX, _BUDGET_SHARE)

    async def run(self, commands: Sequence[Command]) -> list[Answer]:
        """Return the answer to each command; a failure is an answer too.

        However it ends, also by cancellation, no buffer of a command is touched afterwards.
        """
        self._budget.earn(len(commands))
        self._redirect_budget.earn(len(commands))
        unanswered = commands
        for left in reversed(range(_ROUNDS_MAX)):
            await self._send(unanswered)
            unanswered, pause_s = self._again(unanswered) if left else ((), 0.0)
            if not unanswered:
                break
            if pause_s:
                await asyncio.sleep(pause_s * random.uniform(0.5, 1.5))
        return [command.answer for command in commands]

    async def _send(self, commands: Sequence[Command]) -> None:
        by_node: dict[Node, list[Command]] = {}
        for command in commands:
            node = command.node = command.node or self._topology.node_for(command.key, reading=command.reads)
            if node is None:
                command.answer = SkippedError("no node serves this slot at present")
            elif self._topology.has_many_nodes and not node.admits():
                command.answer = SkippedError(f"{node.endpoint} is down, or refuses")
            else:
                by_node.setdefault(node, []).append(command)
        pending = Pending([command for group in by_node.values() for command in group])
        if not pending.missing:
            return
        try:
            for node, group in by_node.items():
                node.submit(group)
            await pending.done
        finally:
            if pending.missing:
                for node, group in by_node.items():
                    node.cancel(group)

    def _again(self, commands: Sequence[Command]) -> tuple[list[Command], float]:
        """Return which commands to send once more, and the pause before."""
        again: list[Command] = []
        pause_s = 0.0
        for command in commands:
            answer, asked = command.answer, command.node
            # What nearly all are: good answers of a master.
            if type(answer) in _PLAIN and asked is not None and not asked.is_replica:
                asked.note_answer()
                if command.redirects:
                    self._redirect_budget.give_back(command.redirects)
            elif self._goes_again(command, answer, asked):
                again.append(command)
                if isinstance(answer, ServerRefusedError) and answer.code == "TRYAGAIN":
                    pause_s = _LATER_PAUSE_S
        return again, pause_s

    def _goes_again(self, command: Command, answer: Answer, asked: Node | None) -> bool:
        """Decide whether a command is sent once more, and to which node."""
        command.asking = False
        from_replica = asked is not None and asked.is_replica
        if isinstance(answer, ServerRefusedError) and asked is not None:
            if answer.code in _NODE_REFUSES:
                asked.note_refusal()
            if answer.moved_to is not None:
                return self._is_redirected(command, answer, asked)
            if answer.code in _STALE:
                self._topology.note_trouble()
            may_help = answer.code == "TRYAGAIN" or (answer.code in _STALE and from_replica)
        elif isinstance(answer, RedisError):
            # A connection that broke may be all there is to it. A node that can't be had is not waited for: its
            # successor is looked for in the background. If a replica fails in any way, the master is asked.
            may_help = from_replica or isinstance(answer, ConnectionLostError)
        elif from_replica and not answer:
            # What a replica lacks, be it the value or, of EXISTS, the key.
            command.node, command.reads = None, False
            return True
        else:
            return False
        if not may_help or not self._budget.spend():
            return False
        command.node, command.reads = None, command.reads and not from_replica
        self._counters["retries"] += 1
        return True

    def _is_redirected(self, command: Command, moved: ServerRefusedError, asked: Node) -> bool:
        """Follow a redirect, if it leads anywhere."""
        if not self._redirect_budget.spend():
            command.answer = SkippedError("more redirects than a tenth of all commands")
            return False
        command.redirects += 1
        if asked.is_replica:
            command.node, command.reads = None, False
            return True
        try:
            node = self._topology.redirected(command.key, moved, asked)
        except (ConfigError, NodeDownError) as refused:
            command.answer = NodeDownError(str(refused).removeprefix("[redis] "))
            return False
        if node is None:
            return False
        command.node, command.asking = node, moved.code == "ASK"
        self._counters["redirects"] += 1
        return True
