"""Bad configurations of a tier: one clear error at startup, and no partial state left."""

from __future__ import annotations

import os
import uuid
from pathlib import Path
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.v1.kv_offload.factory import OffloadingSpecFactory
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from kvstore.errors import ConfigError
from kvstore.vllm import KVStoreConnector, KVStoreOffloadingSpec, KVStoreTier, plugin
from kvstore.vllm.options import check_tiering, with_short_types
from kvstore.vllm.region import region_path
from kvstore.vllm.startup import transfer_faults
from tests.vllm.harness import Driver, make_spec, offloading_config

FILE = {"type": "KVStoreTier", "module_path": "kvstore.vllm", "backend": "file"}

BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no backend": ({"backend": None}, "backend"),
    "unknown backend": ({"backend": "flie"}, "Did you mean 'file'"),
    "backend of wrong type": ({"backend": 7}, "backend"),
    "unknown key": ({"capasity": "1GiB"}, "capacity"),
    "no path": ({"path": None}, "path"),
    "wrong type": ({"path": 17}, "path"),
    "no such directory": ({"path": "DIR/not-there/at-all"}, "not-there"),
    "path is a file": ({"path": "DIR/file"}, "file"),
    "not a size": ({"capacity": "lots"}, "capacity"),
    "capacity below one block": ({"capacity": "4KiB"}, "capacity"),
    "bad duration": ({"load_timeout": "soon"}, "load_timeout"),
    "bad locality": ({"locality": "NEAR"}, "NEAR"),
    "user's class that is not there": ({"backend": "no_such_module:Cache"}, "no_such_module"),
}


@pytest.mark.parametrize("spec_class", [TieringOffloadingSpec, KVStoreOffloadingSpec])
@pytest.mark.parametrize("name", BAD)
def test_bad_options_give_one_clear_error(tmp_path: Path, name: str, spec_class: Any) -> None:
    """A wrong option is a ConfigError that names it, in vLLM's spec and ours; no file stays in /dev/shm."""
    change, expected = BAD[name]
    (tmp_path / "file").write_text("")
    tier = {**FILE, "path": str(tmp_path), "capacity": "1GiB", **change}
    tier = {k: v.replace("DIR", str(tmp_path)) if isinstance(v, str) else v for k, v in tier.items() if v is not None}
    engine_id = f"kvstore-test-{uuid.uuid4().hex}"
    with pytest.raises(ConfigError, match=expected):
        Driver([tier], spec_class=spec_class, engine_id=engine_id)
    assert not os.path.exists(region_path(engine_id))


@pytest.mark.parametrize(
    ("tiers", "expected"),
    [
        ({"type": "file"}, "list"),
        (["file"], "list"),
        ([{"path": "/x"}], "type"),
        ([{"type": "fiel", "path": "/x"}], "Did you mean 'file'"),
        ([{"type": 3}], "type"),
    ],
)
def test_bad_lists_of_tiers(tiers: Any, expected: str) -> None:
    """An invalid list of tiers, or an unknown type, is refused before vLLM creates anything."""
    with pytest.raises(ConfigError, match=expected):
        with_short_types({"secondary_tiers": tiers})


def test_types_of_others_pass_through() -> None:
    """VLLM's own types and out-of-tree classes reach vLLM's factory unchanged."""
    tiers = [{"type": "fs", "root_dir": "/x"}, {"type": "Theirs", "module_path": "their.module", "a": 1}]
    tiers.append({"type": "their:tier", "module_path": "their.module"})
    assert with_short_types({"secondary_tiers": tiers})["secondary_tiers"] == tiers


def test_the_users_configuration_is_not_changed() -> None:
    """Short types are expanded in a copy, because vLLM passes the same object to every process and component."""
    extra = {"cpu_bytes_to_use": 1, "secondary_tiers": [{"type": "memory"}]}
    with_short_types(extra)
    assert extra == {"cpu_bytes_to_use": 1, "secondary_tiers": [{"type": "memory"}]}


def test_a_users_own_backend_by_path() -> None:
    """The type may be the path of a user's class."""
    (tier,) = with_short_types({"secondary_tiers": [{"type": "my.module:Cache", "a": 1}]})["secondary_tiers"]
    assert tier == {"type": "KVStoreTier", "module_path": "kvstore.vllm", "backend": "my.module:Cache", "a": 1}


@pytest.fixture
def registered() -> Any:
    """The plugin's names in vLLM's factories, for one test."""
    factories = OffloadingSpecFactory, SecondaryTierFactory, KVConnectorFactory
    before = [dict(factory._registry) for factory in factories]  # type: ignore[attr-defined]
    plugin.register()
    plugin.register()
    yield
    for factory, names in zip(factories, before, strict=True):
        factory._registry = names  # type: ignore[attr-defined]


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("name", ["KVStoreConnector", "OffloadingConnector"])
def test_both_names_of_the_connector_select_kvstores(name: str) -> None:
    """Configurations of earlier releases name vLLM's connector, and get ours."""
    assert KVConnectorFactory.get_connector_class_by_name(name) is KVStoreConnector


