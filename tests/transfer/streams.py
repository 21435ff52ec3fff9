"""Streams of a simulated device: work is done immediately, and waits are logged."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(eq=False)
class FakeCuda:
    """Stands for ``torch.cuda`` and for the CUDA runtime: makes streams and events, and logs their use."""

    log: list[tuple[str, Any, Any]] = field(default_factory=list)  # ``(operation, stream, other)`` in order.
    held: bool = False  # While true, no event completes.
    broken: bool = False  # While true, querying an event fails, as on a lost device.
    matrices: int = 0  # Number of strided copies.
    using: Any = None

    def __post_init__(self) -> None:
        self.compute = FakeStream(self, "compute", 0)
        self._made = 0

    def init(self) -> None:
        """Do nothing."""

    def current_stream(self, device: torch.device) -> FakeStream:
        """The stream that the engine computes on."""
        return self.compute

    def Stream(self, device: torch.device) -> FakeStream:
        """Return a stream with a number in its name."""
        self._made += 1
        return FakeStream(self, f"own{self._made}", self._made)

    def Event(self, *, enable_timing: bool) -> FakeEvent:
        """An event of these streams."""
        assert enable_timing
        return FakeEvent(self)

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        """Record the stream in use."""
        self.using = stream
        yield
        self.using = None

    def device(self, device: torch.device) -> AbstractContextManager[None]:
        """Return a context without effect."""
        return nullcontext()

    def cudaMemcpy2DAsync(
        self, to: int, to_pitch: int, src: int, src_pitch: int, width: int, rows: int, kind: int, stream: int
    ) -> int:
        """Copy immediately on the stream in use; code 1 if an argument is wrong."""
        if min(to_pitch, src_pitch) < width or kind != 4 or stream != self.using.cuda_stream:
            return 1
        self.matrices += 1
        for row in range(rows):
            ctypes.memmove(to + row * to_pitch, src + row * src_pitch, width)
        return 0

    def cudaGetLastError(self) -> int:
        """Return no error."""
        return 0


@dataclass(eq=False)
class FakeStream:
    """A stream that only has a name."""

    streams: FakeCuda
    name: str
    cuda_stream: int

    def wait_stream(self, other: FakeStream) -> None:
        """Log the wait."""
        self.streams.log.append(("wait_stream", self.name, other.name))

    def wait_event(self, event: FakeEvent) -> None:
        """Log the wait."""
        self.streams.log.append(("wait_event", self.name, event))


@dataclass(eq=False)
class FakeEvent:
    """An event that is complete unless events are held."""

    streams: FakeCuda
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
