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

pytestmark = pytest.mark.repository

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


def _kubernetes(kind: str) -> list[dict[str, Any]]:
    documents = yaml.safe_load_all((DEPLOY / "kubernetes/vllm.yaml").read_text())
    return [document for document in documents if document["kind"] == kind]


def _pod(kind: str) -> dict[str, Any]:
    (workload,) = _kubernetes(kind)
    found: dict[str, Any] = workload["spec"]["template"]["spec"]
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
    assert transfer["kv_connector"] == "KVStoreConnector"
    for tier in transfer["kv_connector_extra_config"]["secondary_tiers"]:
        options = {key: value for key, value in tier.items() if key != "type"}
        if isinstance(options.get("password"), dict):
            options["password"] = "a password"  # Its variable exists in the container.
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


def test_the_seccomp_profile_allows_io_uring_and_nothing_looser() -> None:
    """A list of allowed calls with io_uring's, without those that the runtimes' own profiles refuse.

    It has no conditions on capabilities, which Kubernetes would ignore and thus always allow.
    """
    profile = json.loads((DEPLOY / "kubernetes/seccomp-io-uring.json").read_text())
    assert (profile["defaultAction"], profile["defaultErrnoRet"]) == ("SCMP_ACT_ERRNO", 1)
    assert all(set(rule) <= {"names", "action", "args", "errnoRet"} for rule in profile["syscalls"])
    allowed = {
        n for r in profile["syscalls"] if r["action"] == "SCMP_ACT_ALLOW" and "args" not in r for n in r["names"]
    }
    assert {"io_uring_setup", "io_uring_enter", "io_uring_register", "read", "futex", "openat"} <= allowed
    refused = (
        "add_key bpf clone clone3 finit_module fsopen init_module kexec_load keyctl mount move_mount open_by_handle_at "
        "open_tree perf_event_open personality pivot_root reboot request_key setns settimeofday swapon syslog umount2 "
        "unshare userfaultfd"
    )
    assert not allowed & set(refused.split())


def test_compose_is_reached_from_this_machine_only() -> None:
    """Published ports are on loopback, and Grafana has no anonymous users and no default password."""
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    ports = [port for service in services.values() for port in service.get("ports", ())]
    assert len(ports) == 2 and all(port.startswith("127.0.0.1:") for port in ports)
    grafana = services["grafana"]["environment"]
    assert grafana["GF_SECURITY_ADMIN_PASSWORD"].startswith("${GRAFANA_PASSWORD:?")
    assert not [name for name in grafana if "ANONYMOUS" in name]


def test_engines_may_write_back_before_they_are_killed() -> None:
    """Compose and Kubernetes wait as long for the end of an engine."""
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["vllm"]
    assert compose["stop_grace_period"] == "60s"
    assert _pod("StatefulSet")["terminationGracePeriodSeconds"] == 60


def test_kubernetes_has_models_secrets_seals_and_policies() -> None:
    """Models are on a volume; HF_TOKEN, keyring and password are secrets; tiers are sealed; each app has a policy."""
    (engine,) = _pod("StatefulSet")["containers"]
    env = {each["name"]: each for each in engine["env"]}
    paths = [mount["mountPath"] for mount in engine["volumeMounts"]]
    assert env["HF_HOME"]["value"] in paths and "secretKeyRef" in env["HF_TOKEN"]["valueFrom"]
    (valkey,) = _pod("Deployment")["containers"]
    assert env["VALKEY_PASSWORD"] in valkey["env"] and "requirepass" in valkey["args"][0]
    (tiers,) = (each["kv_connector_extra_config"]["secondary_tiers"] for name, each in _transfers() if "kube" in name)
    assert [tier.get("password") for tier in tiers] == [None, {"env": "VALKEY_PASSWORD"}]
    for tier in tiers:
        keyring = Path(tier["codec"][-1]["aead"]["keys"]["file"])
        assert str(keyring.parent) in paths
    selected = [policy["spec"]["podSelector"]["matchLabels"]["app"] for policy in _kubernetes("NetworkPolicy")]
    assert sorted(selected) == ["valkey", "vllm"]


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
