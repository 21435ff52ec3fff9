"""KV cache events in the form of each version of vLLM: its fields, medium, locality, and one event a job."""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.kv_offload.base import Locality, Medium

from kvstore.vllm import compat
from kvstore.vllm.spec import KVStoreOffloadingSpec
from tests.vllm.harness import Driver, key_of
from tests.vllm.versions import INSTALLED, VERSIONS, is_there, overlay

OLD = {"keys": None, "medium": None, "removed": None, "locality": "None"}
OWNED = {**OLD, "ownership": "None", "removal_expected": "False"}
FIELDS = {version: OWNED for version in VERSIONS} | {
    "0.28.0": OLD,
    "0.33.0": {**OWNED, "metadata_only": "False"},
}
"""Fields of ``OffloadingEvent`` with the text of their defaults, by version."""


def event_class(version: str) -> type[Any]:
    """Return a class of the shape that events have in a version."""
    parts: list[tuple[str, Any, Any]] = [
        (name, Any, dataclasses.field() if default is None else dataclasses.field(default=ast.literal_eval(default)))
        for name, default in FIELDS[version].items()
    ]
    return dataclasses.make_dataclass("OffloadingEvent", parts)


def test_the_recorded_fields_are_those_of_the_versions() -> None:
    """Of each version that is here; read as text, as only one can be imported."""
    found = importlib.util.find_spec("vllm")
    assert found is not None and found.submodule_search_locations is not None
    packages = {version: overlay(version) / "vllm" for version in VERSIONS if is_there(version)}
    packages[INSTALLED] = Path(found.submodule_search_locations[0])
    for version, package in packages.items():
        tree = ast.parse((package / "v1/kv_offload/base.py").read_text())
        [event] = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "OffloadingEvent"]
        fields = [node for node in event.body if isinstance(node, ast.AnnAssign)]
        found_here = {ast.unparse(node.target): node.value and ast.unparse(node.value) for node in fields}
        assert found_here == FIELDS[version], version


@pytest.fixture(params=VERSIONS)
def driver(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, Driver]]:
    """Our manager with a tier, whose events have the shape of a version, and that version."""
    monkeypatch.setattr(compat, "OffloadingEvent", event_class(request.param))
    tier = {"type": "memory", "label": "fast", "locality": "REMOTE"}
    driver = Driver([tier], spec_class=KVStoreOffloadingSpec, events=True)
    yield request.param, driver
    driver.close()


def test_events_of_each_version(driver: tuple[str, Driver]) -> None:
    """A job is one event with exactly the version's fields; the primary tier has neither owner nor locality."""
    version, driven = driver
    rows = driven.slots
    waves = [[key_of(wave * rows + i) for i in range(rows)] for wave in range(2)]
    for wave in waves:
        driven.store(wave)
    driven.settle()
    driven.step()
    owned = "ownership" in FIELDS[version]

    def shown(event: Any) -> tuple[Any, ...]:
        assert {field.name for field in dataclasses.fields(event)} == FIELDS[version].keys()
        owner = (event.ownership, event.removal_expected) if owned else ()
        return (event.medium, event.locality, event.removed, *owner)

    primary = [event for event in driven.events if event.locality is None]
    below = [event for event in driven.events if event.locality is not None]
    told = [(shown(event), sorted(event.keys)) for event in primary]
    stored = (Medium.CPU, None, False, *((None, True) if owned else ()))
    removed = (Medium.CPU, None, True, *((None, False) if owned else ()))
    assert sorted(told, key=str) == sorted(
        [(stored, sorted(waves[0])), (stored, sorted(waves[1])), (removed, sorted(waves[0]))], key=str
    )
    assert {shown(event) for event in below} == {
        (Medium.CPU, Locality.REMOTE, False, *(("kvstore/fast", True) if owned else ()))
    }
    assert sorted(key for event in below for key in event.keys) == sorted(waves[0] + waves[1])
    assert not any(getattr(event, "metadata_only", False) for event in driven.events)
