"""Early work in every vLLM process: one-line configuration errors before weights are loaded, and logging setup."""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import multiprocessing
import sys
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, Final, NoReturn

from vllm.platforms import current_platform

from kvstore.config import decode_config
from kvstore.errors import ConfigError, KVStoreError
from kvstore.registry import BACKENDS
from kvstore.tiers.preflight import check_before_opening
from kvstore.vllm.options import TIER_TYPE, check_options, check_tiering, with_short_types

__all__ = ["check_offloading", "check_start", "said_in_the_log", "show_logs"]

logger = logging.getLogger("kvstore.vllm.startup")

_OUR_SPEC: Final = "KVStoreOffloadingSpec"
_VLLMS_SPEC: Final = "TieringOffloadingSpec"
_OPTION: Final = "--kv-transfer-config"
_FRAMES_MAX: Final = 32
_ELSEWHERE: Final = ("data-parallel", "nnodes", "node-rank", "headless", "ray")
"""Parts of arguments that indicate an engine on another machine, which can't be checked from here."""


def check_start() -> None:
    """Check the configuration of this process, as far as a vLLM plugin can find it.

    vLLM passes no arguments to plugins. The configuration is read from the unparsed command line, from ``EngineArgs``
    under construction, or from an engine process that is starting.

    Raises:
        ConfigError: The configuration is invalid, in a program that creates an engine.
        SystemExit: The configuration is invalid, in ``vllm serve`` or in vLLM's own processes; the text is one line.
    """
    engine_args, engine_config = _callers()
    if engine_config is not None:
        transfer, here = engine_config.kv_transfer_config, True
    elif engine_args is not None:
        transfer, here = engine_args.kv_transfer_config, False
    else:
        transfer, here = _of_command_line(sys.argv), not any(word in each for each in sys.argv for word in _ELSEWHERE)
    try:
        for extra in _offloadings(transfer):
            check_offloading(extra, here=here)
    except ConfigError as error:
        _refuse(
            error,
            is_ours=engine_args is None and (engine_config is None or multiprocessing.parent_process() is not None),
        )


def check_offloading(extra: Mapping[str, Any], *, here: bool = True) -> None:
    """Check one ``kv_connector_extra_config``. Configurations without kvstore are accepted.

    Args:
        extra: The object.
        here: Whether the engine will run on this machine. If so, directories and device are checked as well.

    Raises:
        ConfigError: The configuration is invalid.
    """
    spec = extra.get("spec_name")
    tiers = extra.get("secondary_tiers", [])
    if spec == _OUR_SPEC:
        extra = with_short_types(extra)
        check_tiering(extra)
        ours = [tier for tier in extra["secondary_tiers"] if tier["type"] == TIER_TYPE]
    elif spec == _VLLMS_SPEC and isinstance(tiers, Sequence):
        ours = [
            tier for tier in tiers if isinstance(tier, Mapping) and tier.get("type") in {TIER_TYPE, *BACKENDS.names()}
        ]
    else:
        return
    if not ours:
        return
    if spec == _VLLMS_SPEC and here and current_platform.is_cpu():
        raise ConfigError(
            f"vLLM's {_VLLMS_SPEC} runs on accelerators only, and this vLLM is for the CPU. Give "
            f'"spec_name": "{_OUR_SPEC}", "spec_module_path": "kvstore.vllm" with the same tiers.'
        )
    if not extra.get("cpu_bytes_to_use"):
        raise ConfigError(
            "'cpu_bytes_to_use' is missing. Expected the size of the primary tier in bytes, such as 8589934592. Every "
            "block passes through it."
        )
    for tier in ours:
        options = check_options(tier, tier_type=tier["type"])
        backend = options.pop("backend")
        if here:
            config = decode_config(BACKENDS.find(backend).config_type, options, where=f"{backend} tier")
            check_before_opening(backend, config)


@contextlib.contextmanager
def said_in_the_log() -> Iterator[None]:
    """Log the reason why a tier can't be opened in one line; vLLM shows it only at the end of a traceback."""
    try:
        yield
    except KVStoreError as error:
        logger.error("kvstore: %s", error)
        raise


def show_logs() -> None:
    """Log through vLLM's handlers, at its level and in its time format, with the name of the logger. Idempotent.

    Without this, vLLM shows only warnings of other packages, without a time. Does nothing if logging is already
    configured for kvstore or for all loggers, or if vLLM has no handlers.
    """
    ours, theirs = logging.getLogger("kvstore"), logging.getLogger("vllm")
    if ours.handlers or ours.level != logging.NOTSET or logging.getLogger().handlers:
        return
    for handler in theirs.handlers:
        ours.addHandler(_like(handler))
    if theirs.handlers:
        ours.setLevel(theirs.level)


def _refuse(error: ConfigError, *, is_ours: bool) -> NoReturn:
    text = str(error) if str(error).startswith("kvstore:") else f"kvstore: {error}"
    if is_ours:
        raise SystemExit(text)
    raise ConfigError(text) from error


def _callers() -> tuple[Any, Any]:
    """Return the ``EngineArgs`` or the engine's ``VllmConfig`` under construction; None for the other."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_FRAMES_MAX):
        if frame is None:
            break
        found = frame.f_locals
        if "executor_class" in found and hasattr(found.get("vllm_config"), "kv_transfer_config"):
            return None, found["vllm_config"]
        if frame.f_code.co_name == "__post_init__" and hasattr(found.get("self"), "kv_transfer_config"):
            return found["self"], None
        frame = frame.f_back
    return None, None


def _of_command_line(arguments: Sequence[str]) -> Any:
    """Return the value of ``--kv-transfer-config``; None if it is absent or invalid JSON (reported by vLLM)."""
    for at, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name.replace("_", "-") == _OPTION:
            with contextlib.suppress(ValueError, IndexError):
                return json.loads(value if equals else arguments[at + 1])
    return None


def _offloadings(transfer: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the ``kv_connector_extra_config`` of each ``OffloadingConnector``, including those in a MultiConnector."""
    names = ("kv_connector", "kv_connector_extra_config")
    known = transfer if isinstance(transfer, Mapping) else {name: getattr(transfer, name, None) for name in names}
    connector, extra = (known.get(name) for name in names)
    if not isinstance(extra, Mapping):
        return
    if connector == "OffloadingConnector":
        yield extra
    elif connector == "MultiConnector" and isinstance(extra.get("connectors"), list):
        for each in extra["connectors"]:
            yield from _offloadings(each)


def _like(handler: logging.Handler) -> logging.Handler:
    """Return a handler for the same stream that shows the logger; vLLM's own format shows the source file instead."""
    found, formatter = copy.copy(handler), handler.formatter
    if formatter is not None and "%(name)s" not in (formatter._fmt or ""):
        found.setFormatter(logging.Formatter("%(levelname)s %(asctime)s [%(name)s] %(message)s", formatter.datefmt))
    return found
