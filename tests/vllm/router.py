"""A router that learns the blocks of engines from their events."""

from __future__ import annotations

from tests.vllm.harness import Driver


class Router:
    """Blocks by engine and medium, according to events. Like llm-d's, it counts the reports of a block."""

    def __init__(self) -> None:
        self.engines: dict[str, dict[str, set[bytes]]] = {}

    def follow(self, name: str, driver: Driver) -> dict[str, set[bytes]]:
        """Process all events of an engine; return its blocks by medium."""
        media = self.engines.setdefault(name, {})
        driver.settle()
        for event in driver.events:
            blocks, keys = media.setdefault(event.medium.name, set()), set(event.keys)
            if event.removed:
                assert keys <= blocks, "removed without having been stored"
                blocks -= keys
            else:
                assert not keys & blocks, "stored twice"
                blocks |= keys
        driver.events.clear()
        return media
