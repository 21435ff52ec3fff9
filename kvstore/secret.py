"""Secrets: a string type that is never shown, and the display of values in errors without secrets."""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Callable, Mapping
from typing import BinaryIO, Final

from kvstore.errors import ConfigError

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
    decoded (without trailing line ends of a file).

    Raises:
        ConfigError: Empty, of the wrong type, or the variable or file can't be read.
    """

    __slots__ = ("_value",)

    def __init__(self, value: str | Mapping[str, str] | SecretStr) -> None:
        self._value = _parse_secret(value)

    def reveal(self) -> str:
        """Return the secret itself. Use it immediately; never store it in an attribute, log line or error."""
        return self._value

    def __eq__(self, other: object) -> bool:
        return self._value == other._value if isinstance(other, SecretStr) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._value)

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


def shown_path(text: str) -> str:
    """Return the text in an error for a secret's path, which may be the secret itself by mistake.

    A path is shown if it exists, or if its directory exists (other than ``/`` and the current one). Otherwise only the
    existing directories and the length are shown, because half of all keys in base64 contain a ``/``.
    """
    parent = text.rpartition("/")[0]
    if _is_there(text, os.path.lexists) or (parent.strip("/.") and _is_there(parent, os.path.isdir)):
        return repr(text)
    while parent.strip("/.") and not _is_there(parent, os.path.isdir):
        parent = parent.rpartition("/")[0]
    below = f" below {parent!r}" if parent.strip("/.") else ""
    return f"(a path of {len(text)} characters{below}; hidden, because it does not exist and may be the value itself)"


def shown_variable(name: str) -> str:
    """Return the text in an error for a secret's environment variable, which may be the secret itself by mistake."""
    if name in os.environ or _VARIABLE.fullmatch(name):
        return repr(name)
    return f"({len(name)} characters; hidden, because it may be the secret)"


def _is_there(text: str, test: Callable[[str], bool]) -> bool:
    try:
        return test(text)
    except (OSError, ValueError):  # Longer than any path, or with a zero byte.
        return False


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a regular file for reading; FIFOs and devices, which could block forever, are refused.

    Raises:
        OSError: The file can't be opened, or is not a regular file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file")
    return open(descriptor, "rb")


def _parse_secret(value: object) -> str:
    """Return the secret. Errors never show the value, which may be the secret in the wrong place."""
    if isinstance(value, SecretStr):
        return value.reveal()
    secret: str | None = None
    if isinstance(value, str):
        secret = value
    elif isinstance(value, Mapping) and len(value) == 1:
        kind, source = next(iter(value.items()))
        if kind == "env" and isinstance(source, str):
            secret = _secret_from_env(source)
        elif kind == "file" and isinstance(source, str):
            secret = _secret_from_file(source)
    if secret is None:
        raise ConfigError("The secret (not shown) is malformed. Expected text, {'env': 'NAME'} or {'file': '/path'}.")
    if not secret:
        raise ConfigError("The secret is empty. Give it, or leave the key out.")
    return secret


def _secret_from_env(name: str) -> str:
    if _ENV_NAME.fullmatch(name) is None:
        raise ConfigError("{'env': …} (not shown) names no environment variable. Expected a name such as 'KV_SECRET'.")
    secret = os.environ.get(name)
    if secret is None:
        raise ConfigError(f"Environment variable {shown_variable(name)} is not set. Set it for the engine's process.")
    return secret


def _secret_from_file(path: str) -> str:
    try:
        with open_regular(path) as file:
            data = file.read(_FILE_BYTES_MAX + 1)
        if len(data) > _FILE_BYTES_MAX:
            raise ConfigError(
                f"Secret file {shown_path(path)} is not a regular file of at most {_FILE_BYTES_MAX} bytes."
            )
        return data.decode().rstrip("\r\n")
    except UnicodeDecodeError:
        # Not chained: that exception contains the file's content.
        raise ConfigError(f"Secret file {shown_path(path)} is not UTF-8 text. Write the secret as text.") from None
    except (OSError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        reason = error.strerror if isinstance(error, OSError) else "bad path"
        raise ConfigError(
            f"Secret file {shown_path(path)} can't be read: {reason}. Give a path the engine can read."
        ) from None
