"""Start of every vLLM process: configuration errors in one line before weights are loaded, and logging setup."""

from __future__ import annotations

import contextlib
import copy
import difflib
import importlib.util
import itertools
import json
import logging
import multiprocessing
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any, Final, NoReturn, get_args

from vllm import envs as vllm_envs
from vllm.config import KVTransferConfig
from vllm.config.kv_transfer import KVRole
from vllm.platforms import current_platform

from kvstore.backends.peer.config import NOTHING_TO_SERVE
from kvstore.config import ByteSize, decode_config, did_you_mean
from kvstore.errors import ConfigError, KVStoreError
from kvstore.primary.memory import shortage
from kvstore.primary.shared import SHM, remove_dead_files
from kvstore.registry import BACKENDS
from kvstore.runtime import LOG_LINE
from kvstore.secret import shown
from kvstore.tiers import AsyncTier
from kvstore.tiers.preflight import check_before_opening, claim_paths, doubts_before_opening, paths_of
from kvstore.vllm.options import (
    check_options,
    check_tiering,
    is_own_manager,
    option_faults,
    spelled_out,
    tier_types,
    unknown_options,
    with_short_types,
)

logger = logging.getLogger("kvstore.vllm.startup")

OUR_CONNECTOR: Final = "KVStoreConnector"
_VLLMS_CONNECTOR: Final = "OffloadingConnector"
"""Replaced by ours if the plugin is loaded; deprecated."""
_CONNECTORS: Final = (OUR_CONNECTOR, _VLLMS_CONNECTOR)

_MODULE: Final = "kvstore.vllm"
_OUR_SPEC: Final = "KVStoreOffloadingSpec"
_VLLMS_SPEC: Final = "TieringOffloadingSpec"
_OPTION: Final = "--kv-transfer-config"
_FRAMES_MAX: Final = 32
_MISSPELT: Final = 0.8
"""Similarity (of difflib) from which a name is a misspelt one."""
_PAGES: Final = {"file": "disk", "nvme": "disk", **{name: name for name in ("mooncake", "peer", "redis", "s3")}}
"""Pages in ``docs/`` by the name of the backend that they describe."""
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
    others = engine_args
    if engine_config is not None:
        transfer, here = engine_config.kv_transfer_config, True
    elif engine_args is not None:
        transfer, here = engine_args.kv_transfer_config, False
    else:
        transfer, others = _of_command_line(sys.argv)
        here = not any(word in each for each in sys.argv for word in _ELSEWHERE)
    is_first = multiprocessing.parent_process() is None
    if is_first:
        remove_dead_files()
    try:
        _report(*transfer_faults(transfer, others, here=here) or ())
        # In later processes, the region may exist already.
        size_bytes = region_bytes(transfer, others) if is_first and here else 0
        if size_bytes and (text := shortage(size_bytes, SHM)):
            raise ConfigError(f"'cpu_bytes_to_use': {text}")
    except ConfigError as error:
        _refuse(
            error,
            exits=engine_args is None and (engine_config is None or multiprocessing.parent_process() is not None),
        )


def check_offloading(extra: Mapping[str, Any], *, here: bool = True) -> None:
    """Check one ``kv_connector_extra_config``. Configurations without kvstore are accepted.

    ``here``: whether the engine will run on this machine. If so, directories and device are checked as well.
    """
    _report(*faults_of(extra, here=here) or ())


