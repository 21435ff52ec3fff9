"""KV cache events in the form of each version of vLLM: its fields, medium, locality, and one event per job."""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.kv_offload.base import Locality, Medium

from kvstore.cli.holdings.medium import Medium as HeldMedium
from kvstore.cli.tier_argument import make_tier
from kvstore.testing import eventually
from kvstore.vllm import compat
from kvstore.vllm.events import Statements
from kvstore.vllm.spec import KVStoreOffloadingSpec
from tests.cli.in_process import run_here
from tests.vllm.harness import BLOCK_BYTES, ROWS, Driver, key_of
from tests.vllm.router import Router
from tests.vllm.versions import INSTALLED, VERSIONS, is_there, overlay

OLD = {"keys": None, "medium": None, "removed": None, "locality": "None"}
OLD |= {"ownership": "None", "removal_expected": "False"}
FIELDS = {version: OLD for version in VERSIONS} | {"0.33.0": {**OLD, "metadata_only": "False"}}
"""Fields of ``OffloadingEvent`` with the text of their defaults, by version."""


def event_class(version: str) -> type[Any]:
    """Return a class with the fields of a version's events."""
    parts: list[tuple[str, Any, Any]] = [
        (name, Any, dataclasses.field() if default is None else dataclasses.field(default=ast.literal_eval(default)))
        for name, default in FIELDS[version].items()
    ]
    return dataclasses.make_dataclass("OffloadingEvent", parts)


def test_the_recorded_fields_are_those_of_the_versions() -> None:
    """The recorded fields equal those of each installed version, read as text because only one can be imported."""
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
    """Our manager with a tier, with events in a version's form, and that version."""
    monkeypatch.setattr(compat, "OffloadingEvent", event_class(request.param))
    tier = {"type": "memory", "label": "fast", "locality": "REMOTE"}
    driver = Driver([tier], spec_class=KVStoreOffloadingSpec, events=True)
    yield request.param, driver
    driver.close()


def test_events_of_each_version(driver: tuple[str, Driver]) -> None:
    """A job is one event with exactly the version's fields; none has an owner, nor the primary tier a locality."""
    version, driven = driver
    rows = driven.slots
    waves = [[key_of(wave * rows + i) for i in range(rows)] for wave in range(2)]
    for wave in waves:
        driven.store(wave)
    driven.settle()
    driven.step()

    def shown(event: Any) -> tuple[Any, ...]:
        assert {field.name for field in dataclasses.fields(event)} == FIELDS[version].keys()
        assert getattr(event, "ownership", None) is None, "Dynamo would drop it"
        return (event.medium, event.locality, event.removed, event.removal_expected)

    primary = [event for event in driven.events if event.locality is None]
    below = [event for event in driven.events if event.locality is not None]
    reported = [(shown(event), sorted(event.keys)) for event in primary]
    stored = (Medium.CPU, None, False, True)
    removed = (Medium.CPU, None, True, False)
    assert sorted(reported, key=str) == sorted(
        [(stored, sorted(waves[0])), (stored, sorted(waves[1])), (removed, sorted(waves[0]))], key=str
    )
    assert {shown(event) for event in below} == {(Medium.CPU, Locality.REMOTE, False, True)}
    assert sorted(key for event in below for key in event.keys) == sorted(waves[0] + waves[1])
    assert not any(getattr(event, "metadata_only", False) for event in driven.events)


def on_disk(directory: Path) -> set[bytes]:
    """Return the keys that ``kvstore inspect`` finds."""
    with HeldMedium(make_tier("file", {"path": str(directory), "capacity": "1MiB"})) as medium:
        return {block.key for namespace in medium.namespaces() for block in medium.blocks(namespace)}


def test_router_matches_the_disk(tmp_path: Path) -> None:
    """A router matches the disk through fill, eviction, restart and reset; the second engine reports all old blocks."""
    tier = {"type": "file", "path": str(tmp_path), "capacity": "1MiB"}
    owner = "STORAGE"
    for run in range(3):
        # A router drops the blocks of an engine that ended.
        router, driver = Router(), Driver([tier], spec_class=KVStoreOffloadingSpec, events=True)
        try:
            blocks = router.follow("a", driver)
            if run:
                assert blocks[owner] == on_disk(tmp_path), "recovered blocks"
                assert len(blocks[owner]) > 50
            for wave in range(8):
                driver.store([key_of(1000 * run + 30 * wave + i) for i in range(30)])
            eventually(lambda: router.follow("a", driver)[owner] == on_disk(tmp_path), what="the same blocks")  # noqa: B023
            kept = {key_of(1000 * run + i) for i in range(240)}
            assert blocks["CPU"] == {key for key in kept if driver.manager.manager.primary.lookup(key)}
            blocks.clear()
            driver.manager._restate_events()
            again = router.follow("a", driver)
            assert again[owner] == on_disk(tmp_path), "stated again once routers have dropped all"
            assert len(again["CPU"]) == len(kept & again["CPU"]) > 50
        finally:
            driver.close()
    driver = Driver([tier], spec_class=KVStoreOffloadingSpec, events=True)
    try:
        assert router.follow("b", driver)[owner]
        driver.manager.reset_cache()
        assert not any(router.follow("b", driver).values()), "nothing is left after a reset"
    finally:
        driver.close()


