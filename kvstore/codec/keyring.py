"""Keyring: the master keys of seals, their sources, and their rotation while a tier runs.

A keyring is a JSON document in a file or an environment variable::

    {"current": 2, "keys": {"1": "<base64>", "2": "<base64>"}, "salts": {"acme": "<base64>"}, "names": "<base64>"}

It is read at start, when used at an age above ``refresh``, and when a record has the id of a missing key. Seals use
keys derived from it by HKDF (RFC 5869), which are never stored. No error, log line or ``repr`` contains any part of a
key.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
import logging
import os
import stat
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec

from kvstore.bounded import BoundedDict
from kvstore.config import Seconds, check_field
from kvstore.errors import ConfigError
from kvstore.files import open_regular, shown_path
from kvstore.secret import shown_variable

logger = logging.getLogger("kvstore.codec")

KEY_BYTES: Final = 32
"""Length of every secret in a keyring."""

_KEY_ID_MAX: Final = 2**32 - 1
"""A key id has four bytes in a header."""
_DOCUMENT_BYTES_MAX: Final = 1 << 20
"""Longest keyring, with about ten thousand salts. A longer document is the wrong file."""
_UNKNOWN_PAUSE_S: Final = 1.0
"""Minimum time between readings for unknown key ids: forged records must not each cause a reading."""
_WARN_AGAIN_S: Final = 60.0
"""Interval of log lines for a continuing problem. A missing key or salt is logged once until the keyring changes, as it
is often intended."""
_DERIVED_MAX: Final = 1024
"""Derived keys kept, 32 bytes and some overhead each: one per writer whose records are read. Each start of an engine
is a new writer; deriving a key again takes microseconds."""
_OTHERS_MAY: Final = stat.S_IWGRP | stat.S_IRWXO
"""Permissions of a keyring that cause a warning. Group read is fine: clusters use it to pass secrets to services."""
_warned_modes: set[tuple[Path, int]] = set()
_WARNINGS_MAX: Final = 256
"""Maximum number of distinct problems logged: forged records may contain any key id."""


class KeySource(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Source of a keyring: exactly one of ``file`` and ``env``. It contains no secret itself."""

    file: Path | None = None  # Path of the document.
    env: str = ""
    """Environment variable with the document. It can't change while the process runs, so keys can't rotate."""
    # A removed key is forgotten within half a minute; reading a small file that often costs nothing.
    refresh: Seconds = Seconds(30)  # Age at which the document is read again when it is used.

    def __post_init__(self) -> None:
        if not isinstance(self.refresh, Seconds):
            msgspec.structs.force_setattr(self, "refresh", Seconds(self.refresh))
        given = sum(map(bool, (self.file, self.env)))
        if given != 1:
            raise ConfigError(f"'keys' names {given} sources. Expected exactly one of 'file' and 'env'.")
        # Not shown: it may be a key or the document itself.
        if self.env and not (self.env.isascii() and self.env.isidentifier()):
            raise ConfigError("'env' (not shown) names no environment variable. Expected a name such as 'KV_KEYS'.")
        check_field(0 < self.refresh <= 86400, "refresh", self.refresh, "above 0 and at most one day")

    def __str__(self) -> str:
        if self.file is not None:
            return f"file {shown_path(str(self.file))}"
        return f"environment variable {shown_variable(self.env)}"


@dataclass(frozen=True, slots=True)
class Keys:
    """The content of a keyring. Its ``repr`` shows no secret."""

    current: int  # Id of the sealing key.
    masters: Mapping[int, bytes] = field(repr=False)  # Master keys by id.
    salts: Mapping[str, bytes] | None = field(repr=False)
    """Secrets by the tier option ``namespace``; None if the keyring has no salts and uses master keys alone."""
    names: bytes = field(repr=False)  # Secret of keyed names; empty for none.
    _derived: BoundedDict[tuple[int, str, bytes], bytes] = field(
        default_factory=lambda: BoundedDict(_DERIVED_MAX), repr=False, compare=False
    )
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def has(self, key_id: int, user_namespace: str) -> bool:
        """Whether :meth:`derive` would return a key."""
        return key_id in self.masters and (self.salts is None or user_namespace in self.salts)

    def derive(self, key_id: int, user_namespace: str, context: bytes) -> bytes | None:
        """Return 32 bytes derived from a master key and a salt for a purpose; None if key or salt is missing."""
        master = self.masters.get(key_id)
        salt = b"" if self.salts is None else self.salts.get(user_namespace)
        if master is None or salt is None:
            return None
        place = (key_id, user_namespace, context)
        with self._lock:
            key = self._derived.get(place)
            if key is None:
                key = self._derived[place] = hkdf_sha256(master, salt, context)
            self._derived.move_to_end(place)
            return key


