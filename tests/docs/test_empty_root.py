"""The pages have the blocks and commands that ``make test-docs`` runs in an empty Debian."""

from __future__ import annotations

import contextlib
import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from tests.docs import empty_root


class Recorder(empty_root.EmptyRoot):
    """Records scripts without running them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.scripts: list[str] = []
        for name in ("tmp", "user", "etc", "mnt"):
            (path / name).mkdir()

    def shell(self, script: str, **_: Any) -> str:
        """Record a script."""
        self.scripts.append(script)
        return ""


@pytest.mark.parametrize("page", empty_root.PAGES)
def test_pages_install_kvstore_and_configure_one_tier(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each page installs kvstore and configures an engine of one tier."""
    engines: list[str] = []
    monkeypatch.setattr(empty_root, "check_restart", lambda root, script, env=None: engines.append(script))
    for name in ("running_redis", "running_s3"):
        monkeypatch.setattr(empty_root, name, lambda server: contextlib.nullcontext(server))
    root = Recorder(tmp_path)
    empty_root.PAGES[page](root)
    assert root.scripts[0].startswith("pip install")
    words = shlex.split(engines[0])
    assert words[:4] == ["vllm", "serve", "MODEL", "--kv-transfer-config"]
    tiers = json.loads(words[4])["kv_connector_extra_config"]["secondary_tiers"]
    assert len(tiers) == 1
