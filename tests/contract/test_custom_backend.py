"""The custom backend of the example keeps the contract, and the example runs."""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from kvstore.backends.base import Backend
from kvstore.testing import BackendTests, HoldingsTests, TierTests
from tests.project.tree import code_blocks

EXAMPLE = Path(__file__).parents[2] / "examples" / "custom_backend.py"


def _import(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # A tier finds the class under this name, like the class of an installed package.
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


example = _import("custom_backend", EXAMPLE)


def _import_page(directory: Path) -> tuple[ModuleType, ModuleType]:
    """Return the class and the suites of the page on custom backends, as the modules that the page names."""
    found = []
    for name, part in (("my_backend", "class DictBackend"), ("test_my_backend", "class TestDictBackend")):
        texts = [each.text for each in code_blocks() if each.page == "docs/custom-backend.md" and part in each.text]
        path = directory / f"{name}.py"
        path.write_text(texts[0])
        found.append(_import(name, path))
    return found[0], found[1]


_DIRECTORY = tempfile.TemporaryDirectory(prefix="kvstore-test-page-")
# An I/O process imports the page's class from there.
sys.path.append(_DIRECTORY.name)
page, suites = _import_page(Path(_DIRECTORY.name))


@pytest.fixture(scope="session", autouse=True)
def _page_removed() -> Iterator[None]:
    """Remove the directory at the end; a worker of pytest-xdist ends without finalizers."""
    yield
    _DIRECTORY.cleanup()


class TestFilesBackend(BackendTests):
    """Backends with a directory of their own, which a restart finds again."""

    @pytest.fixture(autouse=True)
    def make_directory(self, tmp_path: Path) -> None:
        self.directory = tmp_path

    async def make_backend(self) -> Backend:
        backend: Backend = example.FilesBackend(example.FilesConfig(path=tempfile.mkdtemp(dir=self.directory)))
        return backend

    async def reopen(self, backend: Backend) -> Backend:
        again: Backend = example.FilesBackend(backend.config)
        return again


class TestFilesTier(TierTests):
    """A tier that does not know its backend's blocks, and looks them up."""

    authoritative = False

    @pytest.fixture(autouse=True)
    def make_directory(self, tmp_path: Path) -> None:
        self.directory = tmp_path

    def make_config(self) -> dict[str, Any]:
        return {"backend": "custom_backend:FilesBackend", "path": tempfile.mkdtemp(dir=self.directory)}


class TestBackendOfThePage(suites.TestDictBackend):  # type: ignore[misc, name-defined]
    """The class of the page passes the suite as printed there."""


class TestTierOfThePage(suites.TestDictTier):  # type: ignore[misc, name-defined]
    """A tier on the class of the page passes the suite as printed there."""


def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """The example stores a block and gets the same bytes back."""
    example.main()
    assert "the same bytes: True" in capsys.readouterr().out


class TestFilesHoldings(HoldingsTests):
    """The admin tools list, verify and remove the example's files."""

    make_directory = TestFilesBackend.make_directory
    make_backend = TestFilesBackend.make_backend
    reopen = TestFilesBackend.reopen
