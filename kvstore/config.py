"""Configuration: msgspec structs, with sizes and durations as text, and errors with a remedy.

A backend's configuration extends :class:`TierConfig`; :func:`decode_config` creates it from JSON. Every invalid value
raises a :class:`~kvstore.errors.ConfigError` with the value (never a secret), the expected value and the remedy.
"""

from __future__ import annotations

import difflib
import functools
import os
import re
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Final, Literal, TypeVar

import msgspec

from kvstore.errors import AbsentError, ConfigError
from kvstore.quantity import ByteSize as ByteSize
from kvstore.quantity import Capacity as Capacity
from kvstore.quantity import Seconds as Seconds
from kvstore.secret import SecretStr as SecretStr
from kvstore.secret import shown

_T = TypeVar("_T", bound=msgspec.Struct)

_LABEL: Final = re.compile(r"[A-Za-z0-9_.:-]{0,64}", re.ASCII)
_AT_PATH: Final = re.compile(r" - at `(key in )?\$\.?([^`]*)`$")
_WORDS: Final = {
    "str": "text",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "object": "a JSON object",
    "array": "a list",
}
"""Names of JSON types in errors, by their names in msgspec."""
_MIB: Final = 1024**2
_GIB: Final = 1024**3


class EpochConfig(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Source of the name of the epoch that the engines of a fleet share."""

    file: str  # Path of a text file with the name. It is read when a tier opens and at each reset.

    def __post_init__(self) -> None:
        check_field(os.path.isabs(self.file), "file", self.file, "an absolute path, such as '/run/kvstore/epoch'")


class TierConfig(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Options of every tier; each backend's config extends them.

    In Python code, too, sizes, durations, capacities and secrets may be given as text. A subclass that checks its own
    fields in ``__post_init__`` calls ``super().__post_init__()`` first, and lists other spellings of its fields in
    ``aliases``.

    Attributes:
        namespace: Free-form string in the namespace; different values never share blocks.
        reset: Whether a reset of the engine's caches begins a new epoch (``"forget"``: earlier blocks are never found
            again) or keeps the tier's blocks (``"keep"``).
        epoch: Source of the epoch's name. None: the engine starts in the base epoch, and each reset begins a new epoch
            of this engine alone.
        codec: Codecs and seal of payloads, such as ``"byteplane+zstd:1"``; see docs/codecs.md.
        io: Host of the I/O side: a thread of this process, or a separate process. ``"auto"``: a process in an engine,
            except for what it keeps in memory or sends to peers, and a thread elsewhere.
        load_timeout: Time limit of a load job, plus the time for its bytes at ``bytes_per_second_min``.
        store_timeout: The same for a store job.
        lookup_timeout: Time limit of a lookup, after which it is a miss.
        bytes_per_second_min: Lowest useful rate of the medium.
        inflight_bytes: Maximum payload bytes in I/O.
        store_backlog_bytes: Payload bytes of stores waiting or in I/O, above which new stores are shed. kvstore's
            manager submits no more; further blocks wait in the primary tier.
        positive_ttl: Validity of the answer that a block is present; 0 queries the medium every time.
            No effect on an authoritative tier, such as a disk's.
        negative_ttl: Validity of the answer that a block is absent.
        breaker_failures: Consecutive failures that open the breaker.
        breaker_cooldown: First pause before an open breaker probes the medium; doubles with each failed probe.
        breaker_cooldown_max: Longest such pause.
        required: Whether an engine refuses to start when the tier can't be opened (false: it runs without the tier).
        label: Name of the tier in statistics and policies; empty for the backend's name.

    Raises:
        ConfigError: A value is out of range.
    """

    aliases: ClassVar[dict[str, str]] = {}
    """Field names by other common spellings; includes those of base classes."""

    has_own_load_breakers: ClassVar[bool] = False
    """Whether the backend has a breaker for each of its servers, so that failed loads do not stop the whole tier."""

    namespace: str = ""
    # A reset follows a change of the weights, which invalidates all earlier blocks.
    reset: Literal["forget", "keep"] = "forget"
    epoch: EpochConfig | None = None
    # Raw: the fastest on local media, and readable by every release.
    codec: str | list[str | dict[str, dict[str, Any]]] = "raw"
    io: Literal["auto", "thread", "process"] = "auto"
    # Recomputing a long prompt takes seconds; a load of more than five saves nothing.
    load_timeout: Seconds = Seconds(5)
    # No request waits for a store, but it pins slots; half a minute outlasts a stall of an SSD.
    store_timeout: Seconds = Seconds(30)
    # An unanswered lookup delays its request, and recomputing a short prompt takes about a second.
    lookup_timeout: Seconds = Seconds(1)
    # A tenth of a SATA SSD's rate, and about the rate of one stream from a slow object store.
    bytes_per_second_min: ByteSize = ByteSize(50 * _MIB)
    # Several hundred blocks of 2 MiB: more than any device queue needs, and little compared with the primary tier.
    inflight_bytes: ByteSize = ByteSize(_GIB)
    # Twice the bytes in I/O: one more round waits; further stores would only pin slots.
    store_backlog_bytes: ByteSize = ByteSize(2 * _GIB)
    # Blocks are evicted hours after their last use; a stale answer costs one failed load, which corrects it.
    positive_ttl: Seconds = Seconds(60)
    # Another engine may store the block at any moment; five seconds save queries and cost few hits.
    negative_ttl: Seconds = Seconds(5)
    # One failure may be chance, and a batch fails together; five consecutive ones mean that the medium is down.
    breaker_failures: int = 5
    # A short network problem lasts about a second.
    breaker_cooldown: Seconds = Seconds(1)
    # A recovered medium is used again within half a minute, and a dead one is probed twice a minute.
    breaker_cooldown_max: Seconds = Seconds(30)
    required: bool = True
    label: str = ""

    def __post_init__(self) -> None:
        for name, kind in _parsed_fields(type(self)).items():
            value = getattr(self, name)
            if value is not None and not isinstance(value, kind):
                msgspec.structs.force_setattr(self, name, _parsed(kind, value))
        if self.required:
            self.check_secrets()
        for name in ("load_timeout", "store_timeout", "lookup_timeout", "breaker_cooldown", "breaker_cooldown_max"):
            check_field(0 < getattr(self, name) <= 86400, name, getattr(self, name), "above 0 and at most one day")
        for name in ("bytes_per_second_min", "inflight_bytes", "store_backlog_bytes"):
            check_field(getattr(self, name) > 0, name, getattr(self, name), "at least 1 byte")
        check_field(
            self.breaker_cooldown_max >= self.breaker_cooldown,
            "breaker_cooldown_max",
            self.breaker_cooldown_max,
            f"at least breaker_cooldown ({float(self.breaker_cooldown)!r} s)",
        )
        check_field(1 <= self.breaker_failures <= 10**6, "breaker_failures", self.breaker_failures, "1 to 1000000")
        check_field(len(self.namespace) <= 1024, "namespace", self.namespace, "at most 1024 characters")
        label_ok = _LABEL.fullmatch(self.label) is not None
        check_field(label_ok, "label", self.label, "at most 64 letters, digits, '_', '.', ':' or '-'")

    def check_secrets(self) -> None:
        """Raise :class:`~kvstore.errors.AbsentError` for a secret whose file could not be read yet."""
        for name, secret in self.secrets.items():
            try:
                secret.reveal()
            except AbsentError as error:
                raise AbsentError(f"{name!r}: {error}") from None

    @property
    def secrets(self) -> dict[str, SecretStr]:
        """The secrets by the name of their option, including those of nested options."""
        return dict(_secrets_of(self))


def decode_config(cls: type[_T], value: Mapping[str, Any], *, where: str) -> _T:
    """Decode a JSON object into a config struct.

    Args:
        cls: The struct, usually a subclass of :class:`TierConfig`.
        where: Subject of error messages: ``"file tier"``.
    """
    if not isinstance(value, Mapping):
        # A text may hold secrets.
        found = "text" if isinstance(value, str | bytes) else shown(value)
        raise ConfigError(f"The configuration of the {where} is {found}. Expected a JSON object.")
    fields = _canonical_keys(cls, value, where)
    try:
        return msgspec.convert(fields, cls, dec_hook=_decode_hook)
    except msgspec.ValidationError as error:
        raise explained(error, cls, fields, where) from None


def encode_config(config: msgspec.Struct) -> dict[str, Any]:
    """Return a config as plain JSON values for display: sizes in bytes, durations in seconds, secrets masked."""
    plain: dict[str, Any] = msgspec.to_builtins(config, enc_hook=_encode_hook)
    return plain


def check_field(ok: bool, name: str, value: object, expected: str) -> None:
    """Raise a :class:`ConfigError` with the expected value of ``name``, unless ``ok``."""
    if not ok:
        raise ConfigError(f"{name!r} is {shown(value, name)}. Expected {expected}.")


def nearest_name(name: str, known: Iterable[str]) -> str | None:
    """Return the known name most similar to ``name``, ignoring case; None if none is similar."""
    by_lower = {candidate.lower(): candidate for candidate in known}
    # "secret_key" abbreviates "secret_access_key", although other names have more letters in common with it.
    words = name.lower()[:100].split("_")
    longer = [candidate for candidate in by_lower if len(words) > 1 and not set(words) - set(candidate.split("_"))]
    if longer:
        return by_lower[min(longer, key=len)]
    found = difflib.get_close_matches(name.lower()[:100], by_lower, n=1, cutoff=0.6)
    return by_lower[found[0]] if found else None


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """Return a suffix for errors about an unknown name with the most similar known name; empty if none is similar."""
    nearest = nearest_name(name, known) if isinstance(name, str) else None
    return f" Did you mean {nearest!r}?" if nearest else ""


@functools.cache
def _parsed_fields(cls: type[msgspec.Struct]) -> dict[str, type[Any]]:
    """Return the types of fields that parse text (``X`` for ``X`` or ``X | None``), by field name."""
    found: dict[str, type[Any]] = {}
    for field in msgspec.structs.fields(cls):
        for kind in _members(field.type):
            if kind in (ByteSize, Seconds, Capacity, SecretStr):
                found[field.name] = kind
    return found


def _members(kind: Any) -> tuple[Any, ...]:
    """Return the members of a union, or the type itself."""
    if isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union:
        return typing.get_args(kind)
    return (kind,)


def _decode_hook(kind: type[Any], value: Any) -> Any:
    if issubclass(kind, ByteSize | Seconds | Capacity | SecretStr):
        return _parsed(kind, value)
    if issubclass(kind, Path) and isinstance(value, str | os.PathLike):
        return Path(value)
    raise ConfigError(f"{shown(value)} can't become {kind.__name__}.")


def _parsed(kind: type[Any], value: Any) -> Any:
    # A file may be absent where a tier is not required, which is checked when all fields are known.
    return SecretStr(value, may_be_absent=True) if kind is SecretStr else kind(value)


def _secrets_of(config: msgspec.Struct) -> Iterator[tuple[str, SecretStr]]:
    for name in config.__struct_fields__:
        value = getattr(config, name)
        if isinstance(value, SecretStr):
            yield name, value
        elif isinstance(value, msgspec.Struct):
            for inner, secret in _secrets_of(value):
                yield f"{name}.{inner}", secret


def _encode_hook(value: Any) -> Any:
    if isinstance(value, ByteSize):
        return int(value)
    if isinstance(value, Seconds):
        return float(value)
    return str(value)


def _canonical_keys(cls: type[msgspec.Struct], value: Mapping[Any, Any], where: str) -> dict[str, Any]:
    """Replace aliases by field names; refuse unknown, duplicate and missing keys, also in nested structs."""
    fields = {field.encode_name: field for field in msgspec.structs.fields(cls)}
    aliases = _aliases_of(cls)
    found: dict[str, Any] = {}
    given_as: dict[str, str] = {}
    for key, item in value.items():
        name = aliases.get(key, key) if isinstance(key, str) else None
        if name not in fields:
            hint = did_you_mean(key, [*sorted(fields), *aliases])
            raise ConfigError(f"Unknown key {shown(key)} in {where}.{hint} Known: {', '.join(sorted(fields))}.")
        if name in found:
            both = _listed([given_as[name], key])
            raise ConfigError(f"{both} in the {where} mean the same. Give one of them.")
        given_as[name] = key
        nested = [kind for kind in _members(fields[name].type) if _is_struct(kind)]
        if nested and isinstance(item, Mapping):
            item = _canonical_keys(nested[0], item, f"{where}, {name!r}")
        found[name] = item
    missing = [name for name, field in fields.items() if field.required and name not in found]
    if missing:
        raise ConfigError(f"The {where} needs {_listed(missing)}{_such_as(fields[missing[0]].type)}.")
    return found


def _such_as(kind: Any) -> str:
    """Return an example of an option's value, for the error that it is missing; empty for types without one."""
    examples = {Capacity: "'500GiB', or '80%' of the filesystem", ByteSize: "'8GiB'", Seconds: "'30s'"}
    return next((f", such as {examples[each]}" for each in _members(kind) if each in examples), "")


def _aliases_of(cls: type[msgspec.Struct]) -> dict[str, str]:
    """Merge the aliases of a class and its bases."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        found |= vars(base).get("aliases", {})
    return found


def explained(error: msgspec.ValidationError, cls: type[Any], fields: Mapping[str, Any], where: str) -> ConfigError:
    """Convert msgspec's error to one with the key, the value and the expected value, for a Struct or a dataclass."""
    match = _AT_PATH.search(str(error))
    path = match[2] if match else ""
    cause = error.__cause__
    if isinstance(cause, ConfigError):
        return ConfigError(f"{where}, {path!r}: {cause}" if path else f"{where}: {cause}")
    reason = str(error)[: match.start()] if match else str(error)
    if reason.startswith("Invalid"):
        # msgspec quotes the value here; _shown_at() masks secrets.
        reason = "Expected one of " + _choices(cls, path)
    reason = re.sub(r", got `.*", "", reason)
    reason = re.sub(r"`([^`]*)`", lambda kinds: " or ".join(_WORDS.get(k, k) for k in kinds[1].split(" | ")), reason)
    return ConfigError(f"{where}: {path!r} is {_shown_at(fields, path)}. {reason}.")


def _choices(cls: type[Any], path: str) -> str:
    for field in msgspec.structs.fields(cls) if _is_struct(cls) else ():
        if field.encode_name == path:
            return ", ".join(repr(choice) for kind in _members(field.type) for choice in typing.get_args(kind))
    return "the known values"


def _shown_at(value: Any, path: str) -> str:
    """Show the value at a path of msgspec, such as ``retry.pauses[2]``."""
    for name in re.findall(r"[^.\[\]]+", path):
        if isinstance(value, Mapping) and name in value:
            value = value[name]
        elif isinstance(value, list | tuple) and name.isdecimal():
            value = value[int(name)]
        else:
            # An element of a dict or set, without a key in msgspec's path.
            return "wrong"
    return shown(value, path)


def _is_struct(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in names)
