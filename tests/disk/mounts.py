"""Small filesystems that tests mount, freeze and fill."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

__all__ = ["bound", "ext4", "filled", "frozen", "made", "mounted"]


@contextmanager
def mounted(point: Path, *options: str) -> Iterator[Path]:
    """Mount a filesystem while the context lasts."""
    point.mkdir()
    subprocess.run(["mount", *options, str(point)], check=True)
    try:
        yield point
    finally:
        subprocess.run(["umount", "-l", str(point)], check=True)


@contextmanager
def made(kind: str, directory: Path, size_bytes: int, *options: str) -> Iterator[Path]:
    """Make a filesystem of a kind, such as ``"xfs"``, and mount it."""
    image = directory / "disk.img"
    with image.open("wb") as file:
        file.truncate(size_bytes)
    subprocess.run([f"mkfs.{kind}", "-q", *options, str(image)], check=True)
    with mounted(directory / "mnt", "-o", "loop", str(image)) as point:
        yield point


def ext4(directory: Path, size_bytes: int = 64 << 20) -> AbstractContextManager[Path]:
    """Mount a new ext4 without blocks reserved for root."""
    return made("ext4", directory, size_bytes, "-F", "-m", "0")


@contextmanager
def bound(source: Path, point: Path) -> Iterator[Path]:
    """Mount a directory a second time, by a filesystem in user space, with locks shared by all mounts."""
    point.mkdir()
    subprocess.run(["bindfs", "--multithreaded", "--enable-lock-forwarding", str(source), str(point)], check=True)
    try:
        yield point
    finally:
        subprocess.run(["umount", "-l", str(point)], check=True)


@contextmanager
def frozen(point: Path) -> Iterator[None]:
    """Freeze a filesystem: processes that write to it block and cannot be killed."""
    subprocess.run(["fsfreeze", "-f", str(point)], check=True)
    try:
        yield
    finally:
        subprocess.run(["fsfreeze", "-u", str(point)], check=True)


@contextmanager
def filled(point: Path) -> Iterator[None]:
    """Fill a filesystem to its last block, as another user would."""
    path = point / "somebody-elses"
    with path.open("wb", buffering=0) as file:
        for size in (1 << 20, 4096):
            try:
                while file.write(bytes(size)) == size:
                    os.fsync(file.fileno())
            except OSError:
                continue
    try:
        yield
    finally:
        path.unlink()
