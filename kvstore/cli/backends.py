"""``kvstore-bench backends`` lists the known backends and whether each can be used here; ``kvstore new-backend``."""

from __future__ import annotations

import importlib.util
import inspect
import re
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Annotated, Any, Final

from kvstore.cli.command_line import Argument, JsonFlag, Option
from kvstore.cli.report import Report
from kvstore.cli.terminal import Column, print_json_text, print_line, print_table
from kvstore.errors import ConfigError
from kvstore.registry import BACKENDS

_COLUMNS = (
    Column("backend", "backend", left=True, style="bold"),
    Column("medium", "medium", left=True),
    Column("locality", "where", left=True),
    Column("authoritative", "authoritative", rank=1),
    Column("alignment", "align", rank=2),
    Column("about", "what", left=True),
)


def backends(json: JsonFlag = False) -> None:
    """List the backends: built in and installed by other packages."""
    rows = [_row(name) for name in BACKENDS.names()]
    if json:
        print_json_text(Report("backends", rows=rows).as_json())
    else:
        print_table(rows, _COLUMNS)


def _row(name: str) -> dict[str, Any]:
    try:
        cls = BACKENDS.find(name)
    except ConfigError as error:
        return {"backend": name, "usable": False, "about": str(error)}
    about = (inspect.getdoc(cls.config_type) or "").partition("\n")[0]
    return {
        "backend": name,
        "usable": True,
        "medium": cls.medium.value.lower(),
        "locality": cls.locality.value.lower(),
        "authoritative": bool(cls.authoritative),
        "alignment": cls.alignment,
        "about": about,
        "options": sorted(field for field in cls.config_type.__struct_fields__),
    }


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
    print_line(f"made {package}")
    print_line(f"install it in the engine's environment, which makes the type known: pip install -e '{package}[test]'")
    print_line(f"test it: cd {package} && pytest")
    print_line(
        f'use it: {{"type": "{name}", "path": "/mnt/nvme/{name}"}}; "path" (its path_option) is its own directory'
    )