def transfer_faults(
    transfer: Any, engine_args: Any = None, *, here: bool = True
) -> tuple[list[Fault], list[Fault]] | None:
    """Return all faults of a ``--kv-transfer-config``, and warnings; None if it does not use kvstore.

    Args:
        transfer: The object, decoded or as vLLM's ``KVTransferConfig``.
        engine_args: vLLM's other arguments, if known.
        here: As for :func:`check_offloading`.
    """
    faults: list[Fault] = []
    with _collecting(faults, "kv_connector"):
        _check_connector(transfer, engine_args)
    of_vllm = [text for each in _transfers(transfer) if isinstance(each, Mapping) for text in _faults_of_transfer(each)]
    found = [faults_of(extra, here=here) for extra in _sized_offloadings(transfer, engine_args)]
    if not faults and all(each is None for each in found):
        return None
    faults[:0] = of_vllm
    warnings: list[Fault] = []
    for each in found:
        if each is not None:
            faults += each[0]
            warnings += each[1]
    if _connector_of(transfer)[0] == _VLLMS_CONNECTOR:
        text = f"is {_VLLMS_CONNECTOR!r}, which stands for {OUR_CONNECTOR!r} in this release only. Give that name."
        warnings.append(Fault("kv_connector", text))
    return faults, warnings


def region_bytes(transfer: Any, engine_args: Any = None) -> int:
    """Return the size of the primary tiers of a ``--kv-transfer-config`` without faults; 0 if it does not use kvstore.

    Arguments as for :func:`transfer_faults`.
    """
    named = tier_types()
    return sum(
        int(ByteSize(extra["cpu_bytes_to_use"]))
        for extra in _sized_offloadings(transfer, engine_args)
        if extra.get("spec_name") == _OUR_SPEC or any(t.get("type") in named for t in extra.get("secondary_tiers", ()))
    )


