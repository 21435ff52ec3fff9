"""From names to classes: built in, installed, or by path; and the errors for wrong names."""

from __future__ import annotations

import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from kvstore.backends.base import Backend
from kvstore.backends.memory import MemoryBackend
from kvstore.errors import ConfigError
from kvstore.registry import BACKENDS, CODECS, Registry
from tests.project.tree import ROOT


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a directory on the import path; modules imported from it are unloaded afterwards."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    return tmp_path


def test_built_in_names() -> None:
    """The shipped backends have names."""
    assert BACKENDS.find("memory") is MemoryBackend
    assert {"file", "memory"} <= set(BACKENDS.names())
    for name in BACKENDS.names():
        assert issubclass(BACKENDS.find(name), Backend), name


def test_names_are_listed_without_an_import() -> None:
    """Listing names imports nothing, so optional packages need not be installed."""
    registry = Registry("codec", base="no.such:Base", builtin={"a": "no.such.module:Class"}, group="kvstore.nothing")
    assert registry.names() == ["a"]


def test_a_class_by_its_path(modules: Path) -> None:
    """``module:Class`` names any class, including nested ones."""
    (modules / "own_backends.py").write_text(
        "from kvstore.backends.memory import MemoryBackend\n"
        "class Own(MemoryBackend):\n"
        "    name = 'own'\n"
        "class Box:\n"
        "    Inner = Own\n"
    )
    assert BACKENDS.find("own_backends:Own").name == "own"
    assert BACKENDS.find("own_backends:Box.Inner").name == "own"


def test_an_installed_package_adds_names(modules: Path) -> None:
    """An entry point in the group adds a name, but can't override a built-in one."""
    (modules / "other_backends.py").write_text(
        "from kvstore.backends.memory import MemoryBackend\nclass Other(MemoryBackend):\n    pass\n"
    )
    info = modules / "other-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[kvstore.backends]\nother = other_backends:Other\nmemory = other_backends:Other\nlost = no_such_module:X\n"
    )
    assert [point.name for point in metadata.entry_points(group="kvstore.backends", name="other")] == ["other"]
    assert BACKENDS.find("other").__name__ == "Other"
    assert BACKENDS.find("memory") is MemoryBackend
    assert {"other", "lost"} <= set(BACKENDS.names())
    with pytest.raises(ConfigError, match=r"Unknown backend 'othr'\. .*Did you mean 'other'\?"):
        BACKENDS.find("othr")
    with pytest.raises(ConfigError, match="Backend 'lost' can't be imported: there is no module 'no_such_module'"):
        BACKENDS.find("lost")


def test_an_unknown_name() -> None:
    """The error lists the known names, the nearest, and the syntax for third-party classes."""
    with pytest.raises(ConfigError) as caught:
        BACKENDS.find("memroy")
    known = ", ".join(BACKENDS.names())
    assert str(caught.value) == (
        f"Unknown backend 'memroy'. Did you mean 'memory'? Known: {known}. For your own class give 'module:Class'."
    )
    with pytest.raises(ConfigError) as caught:
        BACKENDS.find("xyz")
    assert "Did you mean" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("", "Unknown backend ''"),
        (":Class", "is not of the form 'module:Class'"),
        ("json:", "is not of the form 'module:Class'"),
        ("no_such_module:Class", r"there is no module 'no_such_module'\. Check the spelling"),
        ("json.nothing:Class", r"there is no module 'json.nothing'\. Check the spelling"),
        ("json:JSONDecode", r"json has no 'JSONDecode'\. Did you mean 'JSONDecoder'\?"),
        ("json:loads", r"is a function, not a class\. Name a subclass of kvstore\.backends\.base\.Backend\."),
        ("json:JSONDecoder", r"is not a backend\. Derive the class from kvstore\.backends\.base\.Backend\."),
        ("kvstore.backends.simple:SimpleBackend", "is incomplete: it lacks exists_one, get_one_into, put_one"),
        ("needs_more:Class", r"there is no module 'no_such_package'\. It needs 'no_such_package'"),
        ("raises:Class", r"raises raised ZeroDivisionError: division by zero\."),
        ("leaves:Class", r"leaves raised SyntaxError"),
    ],
)
def test_invalid_backend_names_are_config_errors(name: str, text: str, modules: Path) -> None:
    """Any wrong name gives one ``ConfigError`` with the problem and a solution."""
    (modules / "needs_more.py").write_text("import no_such_package\n")
    (modules / "raises.py").write_text("1 / 0\n")
    (modules / "leaves.py").write_text("this is no Python\n")
    with pytest.raises(ConfigError, match=text) as caught:
        BACKENDS.find(name)
    assert name in str(caught.value)


def test_a_built_in_name_without_its_packages_names_the_extra(modules: Path) -> None:
    """If an extra's package is missing, the error says how to install it."""
    (modules / "needs_more.py").write_text("import no_such_package\n")
    registry = Registry(
        "backend",
        base="kvstore.backends.base:Backend",
        builtin={"mine": "needs_more:Class"},
        group="kvstore.nothing",
        extras={"mine": "more"},
    )
    with pytest.raises(ConfigError, match=r"no module 'no_such_package'.*pip install 'vllm-kvstore\[more\]'"):
        registry.find("mine")


def test_every_extra_of_a_name_is_one_of_the_package() -> None:
    """Every recommended extra exists."""
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for registry in (BACKENDS, CODECS):
        assert set(registry._extras) <= set(registry.names())
        assert set(registry._extras.values()) <= set(known)
