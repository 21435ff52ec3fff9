"""Options of a command from a TOML file; the command line overrides them."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Annotated, Any

from kvstore.cli.command_line import Context, Option
from kvstore.config import nearest_name
from kvstore.errors import ConfigError

__all__ = ["DefaultsFile"]


def _read(ctx: Context, path: Path | None) -> None:
    """Make the file's values the defaults of the command's options."""
    if path is None:
        return
    try:
        given = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config {str(path)!r} can't be read: {error.strerror}. Give a TOML file.") from error
    except ValueError as error:
        raise ConfigError(f"--config {str(path)!r} is not TOML: {error}. Give options such as: runs = 3") from None
    known = {parameter.name: parameter for parameter in ctx.command.params if parameter.name not in (None, "config")}
    found: dict[str, Any] = {}
    for key, value in given.items():
        name = key.replace("-", "_")
        if name not in known:
            near = nearest_name(name, [str(each) for each in known])
            hint = f" Did you mean {near.replace('_', '-')!r}?" if near else ""
            raise ConfigError(f"--config {str(path)!r}: there is no option {key!r}.{hint}")
        many = known[name].nargs != 1 or getattr(known[name], "multiple", False)
        values = value if isinstance(value, list) else [value]
        texts = [json.dumps(each) if isinstance(each, dict) else each for each in values]
        found[name] = texts if many else ",".join(map(str, texts)) if isinstance(value, list) else texts[0]
    ctx.default_map = {**(ctx.default_map or {}), **found}


DefaultsFile = Annotated[
    Path | None,
    Option(
        "--config", metavar="FILE", is_eager=True, callback=_read, expose_value=False,
        help="A TOML file with options, such as: runs = 3. Options of the command line override it.",
    ),
]  # fmt: skip
