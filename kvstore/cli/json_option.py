"""An option whose value is a JSON object."""

from __future__ import annotations

import json
from typing import Any

from kvstore.errors import ConfigError

__all__ = ["json_object"]


def json_object(text: str | None, option: str) -> dict[str, Any]:
    """Return the object that an option was given; empty without one.

    Args:
        text: As it was given.
        option: Name of the option, for errors.

    Raises:
        ConfigError: It is not a JSON object.
    """
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{option} is not valid JSON: {error.msg} at column {error.colno}. Give an object.") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{option} is {value!r}. Expected a JSON object.")
    return value
