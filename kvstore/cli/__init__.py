"""The command line tools: ``kvstore-bench`` measures tiers, ``kvstore`` maintains them.

The commands load the additional packages (extra ``cli``; ``plot`` for pictures); ``import kvstore`` never does.
"""

from __future__ import annotations

import importlib
import os
import sys

__all__ = ["bench_main", "main"]

_PACKAGES = {"typer", "click", "rich", "hdrh", "prometheus_client"}


def main() -> None:
    """Run ``kvstore``."""
    _run("run_kvstore")


def bench_main() -> None:
    """Run ``kvstore-bench``."""
    _run("run_bench")


def _run(name: str) -> None:
    if sys.stdout is None:
        # Closed by the parent process: output is discarded.
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - for the rest of the process.
    # Imported by name, because it needs additional packages.
    try:
        app = importlib.import_module("kvstore.cli.app")
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except ModuleNotFoundError as error:
        if error.name not in _PACKAGES:
            raise
        advice = "Install it: pip install 'vllm-kvstore[cli]'."
        print(f"The command line tools need {error.name!r}. {advice}", file=sys.stderr)
        raise SystemExit(2) from None
    getattr(app, name)()
