from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from kvstore.cli.config import vllm_config
from kvstore.cli.tier_argument import TierArgument, parse_tier
from kvstore.errors import ConfigError
from tests.cli.cli import run_program
from tests.cli.in_process import run_here
from tests.disk.mounts import mounted

_FILE = '{"type": "file", "path": "/mnt/kv", "capacity": "500GiB"}'
_NVME = '{"type": "nvme", "paths": ["/mnt/a", "/mnt/b"], "capacity": "1TiB"}'


def _tiers(*texts: str) -> list[TierArgument]:
    return [parse_tier(text) for text in texts]


def _extra(*texts: str, **more: Any) -> dict[str, Any]:
    config = vllm_config(_tiers(*texts), **more)
    assert (config["kv_connector"], config["kv_role"]) == ("KVStoreConnector", "kv_both")
    extra = config["kv_connector_extra_config"]
    assert isinstance(extra, dict)
    return extra


def test_the_full_stack_names_tiers_by_their_backends() -> None:
    """Kvstore's spec takes the objects unchanged; unset options are omitted."""
    assert _extra(_FILE, _NVME) == {
        "spec_name": "KVStoreOffloadingSpec",
        "spec_module_path": "kvstore.vllm",
        "cpu_bytes_to_use": 8 << 30,
        "secondary_tiers": [json.loads(_FILE), json.loads(_NVME)],
    }


def test_the_drop_in_spells_the_tiers_out_for_vllm() -> None:
    """VLLM's own spec finds the class by module and name, and the backend is one of its options."""
    assert _extra(_FILE, spec="tiering", cpu_bytes=1 << 30) == {
        "spec_name": "TieringOffloadingSpec",
        "cpu_bytes_to_use": 1 << 30,
        "secondary_tiers": [
            {
                "type": "KVStoreTier",
                "module_path": "kvstore.vllm",
                "backend": "file",
                "path": "/mnt/kv",
                "capacity": "500GiB",
            }
        ],
    }


def test_options_of_the_manager_are_passed_on() -> None:
    """Eviction policy, manager, the manager's options, and any other options of vLLM."""
    extra = _extra(_FILE, eviction="ARC", tiering={"policy": {"min_uses": 2}}, extra={"block_size": 256})
    assert (extra["eviction_policy"], extra["tiering"]) == ("arc", {"policy": {"min_uses": 2}})
    assert extra["block_size"] == 256
    assert _extra(_FILE, manager="vllm")["manager"] == "vllm"


def test_tiers_of_one_backend_get_labels() -> None:
    """Labels distinguish them; a given label stays."""
    labels = [
        tier.get("label") for tier in _extra(_FILE, _FILE, _FILE.replace("{", '{"label": "own", '))["secondary_tiers"]
    ]
    assert labels == [None, "file-1", "own"]
    with pytest.raises(ConfigError, match="Two tiers have the name 'own'"):
        vllm_config(_tiers(*[_FILE.replace("{", '{"label": "own", ')] * 2))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"tiering": {"polcy": {}}}, "Did you mean 'policy'"),
        ({"tiering": {"store_share": 2.0}}, "store_share"),
        ({"tiering": {"store_share": "much"}}, "store_share"),
        ({"tiering": {"policy": {"min_uses": 0}}}, "min_uses"),
        ({"tiering": {"policy": {"tiers": ["nowhere"]}}}, "nowhere"),
        ({"tiering": {"store_share": 0.5}, "spec": "tiering"}, "vLLM's is to be used"),
        ({"tiering": {"store_share": 0.5}, "manager": "vllm"}, "vLLM's is to be used"),
        ({"manager": "mine"}, "Expected 'kvstore' or 'vllm'"),
        ({"eviction": "fifo"}, "Unknown eviction policy"),
        ({"eviction": "adaptive", "spec": "tiering"}, "is not supported by vLLM's manager"),
        ({"cpu_bytes": 0}, "CPU memory"),
        ({"extra": {"cpu_bytes_to_use": 5}}, "option for it"),
    ],
)
def test_unusable_configurations_are_refused_before_printing(options: dict[str, Any], says: str) -> None:
    """Everything is checked before printing, not when the engine starts."""
    with pytest.raises(ConfigError, match=says):
        vllm_config(_tiers(_FILE), **options)