def test_engines_of_one_directory_report_each_block_once(tmp_path: Path) -> None:
    """Blocks computed by both engines, or loaded from the other's part, are also reported once."""
    tier = {"type": "file", "path": str(tmp_path), "capacity": "4MiB", "reset": "keep"}
    router, drivers = Router(), {}
    try:
        for name in ("a", "b"):
            drivers[name] = Driver([tier], spec_class=KVStoreOffloadingSpec, events=True)
        known: set[bytes] = set()
        for wave in range(6):
            for place, driver in enumerate(drivers.values()):
                keys = {key_of(20 * wave + 10 * place + i) for i in range(20)}
                held = driver.manager.manager.tiers[0]._presence
                eventually(lambda: driver.step() or all(key in held for key in known), what="each other's")  # noqa: B023
                driver.store(sorted(keys))
                known |= keys

        def agree() -> bool:
            mine, other = (router.follow(name, driver)["STORAGE"] for name, driver in drivers.items())
            return mine | other == on_disk(tmp_path)

        eventually(agree, what="all blocks reported")
        mine, other = (owners["STORAGE"] for owners in router.engines.values())
        assert mine | other == known
        assert mine and other and not mine & other
        drivers["a"].forget_primary()
        assert drivers["a"].load(sorted(other)[:10]) == sorted(other)[:10]
        assert router.follow("a", drivers["a"])["STORAGE"] == mine, "loaded from the other's part"
        drivers.pop("a").close()
        drivers["c"] = Driver([tier], spec_class=KVStoreOffloadingSpec, events=True)

        def inherited() -> bool:
            found = [router.follow(name, driver).get("STORAGE", set()) for name, driver in drivers.items()]
            return set.union(*found) == known and not set.intersection(*found)

        eventually(inherited, what="the blocks of an ended engine reported by one of the others")
    finally:
        for driver in drivers.values():
            driver.close()


def test_expired_blocks_leave_and_those_that_gc_removed_do_not_come_back(tmp_path: Path) -> None:
    """A request's ``ttl`` removes blocks while the engine runs, and ``kvstore gc`` between two engines."""
    tier, owner = {"type": "file", "path": str(tmp_path), "capacity": "4MiB"}, "STORAGE"
    short, long = ([key_of(start + i) for i in range(10)] for start in (0, 100))
    extra = {"cpu_bytes_to_use": ROWS * BLOCK_BYTES, "secondary_tiers": [tier], "tiering": {"allow": ["ttl"]}}
    router, driver = Router(), Driver([], spec_class=KVStoreOffloadingSpec, events=True, extra_config=extra)
    try:
        context = driver.request(kv_transfer_params={"kvstore": {"ttl": "50ms"}})
        driver.copy(*driver.begin_store(short, context))
        driver.settle()
        driver.manager.on_request_finished(context)
        driver.store(long)
        # They are reported as removed before the last of them is deleted, so that no engine requests them.
        eventually(
            lambda: router.follow("a", driver)[owner] == set(long) == on_disk(tmp_path), what="the others have expired"
        )
        assert router.follow("a", driver) == {"CPU": set(long), owner: set(long)}
        held = clean(tmp_path, "--expire", "1ms")
        assert router.follow("a", driver)[owner] == set(long) == on_disk(tmp_path), "left to the engine"
        assert held["held"]
    finally:
        driver.close()
    done = clean(tmp_path, "--expire", "1ms")
    assert done["removed"]["blocks"] == len(long)
    driver = Driver([tier], spec_class=KVStoreOffloadingSpec, events=True)
    try:
        driver.store(short)
        assert router.follow("b", driver)[owner] == set(short) == on_disk(tmp_path)
    finally:
        driver.close()


def test_a_tier_removes_only_its_own_statement() -> None:
    """Also a tier of another package that reports blocks of before a clear, or repeats itself."""
    nature = (Medium.STORAGE, Locality.LOCAL)
    statements = Statements([nature, nature])

    def reported(tier: str, *, removed: bool) -> list[bool]:
        event = compat.make_event([b"k"], Medium.STORAGE, removed=removed, locality=Locality.LOCAL)
        return [event.removed for event in statements.merge([(tier, event)])]

    assert [reported("file", removed=False), reported("fs", removed=False), reported("fs", removed=False)] == [
        [False],
        [],
        [],
    ]
    assert [reported("fs", removed=True), reported("fs", removed=True)] == [[], []]
    assert reported("file", removed=True) == [True]
    reported("file", removed=False)
    reported("fs", removed=False)
    statements.clear()
    assert reported("file", removed=False) == [False]
    assert reported("fs", removed=True) == [], "stated before the clear"
    assert reported("file", removed=True) == [True]


def test_the_only_tier_of_its_medium_may_repeat_itself() -> None:
    """Its events pass unchanged, because no other tier can have stated the block."""
    statements = Statements([(Medium.CPU, Locality.LOCAL), (Medium.STORAGE, Locality.LOCAL)])
    event = compat.make_event([b"k"], Medium.STORAGE, removed=False, locality=Locality.LOCAL)
    assert [statements.merge([("file", event)]) for _ in range(2)] == [[event], [event]]


def clean(directory: Path, *arguments: str) -> Any:
    """Run ``kvstore gc``."""
    tier = json.dumps({"backend": "file", "path": str(directory), "capacity": "4MiB"})
    done = run_here("gc", "--tier", tier, "--yes", "--json", *arguments)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
