"""The chain: the steps in a tier's ``codec`` option, and their number in records.

The number is a header's ``codec_chain``: up to four wire ids of eight bits, the step applied first in the lowest byte;
0 is a raw payload. Calls of codecs are guarded: a third-party codec with a defect costs only its own blocks.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from kvstore.codec.base import THIRD_PARTY_WIRE_ID_MIN, Codec, CodecContext, Seal, Step
from kvstore.config import decode_config
from kvstore.errors import ConfigError
from kvstore.secret import shown

RAW: Final = 0
"""Chain of a raw payload."""

STEPS_MAX: Final = 4
"""Maximum number of steps: the header's field has four bytes."""

AUTO: Final = "auto"
"""Name for byteplane and zstd, applied only while they are worthwhile."""

ChainConfig: TypeAlias = str | Sequence[str | Mapping[str, Mapping[str, Any]]]
"""Type of the option ``codec``: ``"byteplane+zstd:1"``, or a list of such text and of ``{"name": {options}}``."""

FindStep: TypeAlias = Callable[[str], type[Step]]
"""From a step's name to its class; raises ConfigError."""

_NUMBER: Final = re.compile(r"[+-]?\d+(\.\d+)?")
"""An argument after a name and a colon; other text after a colon is the class in ``"module:Class"``."""
_SEAL_STARTS: Final = ("aead:", "mac:")
"""Inline-seal prefixes; never echo what follows, which is most likely a key."""


logger = logging.getLogger("kvstore.codec")

_WARNED_MAX: Final = 64
"""Maximum number of distinct defects logged per process, so that foreign records cannot fill the log."""

_warned: set[tuple[str, str, str]] = set()


@dataclass(frozen=True, slots=True)
class StepSpec:
    """A configured step."""

    name: str  # Its name, or ``"module:Class"``.
    argument: str | None = None  # Text after the name and a colon; None without one.
    options: Mapping[str, Any] = field(default_factory=dict)


_AUTO_STEPS: Final = (StepSpec("byteplane"), StepSpec("zstd", "1"))
"""Steps of ``"auto"``: 1 is the fastest level that benefits from the planes."""


@dataclass(frozen=True, slots=True)
class CodecChain:
    """The steps of one tier."""

    codecs: tuple[Codec, ...] = ()  # The codecs, in the order of encoding.
    seal: Seal | None = None  # The seal, applied last; None for none.
    auto: Mapping[str, Any] | None = None
    """Options of ``"auto"``, which applies the codecs only while they are worthwhile; None to apply them always."""

    @property
    def is_raw(self) -> bool:
        """Whether payloads are stored unchanged."""
        return not self.codecs and self.seal is None

    def wire(self, *, encoded: bool) -> int:
        """Return the number of the chain for records with or without encoding."""
        steps: list[Step] = [*self.codecs] if encoded else []
        return pack_chain([step.wire_id for step in [*steps, *([self.seal] if self.seal else [])]])


def parse_chain(value: ChainConfig) -> tuple[StepSpec, ...]:
    """Read a ``codec`` option; empty for ``"raw"``."""
    specs: list[StepSpec] = []
    for item in [value] if isinstance(value, str) else value:
        if isinstance(item, str):
            specs.extend(_parse_text(item))
        elif len(item) == 1:
            ((name, options),) = item.items()
            if not isinstance(options, Mapping):
                raise ConfigError(f"The options (not shown) of codec {name!r} are wrong. Expected a JSON object.")
            specs.append(StepSpec(name, None, options))
        else:
            raise ConfigError(f"'codec' has {shown(item)}. Expected text, or an object such as {{'zstd': {{}}}}.")
    if any(spec.name == "raw" for spec in specs):
        if len(specs) > 1 or specs[0].options or specs[0].argument:
            raise ConfigError(f"'codec' is {shown(value)}. 'raw' means none: leave it out, or the others.")
        return ()
    if not specs:
        raise ConfigError(f"'codec' is {shown(value)}. Expected at least one codec; for none write 'raw'.")
    return tuple(specs)


def build_chain(value: ChainConfig, context: CodecContext, find: FindStep) -> CodecChain:
    """Create the steps of a ``codec`` option. ``find``: returns the class of a step's name."""
    specs = list(parse_chain(value))
    auto: Mapping[str, Any] | None = None
    for i, spec in enumerate(specs):
        if spec.name == AUTO:
            if i or spec.argument:
                raise ConfigError(f"'codec' is {shown(value)}. Expected 'auto' first and without an argument.")
            auto = spec.options
            specs[:1] = _AUTO_STEPS
            break
    steps = [_make_step(spec, context, find) for spec in specs]
    seals = [step for step in steps if isinstance(step, Seal)]
    codecs = [step for step in steps if isinstance(step, Codec)]
    if auto is not None and codecs[2:]:
        raise ConfigError(f"'codec' is {shown(value)}. 'auto' brings its own codecs; only a seal may follow it.")
    if seals and (len(seals) > 1 or steps[-1] is not seals[0]):
        raise ConfigError(f"'codec' is {shown(value)}. Expected at most one of 'aead' and 'mac', as its last step.")
    # A step may have no effect on these blocks.
    codecs = [codec for codec in codecs if codec.wire_id]
    if len(codecs) + len(seals) > STEPS_MAX:
        raise ConfigError(f"'codec' has {len(codecs) + len(seals)} steps. Expected at most {STEPS_MAX}.")
    return CodecChain(tuple(codecs), seals[0] if seals else None, auto)