def _sized_offloadings(transfer: Any, engine_args: Any) -> list[dict[str, Any]]:
    """Return all ``kv_connector_extra_config``, with the size that vLLM derives from another argument only later."""
    size_gib = getattr(engine_args, "kv_offloading_size", None)
    given = {} if size_gib is None else {"cpu_bytes_to_use": int(size_gib * 2**30)}
    return [{**given, **extra} for extra in _offloadings(transfer)]


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault of a configuration, or a warning.

    Attributes:
        place: The tier, such as ``secondary_tiers[0]``; empty for the object itself.
        text: The fault with its remedy.
        page: The page that describes the options; empty if unknown.
    """

    place: str
    text: str
    page: str = ""

    def __str__(self) -> str:
        text = self.text if not self.place or self.text.startswith(self.place) else f"{self.place}: {self.text}"
        return f"{text} See {self.page}." if self.page else text


def faults_of(extra: Mapping[str, Any], *, here: bool = True) -> tuple[list[Fault], list[Fault]] | None:
    """Return all faults of one ``kv_connector_extra_config``, and warnings; None if it does not use kvstore."""
    faults: list[Fault] = []
    warnings: list[Fault] = []
    spec, tiers = extra.get("spec_name"), extra.get("secondary_tiers", [])
    is_our_spec = spec == _OUR_SPEC
    if not is_our_spec and spec != _VLLMS_SPEC:
        is_foreign = extra.get("spec_module_path", _MODULE) != _MODULE
        meant = None if is_foreign else _misspelt(spec, _OUR_SPEC)
        return ([Fault("", f"spec_name is {spec!r}. Did you mean {meant!r}?")], []) if meant else None
    if not isinstance(tiers, list) or not all(isinstance(tier, Mapping) for tier in tiers):
        with _collecting(faults):
            with_short_types(extra)
        return (faults, []) if is_our_spec else None
    named = tier_types()
    sound: dict[str, Mapping[str, Any]] = {}
    for index, tier in enumerate(tiers):
        place = f"secondary_tiers[{index}]"
        if is_our_spec or tier.get("type") in named:
            with _collecting(faults, place):
                sound[place] = spelled_out(tier, place) if is_our_spec else tier
    ours = {place: tier for place, tier in sound.items() if tier["type"] in named}
    if not is_our_spec and not ours:
        return None
    faults += [Fault("", text, "docs/vllm.md") for text in option_faults(extra)]
    if is_our_spec:
        unknown, doubtful = unknown_options(extra)
        faults += [Fault("", text, "docs/vllm.md") for text in unknown]
        warnings += [Fault("", text) for text in doubtful]
        if len(sound) == len(tiers):
            with _collecting(faults, page="docs/tiering.md"):
                check_tiering(with_short_types({**extra, "cpu_bytes_to_use": 0}))
    else:
        faults += _faults_of_vllms_spec(extra, here)
    if is_our_spec and not tiers:
        text = "There are no 'secondary_tiers': blocks stay in CPU memory only. Add one, such as "
        warnings.append(Fault("", text + '{"type": "file", "path": "/mnt/nvme/kv", "capacity": "500GiB"}.'))
    _check_tiers(ours, here, faults, warnings)
    if not (is_our_spec and is_own_manager(extra)):
        faults += [Fault(place, NOTHING_TO_SERVE) for place, tier in ours.items() if tier.get("listen")]
    return faults, warnings


def _faults_of_vllms_spec(extra: Mapping[str, Any], here: bool) -> Iterator[Fault]:
    """Yield the faults of kvstore's tiers under vLLM's own spec."""
    if here and current_platform.is_cpu():
        yield Fault(
            "",
            f"vLLM's {_VLLMS_SPEC} runs on accelerators only, and this vLLM is for the CPU. Give "
            f'"spec_name": "{_OUR_SPEC}", "spec_module_path": "kvstore.vllm" with the same tiers.',
        )
    if isinstance(extra.get("cpu_bytes_to_use"), str):
        yield Fault(
            "",
            f"vLLM's {_VLLMS_SPEC} takes 'cpu_bytes_to_use' as a number of bytes, such as 8589934592, without a unit.",
        )


def _check_tiers(ours: Mapping[str, Mapping[str, Any]], here: bool, faults: list[Fault], warnings: list[Fault]) -> None:
    """Check kvstore's tiers, by place, alone and beside each other."""
    used: dict[Path, str] = {}
    names: dict[str, str] = {}
    for place, tier in ours.items():
        page = _PAGES.get(str(tier.get("backend", tier["type"])))
        with _collecting(faults, place, f"docs/{page}.md" if page else ""):
            options = check_options(tier, tier_type=tier["type"])
            backend = options.pop("backend")
            config = decode_config(BACKENDS.find(backend).config_type, options, where=f"{backend} tier")
            claim_paths(used, place, paths_of(backend, config))
            if here:
                check_before_opening(backend, config)
                warnings += [Fault(place, text) for text in doubts_before_opening(backend, config)]
            if (other := names.setdefault(config.label or backend, place)) != place:
                if config.label:
                    raise ConfigError(f"{other} is called {config.label!r} too. Give each tier a label of its own.")
                text = f"without a label, as {other}: metrics and policies call it by its position. Give each a label."
                warnings.append(Fault(place, text))


@contextlib.contextmanager
def _collecting(faults: list[Fault], place: str = "", page: str = "") -> Iterator[None]:
    """Collect a fault instead of raising it."""
    try:
        yield
    except ConfigError as error:
        faults.append(Fault(place, str(error), page))


@contextlib.contextmanager
def errors_logged() -> Iterator[None]:
    """Log the reason why a tier can't be opened in one line; vLLM shows it only at the end of a traceback.

    An engine's own process then ends without that traceback; a program that runs the engine itself gets the exception.

    Raises:
        SystemExit: A tier can't be opened, in a process that vLLM started.
    """
    try:
        yield
    except KVStoreError as error:
        logger.error("kvstore: %s", error)
        if multiprocessing.parent_process() is None:
            raise
        raise SystemExit(1) from None


