#!/usr/bin/env python3
"""Draws docs/images/top.svg: the output of ``kvstore top`` for the pages in tests/cli/scrapes, in 80 columns.

.venv/bin/python scripts/make_top_picture.py
.venv/bin/python scripts/make_top_picture.py --record    with new pages of an engine started for this (a minute)
"""

from __future__ import annotations

import io
import random
import re
import sys
import tempfile
import time
from pathlib import Path
from urllib.request import urlopen

from rich.console import Console, Group
from rich.terminal_theme import MONOKAI

from kvstore.cli.top import Engine, frame_of, parse

ROOT = Path(__file__).resolve().parents[1]
PICTURE_FILE = ROOT / "docs/images/top.svg"
SCRAPES = ROOT / "tests/cli/scrapes"

_WIDTH = 80
_HEAD = "# Seconds: "
"""Beginning of a page's first line, which has the time of the scrape."""

# rich's own format refers to fonts on another host.
_FORMAT = """<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg" role="img"
 aria-label="kvstore top">
<style>
.{unique_id}-matrix {{ font-family: ui-monospace, Menlo, Consolas, monospace; font-size: {char_height}px;
 line-height: {line_height}px; font-variant-east-asian: full-width; }}
{styles}
</style>
<defs><clipPath id="{unique_id}-clip-terminal"><rect x="0" y="0" width="{terminal_width}" height="{terminal_height}"/>
</clipPath>{lines}</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}<g class="{unique_id}-matrix">{matrix}</g>
</g>
</svg>
"""


def picture() -> str:
    """Return the picture as SVG."""
    engine = Engine("127.0.0.1:8000")
    for path in sorted(SCRAPES.glob("*.txt")):
        head, text = path.read_text().split("\n", 1)
        engine.add(parse(text, float(head.removeprefix(_HEAD)))["0"])
    console = Console(width=_WIDTH, record=True, force_terminal=True, color_system="truecolor", file=io.StringIO())
    console.print(Group(*frame_of([engine], {}, _WIDTH)))
    return console.export_svg(title="kvstore top", theme=MONOKAI, code_format=_FORMAT, unique_id="top")


def record() -> None:
    """Start an engine with two tiers, send it requests, and write kvstore's metrics from its /metrics at two times."""
    sys.path.append(str(ROOT / "examples"))
    from serving import Server
    from tiny_llama import LlamaShape, make_tiny_llama

    with tempfile.TemporaryDirectory(prefix="kvstore-top-") as name:
        work = Path(name)
        shape = LlamaShape(layers=8, hidden=384, heads=6, kv_heads=6)
        model = make_tiny_llama(work / "model", shape)
        disk = {"path": str(work / "kv"), "capacity": "112MiB", "label": "disk", "codec": "byteplane+zstd:1"}
        far = {"backend": "memory", "capacity": "512MiB", "label": "far"}
        tiers = [{"type": "file", **disk}, {"type": "KVStoreTier", "module_path": "kvstore.vllm", **far}]
        offloading = {
            "spec_name": "KVStoreOffloadingSpec",
            "spec_module_path": "kvstore.vllm",
            "cpu_bytes_to_use": 64 << 20,
            "secondary_tiers": tiers,
        }
        # A device cache of two prompts, so that most blocks come from the tiers.
        small = ("--num-gpu-blocks-override", "40", "--max-model-len", "2048")
        server = Server("kvstore", model, work, offloading=offloading, block_tokens=64, arguments=small)
        try:
            server.wait_ready()
            prompts = [[2 + (seed * 37 + at * seed) % 500 for at in range(700)] for seed in range(1, 9)]
            for prompt in prompts:
                server.complete(prompt, 2)
            _save(1, server.port, started := time.monotonic())
            # Some prompts are repeated more often than others.
            for prompt in random.Random(1).choices(prompts, weights=range(1, len(prompts) + 1), k=24):
                server.complete(prompt, 2)
            _save(2, server.port, started)
        finally:
            server.kill()


def _save(number: int, port: int, started: float) -> None:
    """Write kvstore's metrics from a page of an engine."""
    with urlopen(f"http://127.0.0.1:{port}/metrics") as response:
        lines = response.read().decode().splitlines()
    kept = [line for line in lines if line.startswith("vllm:kvstore_") and "_created" not in line]
    kept = [re.sub(r'model_name="[^"]*"', 'model_name="tiny-llama"', line) for line in kept]
    text = "\n".join([f"{_HEAD}{time.monotonic() - started:.2f}", *kept])
    (SCRAPES / f"{number}.txt").write_text(f"{text}\n")


if __name__ == "__main__":
    if "--record" in sys.argv[1:]:
        record()
    PICTURE_FILE.write_text(picture())
