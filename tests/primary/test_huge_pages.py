"""Huge pages are used if the kernel provides them; bytes and error cleanup stay the same."""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import os
import random
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from kvstore.errors import ConfigError
from kvstore.primary import PAGE_BYTES, Region, huge_pages
from kvstore.primary import region as region_module
from kvstore.primary.huge_pages import HUGE_PAGE_BYTES, advise_huge_pages, map_for_huge_pages, take_huge_pages

COLLAPSE = 25
ODD_BYTES = 3 * HUGE_PAGE_BYTES + 5 * PAGE_BYTES
"""Three huge pages and a remainder."""


class Interrupted(Exception):
    """Raised by a signal handler in the middle of an operation."""


class ScriptedMapping(mmap.mmap):
    """A real mapping that runs a script before one kind of advice."""

    script: Callable[[int], None]
    advice = COLLAPSE
    made: ClassVar[list[ScriptedMapping]]

    def __new__(cls, *args: Any, **options: Any) -> ScriptedMapping:
        """Create the mapping, and record it."""
        mapping = super().__new__(cls, *args, **options)
        cls.made.append(mapping)
        return mapping

    def madvise(self, advice: int, start: int = 0, length: int | None = None) -> None:
        """Run the script, which may raise the error of a kernel, and then call the kernel."""
        if advice == type(self).advice:
            type(self).script(start)
        super().madvise(advice, start, len(self) - start if length is None else length)


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> type[ScriptedMapping]:
    """Replace a region's mappings by mappings that run ``script``; steps are one huge page long."""

    class Mapping(ScriptedMapping):
        made: ClassVar[list[ScriptedMapping]] = []

    monkeypatch.setattr(region_module.mmap, "mmap", Mapping)
    monkeypatch.setattr(huge_pages, "_STEP_BYTES", HUGE_PAGE_BYTES)
    return Mapping


@pytest.fixture
def reserved(monkeypatch: pytest.MonkeyPatch) -> list[mmap.mmap]:
    """Collect the mappings created as placeholders."""
    real: Callable[..., mmap.mmap] = huge_pages._between
    made: list[mmap.mmap] = []

    def between(*args: int) -> mmap.mmap:
        made.append(real(*args))
        return made[-1]

    monkeypatch.setattr(huge_pages, "_between", between)
    return made


@contextlib.contextmanager
def memory_file(size: int) -> Iterator[tuple[int, mmap.mmap]]:
    """Yield an empty file in memory, and a mapping of it."""
    fd = os.memfd_create("kvstore-huge")
    try:
        os.ftruncate(fd, size)
        with map_for_huge_pages(lambda: mmap.mmap(fd, size)) as mapping:
            yield fd, mapping
    finally:
        os.close(fd)


def address_of(mapping: mmap.mmap | memoryview) -> int:
    """Return the address of a mapping."""
    return int(np.frombuffer(mapping, np.uint8).ctypes.data)


