"""Pinning: all of a region or nothing, in pieces that end at a slot boundary."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest

from kvstore.primary import PAGE_BYTES, Region
from kvstore.transfer.pinning import PinnedRegion


@dataclass
class FakeRuntime:
    """Records registered ranges; refuses from the ``fail_at``-th on."""

    fail_at: int = 1000
    calls: int = 0
    last_error: int = 0
    active: bool = False
    devices: list[bool] = field(default_factory=list)
    ranges: dict[int, int] = field(default_factory=dict)
    unregister_code: int = 0

    def cudaHostRegister(self, address: int, size_bytes: int, flags: int, /) -> int:
        """Register, unless the range shares a page with another, which CUDA refuses."""
        self.calls += 1
        self.devices.append(self.active)
        assert flags == 1
        first, last = address // PAGE_BYTES, (address + size_bytes - 1) // PAGE_BYTES
        for other, size in self.ranges.items():
            assert last < other // PAGE_BYTES or first > (other + size - 1) // PAGE_BYTES
        if self.calls >= self.fail_at:
            self.last_error = 2
            return 2
        self.ranges[address] = size_bytes
        return 0

    def cudaHostUnregister(self, address: int, /) -> int:
        """Remove a range, which must exist."""
        del self.ranges[address]
        self.devices.append(self.active)
        self.last_error = self.unregister_code
        return self.unregister_code

    def cudaGetLastError(self) -> int:
        """Clear the error."""
        code, self.last_error = self.last_error, 0
        return code

    @contextmanager
    def activate(self) -> Iterator[None]:
        """Make the device of the tensors the current one."""
        self.active = True
        yield
        self.active = False


@pytest.mark.parametrize("piece_pages", [1, 3, 4, 100])
def test_pieces_end_with_a_slot(piece_pages: int) -> None:
    """The pieces cover the region exactly, each ends at a slot boundary, and close releases all of them."""
    with Region.create(7, 2 * PAGE_BYTES) as region:
        runtime = FakeRuntime()
        pinned = PinnedRegion(region, runtime=runtime, piece_bytes_max=piece_pages * PAGE_BYTES)
        assert pinned.pinned
        assert pinned.reason == ""
        at = region.address
        for address, size in runtime.ranges.items():
            assert address == at
            assert (address - region.address) % region.slot_bytes == 0
            at += size
        assert at == region.address + region.size_bytes
        pinned.close()
        pinned.close()
        assert runtime.ranges == {}
        assert not pinned.pinned


def test_slots_that_share_pages_are_pinned_together() -> None:
    """Slots of half a page in foreign memory: a piece ends at a common boundary of slots and pages."""
    with Region.create(4, PAGE_BYTES) as memory, Region.wrap(memory.view(), PAGE_BYTES // 2) as region:
        runtime = FakeRuntime()
        pinned = PinnedRegion(region, runtime=runtime, piece_bytes_max=1)
        assert list(runtime.ranges.values()) == [PAGE_BYTES] * 4
        pinned.close()


@pytest.mark.parametrize("fail_at", [1, 3])
def test_refused_piece_unpins_all_others(fail_at: int, caplog: pytest.LogCaptureFixture) -> None:
    """If a piece is refused nothing stays pinned, and one warning gives the code and advice."""
    with Region.create(4, PAGE_BYTES) as region:
        runtime = FakeRuntime(fail_at=fail_at)
        pinned = PinnedRegion(region, runtime=runtime, piece_bytes_max=PAGE_BYTES)
        assert not pinned.pinned
        assert runtime.ranges == {}
        assert f"code 2 at {(fail_at - 1) * PAGE_BYTES}" in pinned.reason
        assert "ulimit -l" in caplog.text
        assert len(caplog.records) == 1
        assert runtime.last_error == 0, "torch would raise it at the next kernel"
        pinned.close()


def test_registration_is_that_of_the_tensors_device() -> None:
    """Pinning and unpinning happen while the copying device is current."""
    with Region.create(4, PAGE_BYTES) as region:
        runtime = FakeRuntime()
        pinned = PinnedRegion(region, runtime=runtime, activate=runtime.activate, piece_bytes_max=PAGE_BYTES)
        pinned.close()
        assert runtime.devices == [True] * 8
        assert not runtime.active


def test_memory_off_the_page_is_not_pinned() -> None:
    """Memory that doesn't begin at a page boundary is not pinned, because its pages are shared."""
    with Region.create(2, PAGE_BYTES) as memory, Region.wrap(memory.view()[8 : 8 + PAGE_BYTES], 64) as region:
        runtime = FakeRuntime()
        pinned = PinnedRegion(region, runtime=runtime)
        assert "does not start on a page" in pinned.reason
        assert runtime.calls == 0
        pinned.close()


def test_a_failure_to_unpin_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    """If CUDA refuses to unregister, close continues with a warning."""
    with Region.create(2, PAGE_BYTES) as region:
        runtime = FakeRuntime(unregister_code=4)
        pinned = PinnedRegion(region, runtime=runtime)
        pinned.close()
        assert runtime.last_error == 0
        assert "code 4" in caplog.text
        assert not pinned.pinned
