"""The examples for containers: errors that an engine, Prometheus or Kubernetes would report are found here."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvstore.config import decode_config
from kvstore.registry import BACKENDS
from tests.project.tree import ROOT, name_of

DEPLOY = ROOT / "deploy"
YAML = sorted(DEPLOY.rglob("*.yaml"))


def _texts(value: Any) -> Iterator[str]:
    """Yield all strings in a document."""
    if isinstance(value, str):
        yield value
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _texts(item)


def _transfers() -> list[tuple[str, dict[str, Any]]]:
    found = []
    for path in YAML:
        for document in yaml.safe_load_all(path.read_text()):
            for text in _texts(document):
                if text.lstrip().startswith('{"kv_connector"'):
                    found.append((name_of(path), json.loads(text)))
    return found


@pytest.mark.parametrize("path", YAML, ids=name_of)
def test_yaml_is_valid(path: Path) -> None:
    """Every document can be parsed."""
    assert all(document for document in yaml.safe_load_all(path.read_text()))


@pytest.mark.parametrize("path", sorted(DEPLOY.rglob("*.json")), ids=name_of)
def test_json_is_valid(path: Path) -> None:
    """The seccomp profile and the dashboard can be parsed."""
    assert json.loads(path.read_text())


@pytest.mark.parametrize(("name", "transfer"), _transfers())
def test_every_engine_is_configured_rightly(name: str, transfer: dict[str, Any]) -> None:
    """All tiers are valid for kvstore."""
    assert transfer["kv_connector"] == "OffloadingConnector"
    for tier in transfer["kv_connector_extra_config"]["secondary_tiers"]:
        options = {key: value for key, value in tier.items() if key != "type"}
        decode_config(BACKENDS.find(tier["type"]).config_type, options, where=name)


def test_there_is_a_configuration_in_each_example() -> None:
    """Each example has a configuration; otherwise the check above would check nothing."""
    names = {name for name, _ in _transfers()}
    assert names == {"deploy/compose.yaml", "deploy/kubernetes/vllm.yaml", "deploy/helm/production-stack.yaml"}


def test_memory_has_room_for_the_primary_tier() -> None:
    """/dev/shm is larger than its primary tier."""
    sizes = {"deploy/compose.yaml": 10 << 30, "deploy/kubernetes/vllm.yaml": 36 << 30}
    sizes["deploy/helm/production-stack.yaml"] = 36 << 30
    for name, transfer in _transfers():
        assert transfer["kv_connector_extra_config"]["cpu_bytes_to_use"] < sizes[name]
        assert re.search(rf"\b{sizes[name] >> 30}(Gi|gb)\b", (ROOT / name).read_text())


def test_the_seccomp_profile_allows_io_uring() -> None:
    """It denies system calls by name, each once, but not those of io_uring."""
    profile = json.loads((DEPLOY / "kubernetes/seccomp-io-uring.json").read_text())
    assert profile["defaultAction"] == "SCMP_ACT_ALLOW"
    denied = [name for rule in profile["syscalls"] for name in rule["names"]]
    assert len(denied) > 40 and {"bpf", "mount", "ptrace"} & set(denied)
    assert not [name for name in denied if name.startswith("io_uring")]
    assert {rule["action"] for rule in profile["syscalls"]} == {"SCMP_ACT_ERRNO"}


def test_the_chart_mounts_memory() -> None:
    """The chart of the production stack mounts /dev/shm only if a tensor parallel size is set."""
    values = yaml.safe_load((DEPLOY / "helm/production-stack.yaml").read_text())
    for model in values["servingEngineSpec"]["modelSpec"]:
        assert model["shmSize"] and model["vllmConfig"]["tensorParallelSize"]


def test_the_commands_in_the_image_have_a_tier() -> None:
    """The default of ``--tier`` in the Dockerfile is valid, and on the image's volume."""
    text = (DEPLOY / "Dockerfile").read_text()
    match = re.search(r"KVSTORE_TIER='(.*)'", text)
    assert match is not None
    tier = json.loads(match[1])
    assert tier["path"].startswith(re.search(r"^VOLUME (\S+)", text, re.MULTILINE)[1])  # type: ignore[index]
    for name, transfer in _transfers():
        if "helm" not in name:
            assert transfer["kv_connector_extra_config"]["secondary_tiers"][0]["path"] == tier["path"]
