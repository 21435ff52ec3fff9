"""Commands and their answers: routing to the node of the key, redirects and retries.

Only this module retries: connections and the layers above make one attempt each.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from typing import Final

from kvstore.backends.redis.connection import Answer, Pending, Request, Want, give_up
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

_ROUNDS_MAX: Final = 5
"""Maximum sends of a command: a migrating slot costs two redirects, a broken connection one more."""

_BATCH_MAX: Final = 16384
"""Maximum commands sent together: a node refuses more than 65,536 at once, of all calls."""

_BUDGET_MAX: Final = 20.0
_BUDGET_SHARE: Final = 0.1
"""Retries are at most a tenth of all commands after an initial allowance, so they do not double a failing server's
load."""

_REDIRECTS_MAX: Final = 64.0
"""The same for redirects, with an allowance for a batch of blocks with moved slots. Successful redirects are returned
to the budget, so it bounds only useless and circular ones."""

_NODE_REFUSES: Final = frozenset({"LOADING", "MASTERDOWN", "CLUSTERDOWN", "NOPERM", "NOAUTH", "DENIED", "MISCONF"})
"""Errors that a node returns for all or most commands."""

_STALE: Final = frozenset({"CLUSTERDOWN", "READONLY", "MASTERDOWN", "LOADING"})
"""Errors of a node that may no longer serve the key: the map of nodes is refreshed for later commands."""

_PLAIN: Final = frozenset({int, str, Filled, type(None)})
"""Reply types meaning success."""


class Command(Request):
    """A request about one key, which determines the node."""

    node: Node | None = None  # Node of the last or next send; None for the node that serves the key.
    redirects: int = 0  # Number of redirects followed.

    def __init__(
        self, key: bytes, frames: list[bytes | memoryview], want: Want, size_bytes: int = 0, *, reads: bool = False
    ) -> None:
        super().__init__(frames, want, size_bytes)
        self.key = key
        self.reads = reads  # Whether a replica may answer it.


class Exchange:
    """Sends commands and collects their answers; see the module's docstring."""

    def __init__(self, topology: Topology, counters: Counter[str]) -> None:
        self._topology = topology
        self._counters = counters
        self._budget = RetryBudget(_BUDGET_MAX, _BUDGET_SHARE)
        self._redirect_budget = RetryBudget(_REDIRECTS_MAX, _BUDGET_SHARE)

    async def run(self, commands: Sequence[Command]) -> list[Answer]:
        """Return the answer to each command; failures are returned as answers, too.

        No buffer of a command is touched after this call has ended, even by cancellation.
        """
        self._budget.earn(len(commands))
        self._redirect_budget.earn(len(commands))
        for start in range(0, len(commands), _BATCH_MAX):
            await self._run_batch(commands[start : start + _BATCH_MAX])
        return [command.answer for command in commands]

    async def _run_batch(self, commands: Sequence[Command]) -> None:
        unanswered = commands
        for left in reversed(range(_ROUNDS_MAX)):
            await self._send(unanswered)
            unanswered, pause_s = self._again(unanswered) if left else ((), 0.0)
            if not unanswered:
                break
            if pause_s:
                await asyncio.sleep(pause_s * random.uniform(0.5, 1.5))

    async def _send(self, commands: Sequence[Command]) -> None:
        by_node: dict[Node, list[Command]] = {}
        for command in commands:
            node = command.node = self._node_of(command)
            if node is None:
                command.answer = SkippedError("no node serves this slot at present")
            elif self._topology.has_many_nodes and not node.is_replica and not node.admits():
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
                give_up(commands)

    def _node_of(self, command: Command) -> Node | None:
        """Return the node for a command; the reads of a replica that is down, or refuses, are for the master.

        They are no retries, whose budget would turn most of them into misses.
        """
        node = command.node or self._topology.node_for(command.key, reading=command.reads)
        if node is not None and node.is_replica and not node.admits():
            node = self._topology.node_for(command.key, reading=False)
        return node

    def _again(self, commands: Sequence[Command]) -> tuple[list[Command], float]:
        """Return the commands to send again, and the pause before that in seconds."""
        again: list[Command] = []
        pause_s = 0.0
        for command in commands:
            answer, asked = command.answer, command.node
            if asked is not None and type(answer) in _PLAIN:
                asked.note_answer()
                if not asked.is_replica:
                    if command.redirects:
                        self._redirect_budget.give_back(command.redirects)
                    continue
            if self._goes_again(command, answer, asked):
                again.append(command)
                if isinstance(answer, ServerRefusedError) and answer.code == "TRYAGAIN":
                    pause_s = self._topology.limits.later_pause_s
        return again, pause_s

    def _goes_again(self, command: Command, answer: Answer, asked: Node | None) -> bool:
        """Decide whether a command is sent again, and to which node."""
        command.asking = False
        from_replica = asked is not None and asked.is_replica
        if isinstance(answer, ServerRefusedError) and asked is not None:
            if answer.code in _NODE_REFUSES or (from_replica and answer.moved_to is None):
                asked.note_refusal()
            if answer.moved_to is not None:
                return self._is_redirected(command, answer, asked)
            if answer.code in _STALE:
                self._topology.note_trouble()
            may_help = from_replica or answer.code == "TRYAGAIN"
        elif isinstance(answer, RedisError):
            # After a broken connection, a new one may succeed. Commands do not wait for an unreachable node, whose
            # successor is searched in the background. After any failure of a replica, the master is tried.
            may_help = from_replica or isinstance(answer, ConnectionLostError)
        elif from_replica and not answer:
            # A miss on a replica, which may lag behind its master.
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
        """Follow a redirect; return whether the command is sent again."""
        if not self._redirect_budget.spend():
            command.answer = SkippedError("more redirects than a tenth of all commands")
            return False
        command.redirects += 1
        if asked.is_replica:
            # It may be the replica of another master by now.
            self._topology.note_trouble()
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
