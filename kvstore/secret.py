"""Secrets: a string type that is never shown, and the display of values in errors without secrets."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Final

from kvstore.errors import AbsentError, ConfigError
from kvstore.files import FollowedFiles, shown_path

_ENV_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_VARIABLE: Final = re.compile(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)+", re.ASCII)
"""Usual variable names: capitals with an underscore. Keys in hexadecimal or base32 have no underscore."""
_SECRET_NAME: Final = re.compile(
    # A seal's 'keys' give the source of a keyring; by mistake they may contain the keyring itself.
    r"secret|passw|token|credential|private|api_?key|access_?key|^keys\b",
    re.IGNORECASE,
)
_USER_INFO: Final = re.compile(r"(\w+://)?\S*@")
_QUERY: Final = re.compile(r"(://[^\s?]*\?)\S*")
_FILE_BYTES_MAX: Final = 65536
"""Longest secret file; a longer one is the wrong file."""
_SHOWN_MAX: Final = 80
"""Maximum characters of a value in an error; enough to recognise it."""


class SecretStr:
    """A secret: never shown by ``repr``, ``str``, formatting, encoding or an error; only :meth:`reveal` returns it.

    Given literally, or better as ``{"env": "NAME"}`` or ``{"file": "/path"}``, which are read when the configuration is
    decoded (of a file, without a byte order mark and trailing line ends). A file is read again by :meth:`renew` and
    :meth:`refused`.

    ``may_be_absent``: whether a missing or empty file is an error only for :meth:`reveal`.

    Raises:
        ConfigError: Empty, of the wrong type, or the variable or file can't be read.
    """

    __slots__ = ("_check", "_source")

    _source: FollowedFiles[str]

    def __init__(self, value: str | Mapping[str, str] | SecretStr, *, may_be_absent: bool = False) -> None:
        self._check: Callable[[str], None] | None = None
        if isinstance(value, SecretStr):
            self._source, self._check = value._source, value._check
            return
        self._source = _source_of(value, self._checked)
        self._source.look()
        try:
            self.reveal()
        except AbsentError:
            if not may_be_absent:
                raise

    def reveal(self) -> str:
        """Return the secret itself. Use it immediately; never store it in an attribute, log line or error.

        Raises:
            AbsentError: Its file could not be read yet.
        """
        return self._source.value

    def require(self, check: Callable[[str], None]) -> None:
        """Set the check of the secret, which raises ConfigError without the secret; a later one of a file must pass it.

        Raises:
            ConfigError: The present secret does not pass.
        """
        self._check = check
        with suppress(AbsentError):
            check(self.reveal())

    async def renew(self) -> None:
        """Read the file again if it has changed; for use before a login. Waits for a fraction of a second at most."""
        await self._source.renew()

    def renew_now(self) -> None:
        """Do the same in the calling thread, for as long as it takes."""
        self._source.look()

    async def refused(self, used: str, complaint: str) -> bool:
        """Read the file again after a refusal of ``used``; return whether there is another secret to try.

        Otherwise the refusal is counted in ``refusals``, and logged at most once a minute, with ``complaint`` (the
        beginning of a sentence) and a remedy.
        """
        return await self._source.refused(used, complaint)

    @property
    def refusals(self) -> int:
        """Number of refusals after which the file had no other secret."""
        return self._source.refusals

    @property
    def path(self) -> str | None:
        """Path of the file; None for another source."""
        return next(iter(self._source.paths), None)

    def earlier(self, within_s: float) -> str | None:
        """Return the previous secret if it was replaced in the last ``within_s`` seconds, else None."""
        return self._source.previous if time.monotonic() - self._source.replaced_at <= within_s else None

    def _checked(self, secret: str) -> str:
        if self._check is not None:
            self._check(secret)
        return secret

    def __deepcopy__(self, memo: object) -> SecretStr:
        return self

    def __eq__(self, other: object) -> bool:
        return self.reveal() == other.reveal() if isinstance(other, SecretStr) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.reveal())

    def __repr__(self) -> str:
        return "SecretStr('***')"

    def __str__(self) -> str:
        return "***"

    def __format__(self, spec: str) -> str:
        return "***"


def shown(value: object, name: str = "") -> str:
    """Return the text of a value given for ``name`` in an error: shortened, and without secrets.

    Omits values of names that suggest a secret, text before an ``@`` (a URL's password), a URL's query, and the content
    of containers.
    """
    if _SECRET_NAME.search(name) or isinstance(value, SecretStr):
        return "(not shown)"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, Mapping):
        return "a JSON object"
    if isinstance(value, list | tuple):
        return "a list"
    if isinstance(value, str):
        text = repr(_QUERY.sub(r"\1***", _USER_INFO.sub(r"\1***@", value[:1000])))
    elif isinstance(value, float):
        text = repr(float(value))
    elif isinstance(value, int):
        # Python refuses to format an int of thousands of digits.
        text = repr(int(value)) if abs(value) < 10**80 else "a huge number"
    else:
        text = f"a value of type {type(value).__name__}"
    return text if len(text) <= _SHOWN_MAX else f"{text[:_SHOWN_MAX]}…"


def shown_variable(name: str) -> str:
    """Return the text in an error for a secret's environment variable, which may be the secret itself by mistake."""
    if name in os.environ or _VARIABLE.fullmatch(name):
        return repr(name)
    return f"({len(name)} characters; hidden, because it may be the secret)"


def _source_of(value: object, check: Callable[[str], str]) -> FollowedFiles[str]:
    """Return the source of a secret. Errors never show the value, which may be the secret in the wrong place."""
    if isinstance(value, str):
        return _fixed(value)
    if isinstance(value, Mapping) and len(value) == 1:
        kind, source = next(iter(value.items()))
        if kind == "env" and isinstance(source, str):
            return _fixed(_secret_from_env(source))
        if kind == "file" and isinstance(source, str):
            what = f"Secret file {shown_path(source)}"
            return FollowedFiles(
                [source], lambda contents: check(_decoded(contents[0], what)), "Secret file", _FILE_BYTES_MAX
            )
    raise ConfigError("The secret (not shown) is malformed. Expected text, {'env': 'NAME'} or {'file': '/path'}.")


def _fixed(secret: str) -> FollowedFiles[str]:
    if not secret:
        raise ConfigError("The secret is empty. Give it, or leave the key out.")
    return FollowedFiles((), lambda _: secret, "The secret")


def _decoded(content: bytes, what: str) -> str:
    try:
        secret = content.decode("utf-8-sig").rstrip("\r\n")
    except UnicodeDecodeError:
        # Not chained: that exception contains the file's content.
        raise ConfigError(f"{what} is not UTF-8 text. Write the secret as text.") from None
    if not secret:
        # Perhaps it is just being written.
        raise AbsentError(f"{what} is empty. Write the secret into it.")
    return secret


def _secret_from_env(name: str) -> str:
    if _ENV_NAME.fullmatch(name) is None:
        raise ConfigError("{'env': …} (not shown) names no environment variable. Expected a name such as 'KV_SECRET'.")
    secret = os.environ.get(name)
    if secret is None:
        raise ConfigError(f"Environment variable {shown_variable(name)} is not set. Set it for the engine's process.")
    return secret