class Keyring:
    """The current keys of one tier. Threads may share it; only the constructor waits for I/O.

    A failed reading is logged and leaves the keys unchanged. A successful one replaces all keys, so a key removed from
    the document is forgotten.

    Raises:
        ConfigError: The document can't be read, or is not a keyring.
    """

    def __init__(self, source: KeySource, clock: Callable[[], float] = time.monotonic) -> None:
        self._source = source
        self._clock = clock
        self._lock = threading.Lock()
        self._reading = False
        self._warned_at: dict[tuple[str, int], float] = {}
        self._warned_missing: set[tuple[str, int]] = set()
        self._keys = _read_keys(source)
        self._read_at = clock()

    def __repr__(self) -> str:
        return f"Keyring({self._source}, current key {self._keys.current}, {'reading' if self._reading else 'read'})"

    @property
    def keys(self) -> Keys:
        """The keys as last read; if older than ``refresh``, a background reading starts."""
        keys = self._keys
        if self._clock() - self._read_at >= self._source.refresh:
            self._start_reading()
        return keys

    def note_unknown(self) -> None:
        """Note that a record has the id of a missing key, which may be newer than the last reading."""
        if self._clock() - self._read_at >= _UNKNOWN_PAUSE_S:
            self._start_reading()

    def warn(self, problem: str, key_id: int, what_to_do: str) -> None:
        """Log a problem with a key, at most once a minute per problem and key id."""
        now = self._clock()
        with self._lock:
            last = self._warned_at.get((problem, key_id))
            if last is None and len(self._warned_at) >= _WARNINGS_MAX:
                return
            if last is not None and now - last < _WARN_AGAIN_S:
                return
            self._warned_at[problem, key_id] = now
        self._log(problem, key_id, what_to_do)

    def warn_of_missing(self, problem: str, key_id: int, what_to_do: str) -> None:
        """Log that a key or its salt is missing, once per key id until the keyring changes."""
        with self._lock:
            if (problem, key_id) in self._warned_missing or len(self._warned_missing) >= _WARNINGS_MAX:
                return
            self._warned_missing.add((problem, key_id))
        self._log(problem, key_id, what_to_do)

    def _log(self, problem: str, key_id: int, what_to_do: str) -> None:
        logger.warning("Key %d %s (keyring: %s). %s", key_id, problem, self._source, what_to_do)

    def _start_reading(self) -> None:
        """Read the document on a thread, unless one is running: a slow filesystem must not delay blocks."""
        with self._lock:
            if self._reading:
                return
            self._reading = True
        try:
            threading.Thread(target=self._read, name="kvstore-keys", daemon=True).start()
        except RuntimeError as error:  # No thread can be started; the next use tries again.
            with self._lock:
                self._reading = False
            self.warn("is kept as it was", self._keys.current, f"{error}.")

    def _read(self) -> None:
        try:
            old, self._keys = self._keys, _read_keys(self._source)
            if _what_is_there(old) != _what_is_there(self._keys):
                with self._lock:
                    self._warned_missing.clear()
        except ConfigError as error:
            self.warn("is kept as it was", self._keys.current, f"{error}")
        finally:
            self._read_at = self._clock()
            with self._lock:
                self._reading = False


def hkdf_sha256(secret: bytes, salt: bytes, context: bytes) -> bytes:
    """Return 32 bytes derived from a secret: HKDF-SHA256 (RFC 5869), one block of output."""
    extracted = hmac.digest(salt or bytes(hashlib.sha256().digest_size), secret, "sha256")
    return hmac.digest(extracted, context + b"\x01", "sha256")


def new_document(user_namespaces: tuple[str, ...] = ()) -> str:
    """Return a new keyring with key 1, a secret for names, and a salt per user namespace. It is a secret."""
    fresh = {name: _new_secret() for name in user_namespaces}
    document: dict[str, Any] = {"current": 1, "keys": {"1": _new_secret()}, "names": _new_secret()}
    return json.dumps({**document, "salts": fresh} if fresh else document, indent=1)


