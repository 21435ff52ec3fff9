"""The parts of a manager, for tests that look at what it keeps or direct one of its parts."""

from __future__ import annotations

from kvstore.tiering import TieringManager
from kvstore.tiering.gate import Gate
from kvstore.tiering.hedges import Hedges


class Parts:
    """The parts of a manager by name; they last as long as the manager."""

    def __init__(self, manager: TieringManager) -> None:
        self.requests, self.jobs, self.links, self.log = manager._requests, manager._jobs, manager._links, manager._log
        self.promotions, self.cascades = manager._promotions, manager._cascades
        self.retention = manager._retention
        self.poll = manager._poll
        self._gate, self._hedges = manager._gate, manager._hedges

    @property
    def gate(self) -> Gate:
        """The gate, of a manager that has one."""
        assert self._gate is not None
        return self._gate

    @property
    def hedges(self) -> Hedges:
        """The hedges, of a manager that has them."""
        assert self._hedges is not None
        return self._hedges

    @property
    def has_hedges(self) -> bool:
        """Whether the manager hedges."""
        return self._hedges is not None