def described(tier: AsyncTier, options: Mapping[str, Any]) -> str:
    """Return a tier's name, directories, capacity, blocks found, I/O method and process, for the log.

    ``options``: its options, as from :func:`kvstore.vllm.options.check_options`.
    """
    backend = str(options["backend"])
    given = {name: value for name, value in options.items() if name != "backend"}
    config = decode_config(BACKENDS.find(backend).config_type, given, where=f"{backend} tier")
    stats = tier.stats()
    parts = [str(path) for path in paths_of(backend, config)]
    if stats.capacity_bytes:
        parts.append(f"capacity {ByteSize(stats.capacity_bytes).text}")
    blocks = stats.blocks + int(stats.backend_gauges.get("foreign_blocks", 0))
    parts.append(f"{blocks} blocks found" + ("" if not stats.recovering else " so far"))
    if "io_uring" in stats.backend_gauges:
        parts.append("I/O by io_uring" if stats.backend_gauges["io_uring"] else "I/O by threads")
    if tier.io_pid is not None:
        parts.append(f"process {tier.io_pid}")
    return f"{tier.name} ({', '.join(parts)})"


def described_slots(spec: Any, slot_bytes: int, useful: Sequence[int]) -> str:
    """Return the bytes and tokens of a slot, for the log; layers of several kinds may differ in tokens.

    ``useful``: the bytes that a block of each group of layers fills, if known.
    """
    tokens = sorted({tokens * spec.blocks_per_chunk for tokens in spec.tokens_per_block})
    filled = f" ({', '.join(map(str, useful))} of them filled by the groups of layers)" if useful else ""
    return f"{slot_bytes} bytes and {' or '.join(map(str, tokens))} tokens{filled}"


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


def _report(faults: Sequence[Fault] = (), warnings: Sequence[Fault] = ()) -> None:
    """Raise faults as one error, a line for each; log warnings."""
    if faults:
        raise ConfigError("\nkvstore: ".join(map(str, faults)))
    # Only in the first process of an engine; the others check the same object.
    for warning in warnings if multiprocessing.parent_process() is None else ():
        logger.warning("kvstore: %s", warning)


def _faults_of_transfer(transfer: Mapping[str, Any]) -> Iterator[Fault]:
    """Yield the faults of a ``--kv-transfer-config`` itself, which vLLM reports in a traceback."""
    known = [option.name for option in fields(KVTransferConfig)]
    for name in transfer:
        if name not in known:
            yield Fault("", f"vLLM's {_OPTION} has no option {name!r}.{did_you_mean(name, known)}")
    extra = _connector_of(transfer)[1]
    named = {"kv_connector_module_path": transfer, "spec_module_path": extra if isinstance(extra, Mapping) else {}}
    for name, given in named.items():
        if (module := given.get(name)) is not None and not _is_importable(module):
            yield Fault("", f"{name!r} is {shown(module)}, and there is no such module. Give {_MODULE!r}.")
    role, roles = transfer.get("kv_role"), get_args(KVRole)
    if role not in roles:
        found = shown(role) if "kv_role" in transfer else "missing"
        expected = ", ".join(map(repr, roles))
        yield Fault(
            "",
            f"'kv_role' is {found}. Expected one of {expected}; 'kv_both' stores and loads.{did_you_mean(role, roles)}",
        )
    if not isinstance(transfer.get("kv_connector_extra_config", {}), Mapping):
        yield Fault(
            "",
            f"'kv_connector_extra_config' is {shown(transfer['kv_connector_extra_config'])}. Expected a JSON object.",
        )


def _is_importable(module: object) -> bool:
    """Return whether a module can be found; its packages are imported."""
    try:
        return isinstance(module, str) and importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _misspelt(name: object, meant: str) -> str | None:
    """Return ``meant`` if a name resembles it."""
    return meant if isinstance(name, str) and difflib.get_close_matches(name, [meant], cutoff=_MISSPELT) else None