def _new_secret() -> str:
    return base64.b64encode(os.urandom(KEY_BYTES)).decode()


def _read_keys(source: KeySource) -> Keys:
    if source.file is not None:
        data = _read_file(source.file)
    else:
        text = os.environ.get(source.env)
        if text is None:
            raise ConfigError(f"The keyring's {source} is not set. Give the name of one that the engine's process has.")
        data = text.encode(errors="replace")
    if len(data) > _DOCUMENT_BYTES_MAX:
        raise ConfigError(f"The keyring in {source} is longer than {_DOCUMENT_BYTES_MAX} bytes. Is it the right one?")
    return _parse(data, str(source))


def _read_file(path: Path) -> bytes:
    try:
        with open_regular(path) as file:
            _warn_of_mode(path, stat.S_IMODE(os.fstat(file.fileno()).st_mode))
            return file.read(_DOCUMENT_BYTES_MAX + 1)
    except OSError as error:
        shown = shown_path(str(path))
        raise ConfigError(
            f"The keyring {shown} can't be read: {error.strerror}. Give a path that the engine can read."
        ) from None
    except ValueError:
        # A path with a zero byte, which the text of the error may quote.
        raise ConfigError("The keyring's file (not shown) is not a path. Give the path of a file.") from None


def _warn_of_mode(path: Path, mode: int) -> None:
    """Warn, once per file and mode, if other users can access a keyring, or its group can change it."""
    if mode & _OTHERS_MAY and (path, mode) not in _warned_modes and len(_warned_modes) < _WARNINGS_MAX:
        _warned_modes.add((path, mode))
        logger.warning(
            "The keyring %s has mode %04o: others can read or change it, and so open and make records. Give it mode "
            "0600, or 0440 for its group to read.",
            shown_path(str(path)),
            mode,
        )


def _what_is_there(keys: Keys) -> tuple[frozenset[int], frozenset[str] | None]:
    return frozenset(keys.masters), None if keys.salts is None else frozenset(keys.salts)


def _parse(data: bytes, where: str) -> Keys:
    """Parse a document. Errors show no part of it, because it may be a key in the wrong place."""
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        # Not chained: that exception carries the document.
        raise ConfigError(f"The keyring in {where} (not shown) is not JSON. Expected an object with 'keys'.") from None
    known = {"current", "keys", "names", "salts"}
    if not isinstance(document, dict) or not document.keys() <= known:
        expected = ", ".join(sorted(known))
        raise ConfigError(f"The keyring in {where} (not shown) is not an object. Expected one with {expected} only.")
    masters: dict[int, bytes] = {}
    for key_id, text in _section(document, "keys", where).items():
        if not (key_id.isascii() and key_id.isdecimal() and len(key_id) <= 10 and 1 <= int(key_id) <= _KEY_ID_MAX):
            raise ConfigError(f"The keyring in {where} has a key id (not shown) outside of 1 to 2**32 - 1.")
        masters[int(key_id)] = _secret(text, f"key {int(key_id)}", where)
    current = document.get("current")
    if not isinstance(current, int) or isinstance(current, bool) or current not in masters:
        raise ConfigError(f"The keyring in {where} has no 'current' that is one of its key ids. Name one.")
    salts = None
    if "salts" in document:
        salts = {name: _secret(text, "a salt", where) for name, text in _section(document, "salts", where).items()}
    names = _secret(document["names"], "'names'", where) if "names" in document else b""
    return Keys(current, masters, salts, names)


def _section(document: Mapping[str, Any], name: str, where: str) -> Mapping[str, Any]:
    found = document.get(name)
    if not isinstance(found, dict):
        raise ConfigError(f"The keyring in {where} has no object {name!r}. Expected names and secrets in base64.")
    return found


def _secret(text: object, what: str, where: str) -> bytes:
    try:
        secret = base64.b64decode(text, validate=True) if isinstance(text, str) else b""
    except (binascii.Error, ValueError):
        secret = b""
    if len(secret) != KEY_BYTES:
        raise ConfigError(
            f"The secret (not shown) of {what} in the keyring in {where} is not {KEY_BYTES} bytes in base64."
        )
    return secret
