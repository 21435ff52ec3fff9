"""Room for the primary tier: memory of the machine, of the container, and of the file system in memory."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from kvstore.errors import ConfigError

_PROC = Path("/proc")
_FILES = {
    "cgroup2": ("memory.max", "memory.current", ("inactive_file", "active_file", "slab_reclaimable")),
    "cgroup": ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")),
}
"""By type of a cgroup's file system: files of its limit and its use, and the use that the kernel frees at need."""


@dataclass(frozen=True, slots=True)
class Room:
    """Memory that is left."""

    left_bytes: int
    text: str  # A clause that states it.
    remedy: str


def rooms(shm: int | Path | None = None, proc: Path = _PROC) -> Iterator[Room]:
    """Yield what is left of the machine's memory, of each limit of a container, and of a file system in memory.

    A limit may lie at any ancestor of the process's cgroup. Its use counts without the cache that the kernel can free.

    Args:
        shm: The file system, by a path or an open file; None if the memory is in none.
        proc: The directory of /proc.
    """
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = (proc / "meminfo").read_text().splitlines()
        left = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
        yield Room(left, f"only {size_text(left)} of memory are available", "")
    for directory, kind in _cgroups(proc / "self"):
        limit_name, use_name, reclaimable = _FILES[kind]
        # "max" means no limit, and is not a number.
        with contextlib.suppress(OSError, ValueError):
            limit, use = (int((directory / name).read_text()) for name in (limit_name, use_name))
            fields = dict(line.split() for line in (directory / "memory.stat").read_text().splitlines())
            left = limit - use + sum(int(fields.get(name, 0)) for name in reclaimable)
            yield Room(
                left,
                f"of the container's memory limit of {size_text(limit)} ({directory / limit_name}) only "
                f"{size_text(left)} are left",
                "Raise the limit, or",
            )
    if shm is not None:
        with contextlib.suppress(OSError):
            found = os.statvfs(shm)
            if found.f_blocks:  # 0: no limit.
                left = found.f_bavail * found.f_frsize
                of = "the file system in memory" if isinstance(shm, int) else str(shm)
                remedy = "Give the container more (docker: --shm-size; Kubernetes: sizeLimit of the emptyDir), or"
                yield Room(left, f"only {size_text(left)} of {of} are free", remedy)


def shortage(size_bytes: int, shm: int | Path | None = None, proc: Path = _PROC, *, tier_bytes: int = 0) -> str | None:
    """Return why a primary tier does not fit, with the remedy; None if it fits.

    Args:
        size_bytes: Memory that it still needs.
        shm: As for :func:`rooms`.
        proc: As for :func:`rooms`.
        tier_bytes: Its length, if a part of it is allocated.
    """
    least = min(rooms(shm, proc), key=lambda room: room.left_bytes, default=None)
    if least is None or size_bytes <= least.left_bytes:
        return None
    tier, remedy = size_text(tier_bytes or size_bytes), f"{least.remedy} make it smaller".strip()
    return f"A primary tier of {tier} does not fit: {least.text}. {remedy[0].upper()}{remedy[1:]}."


def require_room(size_bytes: int, shm: int | Path | None = None) -> None:
    """Raise a ConfigError if a primary tier of this size does not fit. Arguments as for :func:`rooms`."""
    if text := shortage(size_bytes, shm):
        raise ConfigError(text)


def size_text(size_bytes: int) -> str:
    """Return a size with one decimal, in GiB or, if smaller, in MiB."""
    return f"{size_bytes / (1 << 30):.1f} GiB" if abs(size_bytes) >= 1 << 30 else f"{size_bytes / (1 << 20):.1f} MiB"


def _cgroups(process: Path) -> Iterator[tuple[Path, str]]:
    """Yield the cgroup of a process for memory and its ancestors, as far as they are mounted, with their type."""
    with contextlib.suppress(OSError, ValueError):
        paths = {}
        for line in (process / "cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers or "memory" in controllers.split(","):
                paths["cgroup" if controllers else "cgroup2"] = PurePosixPath(path)
        for line in (process / "mountinfo").read_text().splitlines():
            mount, _, filesystem = line.partition(" - ")
            kind, _, options = filesystem.split(" ", 2)
            if kind not in paths or (kind == "cgroup" and "memory" not in options.split(",")):
                continue
            root, point = (_unescaped(field) for field in mount.split(" ")[3:5])
            # A cgroup outside the mounted ones is the container's own, mounted as their root.
            inside = paths[kind].is_relative_to(root) and ".." not in paths[kind].parts
            directory = Path(point) / (paths[kind].relative_to(root) if inside else "")
            while directory.is_relative_to(point):
                yield directory, kind
                directory = directory.parent


def _unescaped(field: str) -> str:
    """Return a field of mountinfo, in which white space is written in octal."""
    return field.replace("\\040", " ").replace("\\011", "\t").replace("\\012", "\n").replace("\\134", "\\")
