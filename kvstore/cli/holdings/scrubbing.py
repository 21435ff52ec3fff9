"""Verifying what lies on the medium of a tier, and taking what is damaged out of the way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from kvstore.cli.deadline import DeadlineError
from kvstore.cli.holdings.base import HeldBlock, HeldNamespace, Holdings, check_record
from kvstore.codec.record import RecordFault
from kvstore.errors import BackendError, RecordError

__all__ = ["ScrubResult", "scrub"]

_SCRUB_BATCH: Final = 64
"""Damaged blocks that are set aside at once."""


@dataclass(slots=True)
class ScrubResult:
    """What a scrub found.

    Attributes:
        blocks: Blocks looked at.
        size_bytes: Bytes of their records.
        gone: Blocks that were evicted before it was their turn.
        faults: One row per record that did not verify.
        unread: One row per block that the medium did not give, and why.
        set_aside: Records taken out of the way.
        error: Why it ended early, or could not take damaged records out of the way; empty if it did not fail.
    """

    blocks: int = 0
    size_bytes: int = 0
    gone: int = 0
    faults: list[dict[str, Any]] = field(default_factory=list)
    unread: list[dict[str, Any]] = field(default_factory=list)
    set_aside: int = 0
    error: str = ""


def scrub(
    holdings: Holdings, namespaces: Sequence[HeldNamespace], *, dry: bool, on_block: Callable[[], None] | None = None
) -> ScrubResult:
    """Verify every record at rest, and take the damaged ones out of the way unless it is dry.

    What is intact and merely not understood (another version of the format) is reported and left alone. If the medium
    fails after something was found, that is returned with the error.

    Raises:
        OSError: A record can't be read, and nothing was found before.
        BackendError: The medium does not answer any more, and nothing was found before.
        DeadlineError: From ``on_block``, and nothing was found before.
    """
    result = ScrubResult()
    for namespace in namespaces:
        damaged: list[HeldBlock] = []
        try:
            _verify(holdings, namespace, result, damaged, on_block)
        except (OSError, BackendError) as error:
            if not result.faults and not result.unread:
                raise
            result.error = _failure_text(error)
        except DeadlineError as error:
            if not result.faults and not result.unread:
                raise
            result.error = str(error)
            damaged.clear()  # To take them away needs time, and there is none.
        try:
            for start in range(0, 0 if dry else len(damaged), _SCRUB_BATCH):
                result.set_aside += holdings.set_aside(namespace, damaged[start : start + _SCRUB_BATCH])
        except (OSError, BackendError) as error:
            result.error = result.error or _failure_text(error)
        if result.error:
            break
    return result


def _verify(
    holdings: Holdings,
    namespace: HeldNamespace,
    result: ScrubResult,
    damaged: list[HeldBlock],
    on_block: Callable[[], None] | None,
) -> None:
    """Add what is found in a namespace to a result, and to ``damaged`` what has to go."""
    for found in holdings.records(namespace):
        block, record = found.block, found.data
        if found.error:
            result.unread.append({"namespace": namespace.hex, "key": block.key.hex(), "what": found.error})
            continue
        if record is None:
            result.gone += 1
            continue
        result.blocks += 1
        result.size_bytes += len(record)
        try:
            check_record(record, namespace.hex, block.key, alignment=max(holdings.header_bytes, 1))
        except RecordError as error:
            # A record of another namespace in this one's place is somebody's mistake, and of use to nobody here.
            is_damage = RecordFault(error.cause).is_damage or error.cause == RecordFault.NAMESPACE
            result.faults.append(
                {
                    "namespace": namespace.hex,
                    "key": block.key.hex(),
                    "fault": str(error.cause),
                    "damage": is_damage,
                    "what": str(error),
                }
            )
            damaged += [block] if is_damage else []
        if on_block is not None:
            on_block()


def _failure_text(error: OSError | BackendError) -> str:
    if isinstance(error, OSError):
        return f"{error.filename or 'a file'}: {error.strerror or error}"
    return str(error)
