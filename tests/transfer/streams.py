"""Streams of a device that is not there: work is done at once, and what waits for what is written down."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(eq=False)
class FakeStreams:
    """Makes streams and events, and logs what is done with them.

    Attributes:
        log: ``(what, stream, other)`` in order.
        held: While true, no event is over.
        broken: While true, asking an event fails, as on a lost device.
        strided: Whether copies of rows that lie apart can be had.
        matrices: How many were made.
        active: Whether the device is the current one.
    """

    log: list[tuple[str, Any, Any]] = field(default_factory=list)
    held: bool = False
    broken: bool = False
    strided: bool = True
    matrices: int = 0
    active: bool = False
    using: Any = None

    def __post_init__(self) -> None:
        self.compute = FakeStream(self, "compute")
        self._made = 0

    def current(self) -> FakeStream:
        """The stream that the engine computes on."""
        return self.compute

    def new_stream(self) -> FakeStream:
        """A stream with a number for a name."""
        self._made += 1
        return FakeStream(self, f"own{self._made}")

    def new_event(self) -> FakeEvent:
        """An event of these streams."""
        return FakeEvent(self)

    @contextmanager
    def use(self, stream: FakeStream) -> Iterator[None]:
        """Note which stream is used."""
        self.using = stream
        yield
        self.using = None

    @contextmanager
    def activate(self) -> Iterator[None]:
        """Note that the device is the current one."""
        self.active = True
        yield
        self.active = False

    def copy_rows(self, target: torch.Tensor, source: torch.Tensor, stream: FakeStream) -> None:
        """Copy at once, on the stream in use, if rows are as CUDA wants them."""
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
        """Write it down."""
        self.streams.log.append(("wait_stream", self.name, other.name))

    def wait_event(self, event: FakeEvent) -> None:
        """Write it down."""
        self.streams.log.append(("wait_event", self.name, event))


@dataclass(eq=False)
class FakeEvent:
    """An event that is over as soon as nobody holds it."""

    streams: FakeStreams
    recorded: bool = False

    def record(self, stream: FakeStream) -> None:
        """Write it down; only the stream in use may."""
        assert stream is self.streams.using
        self.recorded = True
        self.streams.log.append(("record", stream.name, self))

    def query(self) -> bool:
        """Whether what came before it is done."""
        if self.streams.broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return self.recorded and not self.streams.held

    def elapsed_time(self, end: FakeEvent) -> float:
        """Milliseconds."""
        assert self.recorded
        assert end.recorded
        return 2.0
