"""Processes that are killed while they store, and segments that are damaged: shared by checks of storage backends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def stored_before_kill(module: str, directory: Path) -> int:
    """Run a module, which prints ``stored N`` and goes on storing, and kill it then; return N."""
    command = [sys.executable, "-m", module, str(directory)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        line = next((line for line in child.stdout if line.startswith("stored ")), "")
        child.kill()
    assert line
    return int(line.removeprefix("stored "))


def damage(directory: Path) -> None:
    """Flip one byte in every 512 of every segment."""
    segments = list(directory.rglob("*.seg"))
    assert segments
    for path in segments:
        data = bytearray(path.read_bytes())
        data[100::512] = bytes(byte ^ 0xFF for byte in data[100::512])
        with path.open("r+b") as file:
            file.write(data)
