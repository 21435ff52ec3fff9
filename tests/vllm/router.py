"""A router that learns the blocks of engines from their events."""

from __future__ import annotations

from tests.vllm.harness import Driver


class Router:
    """Blocks by engine and owner, according to events."""

    def __init__(self) -> None:
        self.engines: dict[str, dict[str, set[bytes]]] = {}

    def follow(self, name: str, driver: Driver) -> dict[str, set[bytes]]:
        """Process all events of an engine; return its blocks by owner."""
        owners = self.engines.setdefault(name, {})
        driver.settle()
        for event in driver.events:
            blocks = owners.setdefault(event.ownership or "cpu", set())
            blocks.difference_update(event.keys) if event.removed else blocks.update(event.keys)
        driver.events.clear()
        return owners
