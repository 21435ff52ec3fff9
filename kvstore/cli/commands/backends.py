"""``kvstore-bench backends``: the known backends, and whether each can be used here."""

from __future__ import annotations

import inspect
from typing import Any

from kvstore.cli.command_line import JsonFlag
from kvstore.cli.reporting.report import Report
from kvstore.cli.reporting.terminal import Column, print_json_text, print_table
from kvstore.errors import ConfigError
from kvstore.registry import BACKENDS

_COLUMNS = (
    Column("backend", "backend", left=True, style="bold"),
    Column("medium", "medium", left=True),
    Column("locality", "where", left=True),
    Column("exclusive", "exclusive", rank=1),
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
        "exclusive": bool(cls.exclusive),
        "alignment": cls.alignment,
        "about": about,
        "options": sorted(field for field in cls.config_type.__struct_fields__),
    }