def pack_chain(wire_ids: Sequence[int]) -> int:
    """Return the number of a chain of steps, given in the order of encoding."""
    return sum(wire_id << (8 * place) for place, wire_id in enumerate(wire_ids))


def unpack_chain(chain: int) -> tuple[int, ...] | None:
    """Return the wire ids of a chain in the order of encoding; None if the chain is invalid (has a gap)."""
    wire_ids = tuple(chain.to_bytes(STEPS_MAX, "little").rstrip(b"\0"))
    return None if 0 in wire_ids else wire_ids


def encode_all(
    codecs: Sequence[Codec],
    sources: Sequence[memoryview],
    targets: Sequence[memoryview],
    spares: Sequence[memoryview],
) -> list[int | None]:
    """Apply codecs to payloads, one after the other.

    Args:
        codecs: The codecs; at least one.
        targets: Buffers for the results; each at least as long as its source.

    Returns:
        Bytes in each target; None if the result of a codec would not fit, or the codec has a defect.
    """
    sizes: list[int | None] = [source.nbytes for source in sources]
    at = sources
    for i, codec in enumerate(codecs):
        # Codecs alternate between both sides such that the last one writes to the targets.
        out = targets if (len(codecs) - 1 - i) % 2 == 0 else spares
        live = [place for place, size in enumerate(sizes) if size is not None]
        cut = [at[place][: sizes[place]] for place in live]
        rooms = [out[place][: sources[place].nbytes] for place in live]
        for place, size in zip(live, _encode_guarded(codec, cut, rooms), strict=True):
            sizes[place] = size
        at = out
    return sizes


def _encode_guarded(codec: Codec, sources: Sequence[memoryview], targets: Sequence[memoryview]) -> Sequence[int | None]:
    """Return the sizes from ``codec.encode``; after a defect, None for every payload: they are stored raw."""
    sizes = _sizes_of(codec, "encode", lambda: codec.encode(sources, targets), targets)
    return [None] * len(sources) if sizes is None else sizes


def decode_guarded(
    codec: Codec, wire_id: int, sources: Sequence[memoryview], targets: Sequence[memoryview]
) -> tuple[Sequence[int | None], bool]:
    """Return the sizes from ``codec.decode``, and False if the codec showed a defect.

    After a failed batch, the codec gets the payloads one by one, so that one payload does not fail the others.
    """
    sizes = _sizes_of(codec, "decode", lambda: codec.decode(wire_id, sources, targets), targets)
    if sizes is not None:
        return sizes, True
    if len(sources) == 1:
        return [None], False
    alone = [decode_guarded(codec, wire_id, [one], [room])[0] for one, room in zip(sources, targets, strict=True)]
    return [size for (size,) in alone], False


def _parse_text(text: str) -> list[StepSpec]:
    specs = []
    for part in text.split("+"):
        whole = part.strip()
        if not whole:
            raise ConfigError(f"'codec' is {shown(text)}. Expected names with '+' between them.")
        name, _, argument = whole.rpartition(":")
        if name and _NUMBER.fullmatch(argument):
            specs.append(StepSpec(name, argument))
        elif whole.startswith(_SEAL_STARTS):
            raise ConfigError("'codec' has text (not shown) behind a seal. Expected options: {'aead': {'keys': {…}}}.")
        else:
            specs.append(StepSpec(whole))
    return specs


def _make_step(spec: StepSpec, context: CodecContext, find: FindStep) -> Step:
    cls = find(spec.name)
    options = dict(spec.options)
    if spec.argument is not None:
        if not cls.shorthand:
            raise ConfigError(f"Codec {spec.name!r} takes no value after a colon, but got {spec.argument!r}.")
        options[cls.shorthand] = float(spec.argument) if "." in spec.argument else int(spec.argument)
    shipped = cls.__module__.split(".")[0] == "kvstore"
    for wire_id in cls.wire_ids:
        if not (1 if shipped else THIRD_PARTY_WIRE_ID_MIN) <= wire_id <= 255:
            raise ConfigError(f"Codec {spec.name!r} has wire id {wire_id}. Expected {THIRD_PARTY_WIRE_ID_MIN} to 255.")
    return cls(decode_config(cls.options_type, options, where=f"codec {spec.name!r}"), context)


def _sizes_of(
    codec: Codec, method: str, work: Callable[[], Sequence[int | None]], targets: Sequence[memoryview]
) -> Sequence[int | None] | None:
    """Return the sizes from a call; None if it raises or returns impossible sizes."""
    try:
        sizes = list(work())
        if len(sizes) == len(targets) and all(
            size is None or 0 <= size <= room.nbytes for size, room in zip(sizes, targets, strict=True)
        ):
            return sizes
        defect = "gave sizes that its targets don't have"
    # Any exception: the blocks are stored raw or count as misses. Not kept, because its traceback holds views of slots.
    except Exception as error:
        defect = f"raised {type(error).__name__}"
    _warn(codec, method, defect)
    return None


def _warn(codec: Codec, method: str, defect: str) -> None:
    path = f"{type(codec).__module__}:{type(codec).__qualname__}"
    if (path, method, defect) not in _warned and len(_warned) < _WARNED_MAX:
        _warned.add((path, method, defect))
        what = "stored as they are" if method == "encode" else "misses"
        logger.warning("Codec '%s' %s in %s(), which is a defect of it. Its blocks are %s.", path, defect, method, what)