def _check_connector(transfer: Any, engine_args: Any) -> None:
    """Refuse a configuration of kvstore that vLLM passes to a connector without specs.

    ``--kv-offloading-size`` replaces the connector, of which the engine's process sees only the result.

    Raises:
        ConfigError: The connector would not use kvstore.
    """
    connector, extra = _connector_of(transfer)
    if not isinstance(extra, Mapping) or extra.get("spec_name") != _OUR_SPEC:
        return
    if getattr(engine_args, "kv_offloading_size", None) is not None:
        if _value_of(transfer, "kv_connector_module_path"):
            raise ConfigError(
                "With --kv-offloading-size, vLLM would look for its own connector in 'kv_connector_module_path'. "
                "Leave that argument out, and give 'cpu_bytes_to_use'."
            )
        if getattr(engine_args, "kv_offloading_backend", "native") != "native":
            connector = "LMCacheMPConnector"
        elif vllm_envs.VLLM_USE_SIMPLE_KV_OFFLOAD:
            connector = "SimpleCPUOffloadConnector"
    if connector not in _CONNECTORS and _misspelt(connector, OUR_CONNECTOR):
        raise ConfigError(f"kv_connector is {connector!r}. Did you mean {OUR_CONNECTOR!r}?")
    if connector not in _CONNECTORS:
        raise ConfigError(
            f"kv_connector is {connector!r}, which does not use kvstore. Expected {OUR_CONNECTOR!r}. Leave out "
            "--kv-offloading-size, which replaces it with VLLM_USE_SIMPLE_KV_OFFLOAD=1 or --kv-offloading-backend: "
            "'cpu_bytes_to_use' is the size of the primary tier."
        )


def _refuse(error: ConfigError, *, exits: bool) -> NoReturn:
    text = str(error) if str(error).startswith("kvstore:") else f"kvstore: {error}"
    if exits:
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


def _of_command_line(arguments: Sequence[str]) -> tuple[Any, Any]:
    """Return the value of ``--kv-transfer-config``, and the arguments that change it.

    Absent or invalid values are None; vLLM reports them.
    """
    found: dict[str, str] = {}
    for argument, following in itertools.pairwise([*arguments, ""]):
        name, equals, value = argument.partition("=")
        found[name.replace("_", "-")] = value if equals else following
    transfer = size = None
    with contextlib.suppress(ValueError):
        transfer = json.loads(found.get(_OPTION, ""))
    with contextlib.suppress(ValueError):
        size = float(found.get("--kv-offloading-size", ""))
    backend = found.get("--kv-offloading-backend", "native")
    return transfer, SimpleNamespace(kv_offloading_size=size, kv_offloading_backend=backend)


def _offloadings(transfer: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the ``kv_connector_extra_config`` of each connector with specs, including those in a MultiConnector."""
    for each in _transfers(transfer):
        connector, extra = _connector_of(each)
        if connector in _CONNECTORS and isinstance(extra, Mapping):
            yield extra


def _transfers(transfer: Any) -> Iterator[Any]:
    """Yield the configuration of a connector, and those of the connectors in a MultiConnector."""
    yield transfer
    connector, extra = _connector_of(transfer)
    children = extra.get("connectors") if connector == "MultiConnector" and isinstance(extra, Mapping) else None
    for each in children if isinstance(children, list) else ():
        yield from _transfers(each)


def _connector_of(transfer: Any) -> tuple[Any, Any]:
    """Return the name of the connector and its ``kv_connector_extra_config``; None for a missing one."""
    return _value_of(transfer, "kv_connector"), _value_of(transfer, "kv_connector_extra_config")


def _value_of(transfer: Any, name: str) -> Any:
    return transfer.get(name) if isinstance(transfer, Mapping) else getattr(transfer, name, None)


def _like(handler: logging.Handler) -> logging.Handler:
    """Return a handler for the same stream whose format shows the logger; vLLM's shows the source file."""
    found, formatter = copy.copy(handler), handler.formatter
    if formatter is not None and "%(name)s" not in (formatter._fmt or ""):
        found.setFormatter(logging.Formatter(LOG_LINE, formatter.datefmt))
    return found
