"""``kvstore new-backend``: the package of a backend of one's own, with a passing test module."""

from __future__ import annotations

import importlib.util
import re
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Annotated, Final

from kvstore.cli.command_line import Argument, Option
from kvstore.cli.reporting.terminal import print_line
from kvstore.errors import ConfigError
from kvstore.registry import BACKENDS

_NAME: Final = re.compile("[a-z][a-z0-9_]*")
_TEMPLATES: Final = {"pyproject.toml": "pyproject.toml", "backend.py": "{}.py", "test_backend.py": "test_{}.py"}

_Name = Annotated[str, Argument(metavar="NAME", help="Name of the backend, its module and its directory.")]
_Out = Annotated[Path, Option("--out", "-o", metavar="DIR", help="Directory in which the package's is made.")]


def new_backend_command(name: _Name, out: _Out = Path()) -> None:
    """Write the package of a backend of your own. Three methods and a test module that passes."""
    if not _NAME.fullmatch(name):
        raise ConfigError(f"NAME is {name!r}. Expected small letters, digits and underscores, such as 'my_medium'.")
    if name in BACKENDS.names() or importlib.util.find_spec(name) is not None:
        raise ConfigError(f"NAME is {name!r}, which is a backend or a Python module already. Choose another name.")
    title = "".join(part.capitalize() for part in name.split("_")) + "Backend"
    package = out / name
    try:
        package.mkdir()
        for template, written in _TEMPLATES.items():
            text = (files("kvstore.cli") / "templates" / f"{template}.txt").read_text()
            (package / written.format(name)).write_text(Template(text).substitute(name=name, title=title))
    except OSError as error:
        raise ConfigError(f"{str(package)!r} can't be made: {error.strerror}. Give another NAME or --out.") from error
    print_line(f"made {package}; test it: cd {package} && pip install -e '.[test]' && pytest")
    print_line(f'use it: {{"type": "{name}", "path": "/mnt/nvme/{name}"}}')
