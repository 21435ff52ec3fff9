"""``kvstore check``: the start-up check of an engine, without the engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvstore.errors import ConfigError
from kvstore.primary.pages import described_allocation
from tests.cli.cli import report_of
from tests.cli.in_process import run_here
from tests.project.tree import ROOT

pytest.importorskip("vllm")

_PRIMARY_BYTES = 64 << 20


def _transfer(tmp_path: Path, **more: Any) -> dict[str, Any]:
    tier = {"type": "file", "path": str(tmp_path / "kv"), "capacity": "1GiB"}
    extra = {
        "spec_name": "KVStoreOffloadingSpec",
        "cpu_bytes_to_use": _PRIMARY_BYTES,
        "secondary_tiers": [tier],
        **more,
    }
    return {"kv_connector": "KVStoreConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}


def test_a_right_configuration_is_ok(tmp_path: Path) -> None:
    """The JSON or a file with it is accepted, and nothing is created."""
    text = json.dumps(_transfer(tmp_path))
    (tmp_path / "config.json").write_text(text)
    for given in (text, f"@{tmp_path}/config.json"):
        done = run_here("check", given)
        assert done.returncode == 0, done.stderr
        assert done.stdout == "ok  " + described_allocation(_PRIMARY_BYTES) + "\n"
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_tiers_are_checked_without_a_whole_configuration(tmp_path: Path) -> None:
    """Tiers in any notation are checked alone, and all of their faults are reported."""
    good = f"file://{tmp_path}/kv?capacity=1GiB"
    for given in (good, json.dumps({"type": "file", "path": f"{tmp_path}/kv", "capacity": "1GiB"})):
        done = run_here("check", "-t", given)
        assert (done.returncode, done.stdout) == (0, "ok  1 tier\n"), done.stderr
    done = run_here("check", "-t", "fiel:///mnt/kv", "-t", "file:///tmp?capacity=1GiB&reserv=1GiB")
    assert done.returncode == 2
    assert [line[:24] for line in done.stdout.splitlines()] == ["fail  secondary_tiers[0]", "fail  secondary_tiers[1]"]
    assert "Did you mean 'file'?" in done.stdout and "reserve" in done.stdout


def test_either_a_configuration_or_tiers_are_given(tmp_path: Path) -> None:
    """Neither, or both, is an error that names both arguments."""
    both = [json.dumps(_transfer(tmp_path)), "-t", "memory"]
    for arguments in ([], both):
        done = run_here("check", *arguments)
        assert done.returncode == 2 and "either the value of --kv-transfer-config, or tiers: --tier" in done.stderr


def test_all_faults_are_those_of_the_engines_start(tmp_path: Path) -> None:
    """Every fault is reported with its place, in the words of the engine's start; a warning is no fault."""
    from kvstore.vllm.startup import check_offloading

    tiers = [{"type": "file", "path": "/tmp", "capacity": "1GiB"}, {"type": "fiel"}]
    transfer = _transfer(tmp_path, block_size="16k", teiring={}, lazy_offload=True, secondary_tiers=tiers)
    with pytest.raises(ConfigError) as refused:
        check_offloading(transfer["kv_connector_extra_config"])
    done = run_here("check", json.dumps(transfer))
    assert done.returncode == 2
    *faults, warning = done.stdout.splitlines()
    assert [line.removeprefix("fail  ") for line in faults] == str(refused.value).split("\nkvstore: ")
    assert len(faults) == 4 and warning.startswith("warn  'lazy_offload'")
    rows = report_of(run_here("check", json.dumps(transfer), "--json"))["rows"]
    assert [row["status"] for row in rows] == ["fail"] * 4 + ["warn"]
    assert {"secondary_tiers[0]", "secondary_tiers[1]"} < {row["place"] for row in rows}


def test_a_fault_ends_with_the_page_of_its_options() -> None:
    """The page of the tier's backend, of its options or of the manager's exists; another class has none."""
    tiers = [
        *({"type": name, "capasity": 1} for name in ("file", "nvme", "mooncake", "peer", "redis", "s3")),
        {"backend": "redis", "type": "KVStoreTier", "module_path": "kvstore.vllm", "capasity": 1},
        {"type": "memory", "capasity": 1},
    ]
    transfer = _transfer(Path("/tmp"), block_size="16k", tiering={"alow": []}, secondary_tiers=tiers)
    rows = report_of(run_here("check", json.dumps(transfer), "--json"))["rows"]
    pages = [row["page"].removeprefix("docs/").removesuffix(".md") for row in rows]
    assert pages == ["vllm", "tiering", "disk", "disk", "mooncake", "peer", "redis", "s3", "redis", ""]
    assert all((ROOT / row["page"]).exists() for row in rows)
    shown = run_here("check", json.dumps(transfer)).stdout.splitlines()
    assert [line.rpartition(" See ")[2] for line in shown[:-1]] == [f"{row['page']}." for row in rows[:-1]]


def test_a_backend_of_another_type_is_a_fault() -> None:
    """A list where the name of a backend belongs is named, like any other wrong value."""
    tier = {"type": "KVStoreTier", "module_path": "kvstore.vllm", "backend": ["redis"]}
    shown = run_here("check", json.dumps(_transfer(Path("/tmp"), secondary_tiers=[tier]))).stdout
    assert "secondary_tiers[0]: The backend of a KVStoreTier is ['redis']. Give" in shown


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not valid JSON"),
        ('{"spec_name": "KVStoreOffloadingSpec"}', "Give the whole value"),
        ('{"kv_connector": "KVStoreConnector"}', "does not use kvstore"),
        ("@/no/such/file", "can't be read"),
        ("/etc/hostname", "Put '@' before its name"),
        ("{kv_connector:OffloadingConnector}", "in single quotes"),
    ],
)
def test_configurations_without_kvstore_are_refused(text: str, said: str) -> None:
    """One line names the expected configuration."""
    done = run_here("check", text)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr and len(done.stderr.splitlines()) == 1


def test_a_connector_that_ignores_kvstore_is_a_fault(tmp_path: Path) -> None:
    """Another connector with kvstore's options is reported."""
    done = run_here("check", json.dumps(_transfer(tmp_path) | {"kv_connector": "SimpleCPUOffloadConnector"}))
    assert done.returncode == 2 and "does not use kvstore" in done.stdout


def test_the_size_of_the_primary_tier_may_be_vllms_argument(tmp_path: Path) -> None:
    """The JSON needs no ``cpu_bytes_to_use`` beside ``--kv-offloading-size`` (in GiB); a size of 0 is a fault."""
    transfer = _transfer(tmp_path)
    del transfer["kv_connector_extra_config"]["cpu_bytes_to_use"]
    text = json.dumps(transfer)
    done = run_here("check", text)
    assert done.returncode == 2 and "--kv-offloading-size gives it" in done.stdout
    assert run_here("check", text, "--kv-offloading-size", "0.5").stdout.startswith(
        "ok  Allocating a primary tier of 512.0 MiB"
    )
    assert run_here("check", text, "--kv-offloading-size", "0").returncode == 2


def test_a_primary_tier_without_room_is_a_warning(tmp_path: Path) -> None:
    """What does not fit into this machine is reported with the remedy, and not a fault: another may run the engine."""
    done = run_here("check", json.dumps(_transfer(tmp_path, cpu_bytes_to_use="1PiB")))
    assert done.returncode == 0
    assert done.stdout.startswith("warn  'cpu_bytes_to_use': A primary tier of 1048576.0 GiB does not fit: ")
