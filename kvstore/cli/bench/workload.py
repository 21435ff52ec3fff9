"""The workload of one phase of a measurement, and its command line syntax."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal, TypeVar

from kvstore.cli.command_line import size_option
from kvstore.errors import ConfigError
from kvstore.primary import PAGE_BYTES
from kvstore.secret import shown

Verify = Literal["sample", "all", "none"]

_T = TypeVar("_T")
_OPS: Final = ("store", "load")
_BLOCK_BYTES_MAX: Final = 1 << 30
"""Longest block; blocks have megabytes, so a longer one is a typing error."""
_GROUPS_MAX: Final = 1_000_000
"""Most jobs of a working set; each takes some hundred bytes of memory."""


@dataclass(frozen=True, slots=True)
class Mix:
    """Share of jobs that store; the others look up blocks and load the found ones."""

    store_share: float  # From 0 (loads only) to 1 (stores only).

    @classmethod
    def parse(cls, text: str) -> Mix:
        """Parse ``"load"``, ``"store"`` or ``"store=30,load=70"``."""
        weights = dict.fromkeys(_OPS, 0.0)
        try:
            for part in text.split(","):
                name, _, weight = part.strip().partition("=")
                weights[{"stores": "store", "loads": "load"}.get(name, name)] += float(weight or 1)
            total = sum(weights.values())
            if set(weights) != set(_OPS) or not 0 < total < float("inf") or min(weights.values()) < 0:
                raise ValueError
        except (KeyError, ValueError):
            raise ConfigError(
                f"--mix is {shown(text)}. Expected 'store', 'load' or such as 'store=30,load=70'."
            ) from None
        return cls(weights["store"] / total)

    def __str__(self) -> str:
        if self.store_share in (0, 1):
            return "store" if self.store_share else "load"
        return f"store={100 * self.store_share:.3g},load={100 * (1 - self.store_share):.3g}"


@dataclass(frozen=True, slots=True)
class Workload:
    """One phase."""

    block_bytes: int  # Payload of a block.
    blocks_per_job: int = 16
    jobs: int = 4  # Most unfinished jobs.
    mix: Mix = Mix(0.3)  # Stores and loads.
    hit_rate: float = 1.0  # Share of looked-up blocks that were stored before.
    rate: float | None = None
    """Jobs per second, independent of the system (open loop); None: a job begins when another has ended (closed
    loop)."""
    duration_s: float = 3.0  # Length without warm-up.
    ops_max: int = 0  # Most jobs; 0: no limit.
    warmup_s: float = 0.5  # Time at the start that is not counted.
    working_set_bytes: int = 256 << 20  # Payload that is stored before the phase and loaded in it.
    verify: Verify = "sample"  # Loaded blocks to compare with the stored ones.
    spin: bool = False  # Whether the calling thread computes in Python between its polls.
    cold: bool = False  # Whether each block is loaded at most once, after the page cache was dropped.
    seed: int = 1  # Determines which jobs store, and the order of loads.

    def __post_init__(self) -> None:
        _check(1 <= self.blocks_per_job <= 65536, "--blocks-per-job", self.blocks_per_job, "1 to 65536")
        _check(1 <= self.jobs <= 4096, "--jobs", self.jobs, "1 to 4096")
        _check(0 <= self.hit_rate <= 1, "--hit-rate", self.hit_rate, "a share from 0 to 1")
        _check(self.rate is None or 0 < self.rate <= 1e6, "--rate", self.rate, "jobs per second, above 0")
        _check(0 < self.duration_s <= 86400 * 7, "--duration", self.duration_s, "above 0 and at most a week")
        _check(self.ops_max >= 0, "--ops", self.ops_max, "0 or more jobs")
        _check(0 <= self.warmup_s <= 3600, "--warmup", self.warmup_s, "at most an hour")
        most = _GROUPS_MAX * self.blocks_per_job * self.block_bytes
        _check(
            self.groups <= _GROUPS_MAX, "The working set in bytes", self.working_set_bytes,
            f"at most {_GROUPS_MAX} jobs, {most} bytes of them",
        )  # fmt: skip

    @property
    def slots(self) -> int:
        """Number of slots of the primary tier."""
        return self.jobs * self.blocks_per_job

    @property
    def groups(self) -> int:
        """Jobs of the working set: at least two, and one more than can be unfinished."""
        job_bytes = self.block_bytes * self.blocks_per_job
        return max(2, self.jobs + 1, -(-self.working_set_bytes // job_bytes))

    @property
    def stored_bytes(self) -> int:
        """Payload of the working set, in whole jobs."""
        return self.groups * self.blocks_per_job * self.block_bytes


def listed(text: str, parse: Callable[[str], _T], option: str) -> list[_T]:
    """Parse a list separated by commas."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts:
        raise ConfigError(f"{option} is empty. Give one value, or several with commas.")
    found = []
    for part in parts:
        try:
            found.append(parse(part))
        except ConfigError:
            raise
        except ValueError:
            raise ConfigError(f"{option} has {shown(part)}. Expected values with commas, such as '1,8'.") from None
    return found


def parse_sizes(text: str) -> list[int]:
    """Parse block lengths, such as ``"128KiB,2MiB"``."""
    return listed(text, _block_size, "--block-size")


def _block_size(text: str) -> int:
    size = int(size_option(text, "--block-size"))
    fits = not size % PAGE_BYTES and PAGE_BYTES <= size <= _BLOCK_BYTES_MAX
    _check(fits, "--block-size", text, f"a multiple of {PAGE_BYTES} up to 1GiB, such as 128KiB")
    return size


def _check(ok: bool, option: str, value: object, expected: str) -> None:
    if not ok:
        raise ConfigError(f"{option} is {shown(value)}. Expected {expected}.")