def huge_bytes_of(memory: mmap.mmap | memoryview) -> int:
    """Return the number of a mapping's bytes that the kernel has mapped in huge pages."""
    address = address_of(memory)
    # An existing huge page may be mapped only at the next access (madvise(2), MADV_COLLAPSE).
    assert len(bytes(np.frombuffer(memory, np.uint8)[::PAGE_BYTES])) == -(-len(memory) // PAGE_BYTES)
    smaps = Path("/proc/self/smaps").read_text()
    entry = re.search(rf"^0*{address:x}-.*?^VmFlags:", smaps, re.MULTILINE | re.DOTALL)
    assert entry is not None, f"nothing is mapped at {address:x}"
    lines = re.findall(r"^(?:ShmemPmdMapped|FilePmdMapped): +(\d+) kB", entry[0], re.MULTILINE)
    return sum(int(n) << 10 for n in lines)


def taken_bytes(fd: int) -> int:
    """Return the number of bytes allocated for a file in memory."""
    return os.fstat(fd).st_blocks * 512


def traces_of(name: str) -> list[str]:
    """Return this process's open descriptors and mappings with a name."""
    fds = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            fds.append(os.readlink(f"/proc/self/fd/{fd}"))
    maps = Path("/proc/self/maps").read_text().splitlines()
    return [text for text in (*fds, *maps) if name in text]


def check_whole(region: Region) -> None:
    """Check that all memory of a new region is allocated, zero, and writable to its last byte."""
    assert taken_bytes(region.fd) >= region.size_bytes
    rows = region.rows()
    assert not rows.any()
    rows[:] = 5
    assert (rows == 5).all()
    del rows


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 1.0])
def test_what_is_in_memory_stays(share: float) -> None:
    """Full, sparse or empty memory keeps its bytes after huge pages are taken, in every mapping of it."""
    seed = random.randrange(2**32)
    rng = random.Random(seed)
    with memory_file(ODD_BYTES) as (fd, mapping), mmap.mmap(fd, ODD_BYTES) as other:
        for page in range(ODD_BYTES // PAGE_BYTES):
            if rng.random() < share:
                mapping[page * PAGE_BYTES : (page + 1) * PAGE_BYTES] = rng.randbytes(PAGE_BYTES)
        before = mapping[:]
        take_huge_pages(mapping, fd)
        assert mapping[:] == before, f"seed {seed}"
        assert other[:] == before, f"seed {seed}"
        other[ODD_BYTES - 1] = mapping[0] = 7
        assert (mapping[ODD_BYTES - 1], other[0]) == (7, 7)
        assert take_huge_pages(mapping, fd) <= ODD_BYTES
        assert mapping[1:-1] == before[1:-1], f"seed {seed}"


def test_what_is_reported_is_there() -> None:
    """The kernel reports at least as many bytes in huge pages as we do."""
    with memory_file(ODD_BYTES) as (fd, mapping):
        taken = take_huge_pages(mapping, fd)
        assert taken % HUGE_PAGE_BYTES == 0
        assert taken <= huge_bytes_of(mapping) <= 3 * HUGE_PAGE_BYTES


def test_a_populated_region_says_what_it_took(caplog: pytest.LogCaptureFixture) -> None:
    """The log gives the region's length and no more huge pages than the kernel reports; attaching changes nothing."""
    with (
        caplog.at_level(logging.INFO, "kvstore.primary.region"),
        Region.create(ODD_BYTES // PAGE_BYTES, PAGE_BYTES, populate=True) as region,
        Region.attach(region.fd, PAGE_BYTES) as other,
    ):
        found = re.search(rf"{ODD_BYTES} bytes; huge pages were taken for (\d+) of them", caplog.text)
        assert found is not None, caplog.text
        assert int(found[1]) <= huge_bytes_of(region.view())
        other.view()[-1] = 4
        assert region.view()[-1] == 4
        assert int(found[1]) <= huge_bytes_of(region.view())
        region.view()[-1] = 0
        check_whole(region)


@pytest.mark.parametrize("pages", [1, 511, 512, 513, 1025])
def test_any_length_is_populated(pages: int) -> None:
    """A region shorter than a huge page, of exactly one, or with a remainder is fully populated."""
    with Region.create(pages, PAGE_BYTES, populate=True) as region:
        check_whole(region)


@pytest.mark.parametrize(
    ("code", "goes_on"),
    [(errno.EINVAL, False), (errno.ENOMEM, False), (errno.EBUSY, False), (errno.EPERM, False), (errno.EAGAIN, True)],
)
@pytest.mark.parametrize("step", [0, 1, 2])
def test_a_decline_leaves_small_pages(
    scripted: type[ScriptedMapping], caplog: pytest.LogCaptureFixture, code: int, goes_on: bool, step: int
) -> None:
    """Whatever error the kernel returns at any step, the region is complete; only EAGAIN does not end the attempts."""
    asked: list[int] = []

    def decline(start: int) -> None:
        asked.append(start // HUGE_PAGE_BYTES)
        if asked[-1] == step:
            raise OSError(code, os.strerror(code))

    scripted.script = decline
    with (
        caplog.at_level(logging.INFO, "kvstore.primary.region"),
        Region.create(ODD_BYTES // PAGE_BYTES, PAGE_BYTES, populate=True) as region,
    ):
        found = re.search(r"taken for (\d+) of them", caplog.text)
        assert found is not None, caplog.text
        most = 2 if goes_on else step
        assert int(found[1]) <= min(most * HUGE_PAGE_BYTES, huge_bytes_of(region.view()))
        assert asked == sorted(set(asked))
        if not goes_on:
            assert max(asked) <= step
        check_whole(region)


def test_each_huge_page_has_something_in_it_when_asked_for(scripted: type[ScriptedMapping]) -> None:
    """Each huge page has some memory before the collapse call, because the kernel does not collapse empty ranges."""
    there: list[int] = []
    fds: list[int] = []

    def look(start: int) -> None:
        os.lseek(fds[0], start, os.SEEK_SET)
        there.append(taken_bytes(fds[0]))
        raise OSError(errno.EAGAIN, "as if a page were in use")

    scripted.script = look
    fd = os.memfd_create("kvstore-huge")
    try:
        fds.append(fd)
        os.ftruncate(fd, ODD_BYTES)
        with scripted(fd, ODD_BYTES) as mapping:
            assert take_huge_pages(mapping, fd) == 0
            assert mapping[:] == bytes(ODD_BYTES)
    finally:
        os.close(fd)
    assert len(there) == 3
    for step, size in enumerate(there):
        assert size >= (step + 1) * PAGE_BYTES


@pytest.mark.parametrize("advice", [mmap.MADV_HUGEPAGE, mmap.MADV_DONTDUMP])
def test_advice_that_is_refused_is_no_error(scripted: type[ScriptedMapping], advice: int) -> None:
    """A kernel built without huge pages refuses the advice, and the mapping works as before."""
    refused: list[int] = []

    def refuse(start: int) -> None:
        refused.append(start)
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    scripted.advice, scripted.script = advice, refuse
    with Region.create(2, PAGE_BYTES, populate=True) as region, Region.attach(region.fd, PAGE_BYTES) as other:
        other.view()[0] = 3
        assert region.view()[0] == 3
    assert refused == [0, 0]


def test_advice_takes_no_memory() -> None:
    """Advising an untouched mapping leaves it empty, and its bytes are zeros."""
    with memory_file(ODD_BYTES) as (fd, mapping):
        advise_huge_pages(mapping)
        assert taken_bytes(fd) == 0
        assert mapping[ODD_BYTES - 1] == 0


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.ENOMEM, errno.EIO])
@pytest.mark.parametrize("after", [0, 2, 4])
def test_no_memory_left_is_told_and_nothing_stays(monkeypatch: pytest.MonkeyPatch, code: int, after: int) -> None:
    """Running out of memory at any step is an error that leaves no descriptor or memory, even while it is held."""
    real, calls, name = os.posix_fallocate, [0], f"kvstore-huge-{code}-{after}"

    def allocate(fd: int, offset: int, length: int) -> None:
        calls[0] += 1
        if calls[0] > after:
            raise OSError(code, os.strerror(code))
        real(fd, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", allocate)
    with pytest.raises((ConfigError, OSError), match=os.strerror(code)) as caught:
        Region.create(ODD_BYTES // PAGE_BYTES, PAGE_BYTES, name=name, populate=True)
    assert calls[0] == after + 1
    assert isinstance(caught.value, ConfigError) == (code != errno.EIO)
    assert traces_of(name) == []


def test_memory_is_asked_for_in_short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """No call allocates so much that a profiler's signal would always interrupt it, and together they allocate all."""
    real, asked = os.posix_fallocate, []

    def allocate(fd: int, offset: int, length: int) -> None:
        asked.append((offset, length))
        real(fd, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", allocate)
    with Region.create(ODD_BYTES // PAGE_BYTES, PAGE_BYTES, populate=True) as region:
        check_whole(region)
    assert max(length for _, length in asked) <= 4 << 20
    assert max(offset + length for offset, length in asked) == ODD_BYTES


@pytest.mark.parametrize("step", [0, 1, 2])
@pytest.mark.parametrize("raises", [False, True])
def test_a_signal_between_steps(scripted: type[ScriptedMapping], step: int, raises: bool) -> None:
    """A signal whose handler returns changes nothing; one whose handler raises leaves neither descriptor nor memory."""
    handled, asked, name = [], [], f"kvstore-signal-{step}-{raises}"

    def handle(number: int, _: object) -> None:
        handled.append(number)
        if raises:
            raise Interrupted

    def send(start: int) -> None:
        asked.append(start)
        if len(asked) == step + 1:
            signal.raise_signal(signal.SIGUSR1)
        # Simulated, so that each step is reached on any kernel; other tests make the real calls.
        raise OSError(errno.EAGAIN, "as if a page were in use")

    scripted.script = send
    before = signal.signal(signal.SIGUSR1, handle)
    try:
        if raises:
            with pytest.raises(Interrupted):
                Region.create(ODD_BYTES // PAGE_BYTES, PAGE_BYTES, name=name, populate=True)
        else:
            with Region.create(ODD_BYTES // PAGE_BYTES, PAGE_BYTES, name=name, populate=True) as region:
                check_whole(region)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert handled == [signal.SIGUSR1]
    assert len(asked) == (step + 1 if raises else 3)
    assert all(mapping.closed for mapping in scripted.made)
    assert traces_of(name) == []


def test_mappings_are_put_at_good_addresses(reserved: list[mmap.mmap]) -> None:
    """In a fragmented address space, mappings of any length are aligned and usable, and nothing is left over."""
    seed = random.randrange(2**32)
    rng = random.Random(seed)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    with contextlib.ExitStack() as stack:
        held = [mmap.mmap(-1, rng.randrange(1, 2000) * PAGE_BYTES, flags=flags) for _ in range(16)]
        for mapping in held:
            stack.enter_context(mapping)
        rng.shuffle(held)
        for mapping in held[::2]:
            mapping.close()
        for _ in range(8):
            size = HUGE_PAGE_BYTES + rng.randrange(1, 2000) * PAGE_BYTES + rng.choice((0, 1, PAGE_BYTES - 1))
            made: list[mmap.mmap] = []

            def make(size: int = size, made: list[mmap.mmap] = made) -> mmap.mmap:
                made.append(mmap.mmap(-1, size, flags=flags))
                return made[-1]

            mapping = stack.enter_context(map_for_huge_pages(make))
            assert address_of(mapping) % HUGE_PAGE_BYTES == 0, f"seed {seed}, {size} bytes"
            mapping[0] = mapping[size - 1] = 8
            assert (mapping[0], mapping[size - 1], len(mapping)) == (8, 8, size)
            assert [one.closed for one in made] == [one is not mapping for one in made]
        assert all(mapping.closed for mapping in reserved)


def test_a_short_mapping_stays_where_it_is() -> None:
    """A mapping shorter than a huge page is created once, at any address."""
    made: list[mmap.mmap] = []

    def make() -> mmap.mmap:
        made.append(mmap.mmap(-1, HUGE_PAGE_BYTES - PAGE_BYTES))
        return made[-1]

    with map_for_huge_pages(make) as mapping:
        assert made == [mapping]


def test_what_just_holds_a_huge_page_is_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the length of one huge page on, an unaligned address is not kept."""
    for size, tries in ((HUGE_PAGE_BYTES - 1, 1), (HUGE_PAGE_BYTES, 2), (HUGE_PAGE_BYTES + 1, 2)):
        made: list[mmap.mmap] = []

        def make(size: int = size, made: list[mmap.mmap] = made) -> mmap.mmap:
            made.append(mmap.mmap(-1, size))
            return made[-1]

        def address(mapping: mmap.mmap, made: list[mmap.mmap] = made) -> int:
            return PAGE_BYTES if mapping is made[0] else HUGE_PAGE_BYTES

        monkeypatch.setattr(huge_pages, "_address_of", address)
        with map_for_huge_pages(make):
            assert len(made) == tries


def test_a_step_is_of_whole_huge_pages() -> None:
    """The length is also large enough for negligible call overhead, whatever the size of a huge page."""
    assert huge_pages._STEP_BYTES % HUGE_PAGE_BYTES == 0
    assert huge_pages._STEP_BYTES >= 64 << 20


@pytest.mark.parametrize("fails_at", [None, 2, 3])
def test_without_a_good_address_any_will_do(
    monkeypatch: pytest.MonkeyPatch, reserved: list[mmap.mmap], fails_at: int | None
) -> None:
    """If no aligned address exists, or the address space is limited, there is one working mapping and nothing else."""
    monkeypatch.setattr(huge_pages, "_address_of", lambda _: PAGE_BYTES)
    made: list[mmap.mmap] = []
    calls = [0]

    def make() -> mmap.mmap:
        calls[0] += 1
        if fails_at is not None and calls[0] >= fails_at:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        made.append(mmap.mmap(-1, ODD_BYTES))
        return made[-1]

    with map_for_huge_pages(make) as mapping:
        mapping[ODD_BYTES - 1] = 6
        assert mapping[ODD_BYTES - 1] == 6
        assert [one for one in made if not one.closed] == [mapping]
        assert all(mapping.closed for mapping in reserved)
        assert calls[0] <= 64
        assert reserved


@pytest.mark.parametrize("at", [1, 2, 3])
@pytest.mark.parametrize("error", [Interrupted, KeyboardInterrupt])
def test_interrupted_while_looking_for_a_place(
    monkeypatch: pytest.MonkeyPatch, reserved: list[mmap.mmap], at: int, error: type[BaseException]
) -> None:
    """Any exception that ends the search is raised, after all mappings of the search have been closed."""
    monkeypatch.setattr(huge_pages, "_address_of", lambda _: PAGE_BYTES)
    made: list[mmap.mmap] = []

    def make() -> mmap.mmap:
        if len(made) + 1 == at:
            raise error
        made.append(mmap.mmap(-1, ODD_BYTES))
        return made[-1]

    with pytest.raises(error):
        map_for_huge_pages(make)
    assert len(made) == at - 1
    assert all(mapping.closed for mapping in made)
    assert all(mapping.closed for mapping in reserved)