def test_the_command_prints_one_line_that_a_shell_takes() -> None:
    """Stdout has nothing else, so the line can be pasted into a command."""
    done = run_program("config", "--vllm", "--cpu", "2GiB", "--tier", _FILE)
    assert done.returncode == 0
    assert done.stdout.count("\n") == 1
    line = f"--kv-transfer-config {shlex.quote(done.stdout.strip())}"
    assert json.loads(shlex.split(line)[1]) == vllm_config(_tiers(_FILE), cpu_bytes=2 << 30)
    pretty = run_here("config", "--vllm", "--cpu", "2GiB", "--tier", _FILE, "--pretty")
    assert json.loads(pretty.stdout) == json.loads(done.stdout)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--vllm", "--tier", _FILE.replace("capacity", "capacty")],
        ["--vllm", "--tier", _FILE, "--spec", "other"],
        ["--vllm", "--tier", _FILE, "--tiering", "{"],
        ["--vllm", "--tier", _FILE, "--extra", "[]"],
        ["--tier", '{"type": "fiel"}'],
        ["--tier", "file:///tmp/kvstore-test?capacity=500"],
        ["--tier", "file:///tmp/kvstore-test?capacity=1GiB&codec=zst"],
        ["--tier", "file:///tmp/kvstore-test?capacity=1GiB&codec=zstd:99"],
    ],
)
def test_a_mistake_is_status_two_and_one_line_on_stderr(arguments: list[str]) -> None:
    """Stdout is empty, so no partial configuration reaches an engine."""
    done = run_here("config", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1


def test_secrets_are_printed_only_where_the_engine_needs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checked tiers are shown with defaults and without secrets; the string for vLLM has them, with a warning."""
    monkeypatch.setenv("KV_PASSWORD", "canary-5678")
    tier = "redis://user:canary-1234@10.0.0.1:6379/0?insecure=true"
    shown = run_here("config", "--tier", tier)
    assert shown.returncode == 0
    assert "canary-1234" not in shown.stdout + shown.stderr
    assert json.loads(shown.stdout)[0]["timeout"] > 0
    printed = run_here("config", "--vllm", "--tier", tier)
    assert "canary-1234" in printed.stdout
    assert "canary-1234" not in printed.stderr
    assert "secret" in printed.stderr
    better = '{"type": "redis", "url": "rediss://10.0.0.1", "password": {"env": "KV_PASSWORD"}}'
    assert run_here("config", "--vllm", "--tier", better).stderr == ""


@pytest.mark.parametrize("options", [[], ["--vllm"]])
def test_absent_drive_is_a_warning(options: list[str]) -> None:
    """The configuration is printed all the same: the engine may run on another machine."""
    done = run_here("config", *options, "--tier", "file:///no/such/place?capacity=1GiB")
    assert done.returncode == 0
    assert "/no/such/place" in json.dumps(json.loads(done.stdout))
    assert done.stderr == (
        "tier 1: file tier: /no/such does not exist. "
        "Create it: kvstore creates only the last component of a tier's path.\n"
    )


def test_two_tiers_may_not_share_a_directory(tmp_path: Path) -> None:
    """Two tiers on one directory are refused in any spelling of the path, with and without --vllm."""
    tiers = ["--tier", f"file://{tmp_path}/kv?capacity=1GiB", "--tier", f"nvme://{tmp_path}/./kv?capacity=1GiB"]
    for more in ([], ["--vllm"]):
        done = run_here("config", *tiers, *more)
        assert (done.returncode, done.stdout) == (2, "")
        assert "tier 1 uses" in done.stderr


def test_cpu_memory_without_a_unit_is_refused(tmp_path: Path) -> None:
    """A size in bytes that holds no block is refused, with an example of a unit."""
    done = run_here("config", "--vllm", "--tier", f"file://{tmp_path}/kv?capacity=1GiB", "--cpu", "8")
    assert (done.returncode, done.stdout) == (2, "")
    assert "'8GiB'" in done.stderr


def test_rules_for_directories_are_not_for_the_path_of_a_third_party(tmp_path: Path) -> None:
    """A third party's ``path`` may be a file, missing or present: no command refuses it, and none makes a directory."""
    path = tmp_path / "records.db"
    tier = json.dumps({"type": "tests.cli.file_database:FileDatabase", "path": str(path)})
    assert run_here("config", "--tier", tier).returncode == 0
    run_here("bench", "verify", "--tier", tier, "--bytes", "1MiB", "--reuse")
    assert not path.exists()
    path.touch()
    assert run_here("config", "--tier", tier).returncode == 0
    assert run_here("bench", "doctor", "--tier", tier).returncode == 0


def test_no_remedy_changes_a_directory_of_the_machine() -> None:
    """The remedy for a world-writable directory is a directory below it, not another mode."""
    done = run_here("config", "--tier", "file:///tmp?capacity=1GiB")
    assert done.returncode == 2
    assert "such as /tmp/kv" in done.stderr and "chmod" not in done.stderr


@pytest.mark.root
def test_a_share_of_an_emptydir_is_one_of_the_node(tmp_path: Path) -> None:
    """There is a warning, because the limit of the volume is not visible; bytes, and a volume in memory, have none."""
    volume = tmp_path / "volumes" / "kubernetes.io~empty-dir" / "cache"
    volume.mkdir(parents=True)
    for capacity, options, warns in (
        ("80%", ["--bind", str(volume)], True),
        ("8GiB", ["--bind", str(volume)], False),
        ("80%", ["-t", "tmpfs", "tmpfs"], False),
    ):
        with mounted(tmp_path / f"mnt-{capacity}-{options[0]}", *options) as point:
            tier = {"type": "file", "path": str(point / "kv"), "capacity": capacity}
            done = run_here("config", "--tier", json.dumps(tier))
            assert done.returncode == 0, done.stderr
            assert ("sizeLimit" in done.stderr) is warns
