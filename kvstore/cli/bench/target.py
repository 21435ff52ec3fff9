"""The target of a measurement: its creation, permission to write to it, and its removal.

Writing to a server or a non-empty directory requires permission. In other directories, each measurement makes one of
its own and removes it at the end, so an engine that starts in the same place meanwhile keeps its files. On an existing
target, only the blocks of the measurement are removed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from kvstore.cli.report import device_of, probe_direct
from kvstore.cli.terminal import say
from kvstore.cli.tier_argument import TierArgument, make_tier
from kvstore.config import Capacity
from kvstore.errors import ConfigError

_DEFAULT_CAPACITY_BYTES: Final = 2 << 30
"""Capacity of a tier in a temporary directory: several times the working set, and small for a root file system."""

_IN_MEMORY: Final = frozenset({"tmpfs", "ramfs"})
"""File systems without a drive, in the page cache only."""

_PREFIX: Final = "kvstore-bench-"
"""Start of the names of directories made here; hidden within a tier's directory."""

_IN_PROCESS: Final = frozenset({"memory"})
"""Backends that store nothing outside the process."""


class Target:
    """A context in which the medium of a tier may be used; without a tier, a file tier in a temporary directory.

    Attributes:
        given: The tier as given, for reports.
        tier: The tier to open.
        owned: Whether everything on the medium belongs to this measurement.
        keep: Whether created files and stored blocks stay.

    Raises:
        ConfigError: The target exists and ``reuse`` is false, or the directory cannot be created.
    """

    def __init__(self, tier: TierArgument | None, *, reuse: bool = False, keep: bool = False) -> None:
        self._made: list[Path] = []
        self._own: list[Path] = []
        """Directories in which only this measurement writes."""
        self._scratch: Path | None = None
        self.keep = keep
        if tier is None:
            root = Path(tempfile.mkdtemp(prefix=_PREFIX))
            self._made.append(root)
            free = shutil.disk_usage(root).free
            capacity = min(_DEFAULT_CAPACITY_BYTES, free // 4)
            # Without a reserve a nearly full disk is accepted; the capacity is at most a quarter of the free space.
            tier = make_tier("file", {"path": str(root), "capacity": capacity, "reserve": 0})
        self.given = self.tier = tier
        try:
            self.owned = self._claim(tier, reuse)
            if self.owned and tier.paths and not keep:
                for path in tier.paths:
                    self._own.append(Path(tempfile.mkdtemp(prefix=f".{_PREFIX}", dir=path)))
                self.tier = tier.moved(self._own)
        except BaseException:
            self._remove()
            raise

    def __enter__(self) -> Target:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._remove()

    @property
    def directory(self) -> Path | None:
        """A directory on the tier's drive; None for a tier without a local path."""
        return self.tier.paths[0] if self.tier.paths else None

    @property
    def direct(self) -> bool | None:
        """Whether the tier's reads bypass the page cache; None without one, or for files in memory."""
        if self.directory is None or self._in_memory():
            return None
        return getattr(self.tier.config, "direct", "auto") != "off" and probe_direct(self.directory)

    @property
    def capacity_bytes(self) -> int | None:
        """Capacity of the tier; None if its configuration has none."""
        capacity = getattr(self.tier.config, "capacity", None)
        if isinstance(capacity, Capacity):
            total = shutil.disk_usage(self.directory).total if self.directory is not None else 0
            return capacity.resolve(total) or None
        # 0 means no limit, for tiers where it is optional.
        return (int(capacity) or None) if isinstance(capacity, int) else None

    def scratch(self) -> Path:
        """Return a directory on the tier's drive for baselines; it is removed at the end."""
        if self.directory is None:
            raise ConfigError(f"A {self.tier.backend} tier has no local drive, so its drive cannot be measured.")
        if self._scratch is None:
            self._scratch = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}", dir=self.directory))
        return self._scratch

    def renew(self) -> None:
        """Empty the directories of this measurement, unless ``keep`` is set."""
        self._drop_scratch()
        for path in self._own:
            for found in path.iterdir():
                shutil.rmtree(found, ignore_errors=True)

    def drop_page_cache(self) -> bool:
        """Write back the tier's files and drop them from the page cache; return whether it has files."""
        os.sync()
        files = [found for path in self.tier.paths for found in path.rglob("*") if found.is_file()]
        for file in files:
            with contextlib.suppress(OSError), file.open("rb") as opened:
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return bool(files)

    def described(self) -> dict[str, Any]:
        """Return the description of the medium for a report."""
        if self.directory is None:
            return {}
        free = shutil.disk_usage(self.directory).free
        return {**device_of(self.directory), "direct_io": self.direct, "free_bytes": free}

    def _in_memory(self) -> bool:
        """Whether the tier's files are in memory. Some kernels nevertheless allow direct I/O there."""
        return any(device_of(path)["filesystem"] in _IN_MEMORY for path in self.tier.paths)

    def _claim(self, tier: TierArgument, reuse: bool) -> bool:
        """Create or check the directories; return whether all of them belong to this measurement."""
        if not tier.paths:
            if tier.backend not in _IN_PROCESS and not reuse:
                raise ConfigError(
                    f"A {tier.backend} tier may be shared with others, and a measurement fills it. Give --reuse to "
                    "allow that; its own blocks are removed at the end."
                )
            return tier.backend in _IN_PROCESS
        owned = True
        for path in tier.paths:
            if path.exists():
                if path.is_dir() and all(each.name.startswith(f".{_PREFIX}") for each in path.iterdir()):
                    continue
                if not reuse:
                    raise ConfigError(
                        f"{str(path)!r} is not an empty directory, and was not made by this measurement. Give a path "
                        "that does not exist, or --reuse if blocks may be stored there and evicted."
                    )
                owned = False
            else:
                try:
                    path.mkdir(mode=0o700)
                except OSError as error:
                    raise ConfigError(
                        f"{str(path)!r} can't be made: {error.strerror}. Its parent directory must exist and be "
                        "writable."
                    ) from error
                self._made.append(path)
        return owned

    def _drop_scratch(self) -> None:
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)
            self._scratch = None

    def _remove(self) -> None:
        self._drop_scratch()
        if self.keep:
            return
        for path in self._own:
            shutil.rmtree(path, ignore_errors=True)
        for path in reversed(self._made):
            try:
                path.rmdir()
            except OSError as error:
                # Only an empty directory is removed, because an engine may have started in it meanwhile.
                say(f"{str(path)!r} was made by this command and stays: {error.strerror}.")
