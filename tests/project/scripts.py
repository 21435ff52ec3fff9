"""Import of programs in scripts/, which is not a package: they are normally run by path."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from tests.project.tree import ROOT


def load_script(name: str) -> Any:
    """Import a module of scripts/, which may import other modules there."""
    folder = str(ROOT / "scripts")
    if folder not in sys.path:
        sys.path.append(folder)
    return importlib.import_module(name)