def test_the_former_name_of_the_connector_is_a_warning() -> None:
    """The engine starts with the former name, and its log has the new one."""
    extra = {"spec_name": "KVStoreOffloadingSpec", "cpu_bytes_to_use": 1 << 30, "secondary_tiers": [{"type": "memory"}]}
    for name, count in (("KVStoreConnector", 0), ("OffloadingConnector", 1)):
        found = transfer_faults({"kv_connector": name, "kv_role": "kv_both", "kv_connector_extra_config": extra})
        assert found is not None and not found[0]
        assert [str(each).count("'KVStoreConnector'") for each in found[1]] == [1] * count


@pytest.mark.usefixtures("registered")
def test_the_plugin_makes_short_names_work_in_vllms_own_spec(tmp_path: Path) -> None:
    """With the plugin, vLLM's own spec takes {"type": "file"}; registering twice is no error."""
    driver = Driver([{"type": "file", "path": str(tmp_path), "capacity": "1GiB"}, {"type": "memory"}])
    try:
        assert all(isinstance(tier, KVStoreTier) for tier in driver.tiers)
        assert [tier.tier_type for tier in driver.tiers] == ["file", "memory"]
    finally:
        driver.close()
    assert OffloadingSpecFactory.get_spec_cls({"spec_name": "KVStoreOffloadingSpec"}) is KVStoreOffloadingSpec


@pytest.mark.usefixtures("registered")
def test_the_plugin_replaces_nothing() -> None:
    """VLLM's own types keep their meaning."""
    assert SecondaryTierFactory.get_tier_class({"type": "fs"}).__name__ == "FileSystemTierManager"


@pytest.mark.parametrize("spec_class", [TieringOffloadingSpec, KVStoreOffloadingSpec])
def test_a_front_end_declares_metrics_without_opening_anything(spec_class: Any) -> None:
    """Metrics are declared from the JSON alone, even if the tier could not be opened."""
    tier = {**FILE, "path": "/no/such/directory"}
    definitions = spec_class.build_metric_definitions({"cpu_bytes_to_use": 1, "secondary_tiers": [tier]})
    assert any(name.startswith("vllm:kvstore_") for name in definitions)


def test_spec_passes_other_options_to_vllm(tmp_path: Path) -> None:
    """Our spec passes every other option to vLLM's."""
    config = offloading_config([{"type": "memory"}])
    config.extra_config["eviction_policy"] = "arc"  # type: ignore[index]
    assert make_spec(config).eviction_policy == "arc"


def test_the_primary_tier_may_have_a_unit() -> None:
    """A size with a unit gives as many slots as the same number of bytes."""
    config = offloading_config([{"type": "memory"}])
    size = int(config.extra_config["cpu_bytes_to_use"])
    config.extra_config["cpu_bytes_to_use"] = f"{size} B"  # type: ignore[index]
    assert make_spec(config).num_chunks == size // make_spec(config).kv_bytes_per_chunk > 0


MEMORY: dict[str, Any] = {"type": "memory"}
FS = {"type": "fs", "root_dir": "/x"}


@pytest.mark.parametrize(
    ("more", "tiers", "ours"),
    [
        ({}, [MEMORY], True),
        ({}, [], True),
        ({"manager": "vllm"}, [MEMORY], False),
        ({}, [MEMORY, FS], True),
        ({"manager": "vllm"}, [MEMORY, FS], False),
        ({"cache_policy_module_path": "their.module"}, [MEMORY], False),
        ({"manager": "kvstore", "eviction_policy": "ARC"}, [MEMORY], True),
    ],
    ids=[
        "by default",
        "no tier",
        "vLLM's by name",
        "with vLLM's own tier",
        "vLLM's by name for its own tier",
        "vLLM's for its own policy",
        "by name",
    ],
)
def test_manager_is_kvstores_unless_vllms_is_required(
    more: dict[str, Any], tiers: list[dict[str, Any]], ours: bool
) -> None:
    """The manager is kvstore's unless vLLM's is requested, or an option requires vLLM's."""
    config = check_tiering(with_short_types({"cpu_bytes_to_use": 1, "secondary_tiers": tiers, **more}))
    assert (config is not None) is ours


@pytest.mark.parametrize(
    ("more", "tiers", "expected"),
    [
        ({"manager": "vlm"}, [MEMORY], "Expected 'kvstore'"),
        ({}, [{**FS, "reset": "kep"}], "Expected 'forget' or 'keep'"),
        ({"manager": "vllm", "tiering": {}}, [MEMORY], "Remove one"),
        ({"eviction_policy": "adaptve"}, [MEMORY], "Did you mean 'adaptive'"),
        ({"store_threshold": 2}, [MEMORY], "min_uses"),
        ({"tiering": {"retain_shar": 1}}, [MEMORY], "Did you mean 'retain_share'"),
        (
            {"tiering": {"wait_s_max": 1}},
            [MEMORY],
            "no option 'wait_s_max': it is fixed in engines. Remove it",
        ),
        ({"tiering": {"allow": None}}, [MEMORY], "'allow' is null. Expected a list"),
        ({"tiering": {"policy": {"tiers": ["disk"]}}}, [MEMORY], "no tier 'disk'"),
    ],
    ids=lambda value: None if isinstance(value, list) else str(value),
)
def test_bad_options_of_the_manager(more: dict[str, Any], tiers: list[dict[str, Any]], expected: str) -> None:
    """A wrong option of the manager is a ConfigError that names it, before the engine has created anything."""
    config = offloading_config(tiers)
    config.extra_config.update(more)  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=expected):
        make_spec(config)
