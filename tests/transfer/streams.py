"""Streams of a simulated device: work is done immediately, and waits are logged."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(eq=False)
class FakeStreams:
    """Makes streams and events, and logs their use."""

    log: list[tuple[str, Any, Any]] = field(default_factory=list)  # ``(operation, stream, other)`` in order.
    held: bool = False  # While true, no event completes.
    broken: bool = False  # While true, querying an event fails, as on a lost device.
    strided: bool = True  # Whether strided row copies are available.
    matrices: int = 0  # Number of strided copies.
    active: bool = False  # Whether the device is the current one.
    using: Any = None

    def __post_init__(self) -> None:
        self.compute = FakeStream(self, "compute")
        self._made = 0

    def current(self) -> FakeStream:
        """The stream that the engine computes on."""
        return self.compute

    def new_stream(self) -> FakeStream:
        """Return a stream with a number in its name."""
        self._made += 1
        return FakeStream(self, f"own{self._made}")

    def new_event(self) -> FakeEvent:
        """An event of these streams."""
        return FakeEvent(self)

    @contextmanager
    def use(self, stream: FakeStream) -> Iterator[None]:
        """Record the stream in use."""
        self.using = stream
        yield
        self.using = None

    @contextmanager
    def activate(self) -> Iterator[None]:
        """Record that the device is the current one."""
        self.active = True
        yield
        self.active = False

    def copy_rows(self, target: torch.Tensor, source: torch.Tensor, stream: FakeStream) -> None:
        """Copy immediately on the stream in use; the rows must meet CUDA's requirements."""
        assert self.strided
        assert stream is self.using
        for matrix in (target, source):
            assert matrix.stride(1) == 1
            assert matrix.stride(0) >= matrix.shape[1]
        self.matrices += 1
        target.copy_(source)


@dataclass(eq=False)
class FakeStream:
    """A stream that only has a name."""

    streams: FakeStreams
    name: str

    def wait_stream(self, other: FakeStream) -> None:
        """Log the wait."""
        self.streams.log.append(("wait_stream", self.name, other.name))

    def wait_event(self, event: FakeEvent) -> None:
        """Log the wait."""
        self.streams.log.append(("wait_event", self.name, event))


@dataclass(eq=False)
class FakeEvent:
    """An event that is complete unless events are held."""

    streams: FakeStreams
    recorded: bool = False

    def record(self, stream: FakeStream) -> None:
        """Log the record; only the stream in use may record."""
        assert stream is self.streams.using
        self.recorded = True
        self.streams.log.append(("record", stream.name, self))

    def query(self) -> bool:
        """Return whether the earlier work is complete."""
        if self.streams.broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return self.recorded and not self.streams.held

    def elapsed_time(self, end: FakeEvent) -> float:
        """Return milliseconds."""
        assert self.recorded
        assert end.recorded
        return 2.0
