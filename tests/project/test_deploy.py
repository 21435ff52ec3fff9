"""The examples for containers: errors that an engine, Prometheus or Kubernetes would report are found here."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from cloudcoil.models.prometheus_operator import v1 as prometheus_operator

from kvstore.config import decode_config
from kvstore.registry import BACKENDS
from tests.project.tree import ROOT, name_of

pytestmark = pytest.mark.repository

DEPLOY = ROOT / "deploy"
YAML = sorted(DEPLOY.rglob("*.yaml"))
KUBERNETES = sorted((DEPLOY / "kubernetes").glob("*.yaml"))


def _closed(**properties: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of an object with these properties only."""
    return {"type": "object", "properties": properties, "additionalProperties": False}


# No package ships these schemas. They have the fields that the examples use, as in the repositories that they name.
_TEXT, _COUNT, _MAP, _LIST, _FLAG = ({"type": kind} for kind in ("string", "integer", "object", "array", "boolean"))
LLM_INFERENCE_SERVICE = _closed(
    apiVersion={"const": "serving.kserve.io/v1alpha2"},
    kind=_TEXT,
    metadata=_MAP,
    spec=_closed(
        model=_closed(uri=_TEXT, name=_TEXT),
        replicas=_COUNT,
        labels=_MAP,
        router=_closed(gateway=_MAP, route=_MAP, scheduler=_MAP),
        template=_MAP,
    ),
)
_LABELS_OF_LLM_D = ("llm-d.ai/inferenceServing", "llm-d.ai/model")
LLM_D = _closed(
    modelArtifacts=_closed(name=_TEXT, uri=_TEXT, size=_TEXT, labels=_closed(**dict.fromkeys(_LABELS_OF_LLM_D, _TEXT))),
    routing=_closed(proxy=_closed(enabled=_FLAG)),
    prefill=_closed(create=_FLAG),
    decode=_closed(
        replicas=_COUNT, terminationGracePeriodSeconds=_COUNT, extraConfig=_MAP, containers=_LIST, volumes=_LIST
    ),
)
_MODEL = _closed(
    name=_TEXT,
    repository=_TEXT,
    tag=_TEXT,
    modelURL=_TEXT,
    replicaCount=_COUNT,
    requestGPU=_COUNT,
    resources=_MAP,
    pvcStorage=_closed(emptyDir=_MAP),
    shmSize=_TEXT,
    vllmConfig=_closed(tensorParallelSize=_COUNT, enablePrefixCaching=_FLAG, extraArgs=_LIST),
    env=_LIST,
    extraVolumeMounts=_LIST,
    extraVolumes=_LIST,
)
PRODUCTION_STACK = _closed(
    servingEngineSpec=_closed(
        enableEngine=_FLAG,
        labels=_MAP,
        runtimeClassName=_TEXT,
        securityContext=_MAP,
        containerSecurityContext=_MAP,
        modelSpec={"type": "array", "items": _MODEL},
    )
)


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


def _documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / name).read_text()))


def _document(name: str, kind: str) -> dict[str, Any]:
    (found,) = (each for each in _documents(name) if each["kind"] == kind)
    return found


def _pods() -> dict[str, dict[str, Any]]:
    """Return the pods with engines, as far as the examples define them, by the name of their file."""
    llm_d = _documents("helm/llm-d.yaml")[0]
    decode, (container,) = llm_d["decode"], llm_d["decode"]["containers"]
    engine = {name: value for name, value in container.items() if name not in _OF_CHART} | container["extraConfig"]
    pod_of_llm_d = {"containers": [engine], "volumes": decode["volumes"], **decode["extraConfig"]}
    stack = _documents("helm/production-stack.yaml")[0]["servingEngineSpec"]
    (model,) = stack["modelSpec"]
    engine = {
        "name": "vllm",
        "args": model["vllmConfig"]["extraArgs"],
        "securityContext": stack["containerSecurityContext"],
        "env": model["env"],
        "resources": model["resources"],
        "volumeMounts": [*model["extraVolumeMounts"], {"name": "shm", "mountPath": "/dev/shm"}],
    }
    shm = {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": model["shmSize"]}}
    pod_of_stack = {"securityContext": stack["securityContext"], "containers": [engine]}
    return {
        "kubernetes/vllm.yaml": _document("kubernetes/vllm.yaml", "StatefulSet")["spec"]["template"]["spec"],
        "kubernetes/kserve.yaml": _documents("kubernetes/kserve.yaml")[0]["spec"]["template"],
        "helm/llm-d.yaml": pod_of_llm_d,
        "helm/production-stack.yaml": {**pod_of_stack, "volumes": [*model["extraVolumes"], shm]},
    }


_OF_CHART = {"modelCommand", "mountModelVolume", "extraConfig"}
_VALKEY = _document("kubernetes/common.yaml", "Deployment")["spec"]["template"]["spec"]
ALL_PODS = _pods() | {"kubernetes/common.yaml": _VALKEY}


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
        for secret in {"password", "secret"} & options.keys():
            options[secret] = "a password of sixteen"  # Its file exists in the container.
        decode_config(BACKENDS.find(tier["type"]).config_type, options, where=name)


def test_there_is_a_configuration_in_each_example() -> None:
    """Each example has a configuration; otherwise the check above would check nothing."""
    names = {name for name, _ in _transfers()}
    assert names == {"deploy/compose.yaml", "deploy/kubernetes/common.yaml"}
    for pod in _pods().values():
        (engine,) = pod["containers"]
        reference = {"configMapKeyRef": {"name": "vllm-kvstore", "key": "kv-transfer.json"}}
        assert {"name": "KV_TRANSFER_CONFIG", "valueFrom": reference} == engine["env"][0]
        assert "$(KV_TRANSFER_CONFIG)" in str([engine.get("args"), engine["env"][1:]])


@pytest.mark.parametrize("path", KUBERNETES, ids=name_of)
def test_kubernetes_accepts_the_resources(path: Path) -> None:
    """Every resource agrees with the schema of its kind, without unknown fields."""
    for document in yaml.safe_load_all(path.read_text()):
        if document["apiVersion"] == "monitoring.coreos.com/v1":
            model = getattr(prometheus_operator, document["kind"]).model_validate(document)
            # It drops unknown fields.
            assert model.model_dump(mode="json", by_alias=True, exclude_unset=True) == document
        elif document["kind"] == "LLMInferenceService":
            jsonschema.validate(document, LLM_INFERENCE_SERVICE)
        else:
            kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)


@pytest.mark.parametrize("name", ALL_PODS)
def test_kubernetes_accepts_the_pods(name: str) -> None:
    """Each pod, as the controller or the chart makes it of the example, agrees with the schema."""
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": ALL_PODS[name]}
    kubernetes_validate.validate(pod, kubernetes_validate.latest_version(), strict=True)


def test_charts_know_the_values() -> None:
    """The values have the names and types of the charts' schemas."""
    jsonschema.validate(_documents("helm/llm-d.yaml")[0], LLM_D)
    jsonschema.validate(_documents("helm/production-stack.yaml")[0], PRODUCTION_STACK)


@pytest.mark.parametrize("name", ALL_PODS)
def test_pods_are_restricted(name: str) -> None:
    """Each pod meets the standard "restricted", and no memory or disk is promised that its node lacks."""
    pod = ALL_PODS[name]
    outer = pod["securityContext"]
    assert outer["runAsNonRoot"] and outer["runAsUser"] > 0 and outer["fsGroup"] == outer["runAsGroup"]
    for container in pod["containers"]:
        inner = container["securityContext"]
        assert not inner["allowPrivilegeEscalation"] and inner["capabilities"] == {"drop": ["ALL"]}
        assert (inner | outer)["seccompProfile"]["type"] in ("RuntimeDefault", "Localhost")
        assert container["resources"]["requests"] == container["resources"]["limits"]
        assert {"cpu", "memory", "ephemeral-storage"} <= set(container["resources"]["limits"])
        # A file with a subPath keeps the content of the start.
        assert not [mount for mount in container["volumeMounts"] if "subPath" in mount]
        assert not [each for each in container.get("env", []) if "password" in str(each).lower()]


def test_engines_find_all_their_files() -> None:
    """The user, the drive and every secret of the configuration are where the pods and the image have them."""
    (transfer,) = (each for name, each in _transfers() if "kubernetes" in name)
    tiers = transfer["kv_connector_extra_config"]["secondary_tiers"]
    assert [tier.get("required", True) for tier in tiers] == [True, False, False]
    script = (DEPLOY / "kubernetes/secrets.sh").read_text()
    files = set(re.findall(r'/run/secrets/kvstore/([\w.-]+)"', json.dumps(tiers)))
    assert files == {"peer-secret", "keyring.json", "valkey-password", "ca.crt"}
    assert all(f"vllm-kvstore/{name}" in script for name in files)
    user = re.search(r"useradd --uid (\d+) .*--home-dir (\S+)", (DEPLOY / "Dockerfile").read_text())
    assert user is not None
    for pod in _pods().values():
        mounts = {mount["mountPath"] for container in pod["containers"] for mount in container["volumeMounts"]}
        assert {str(Path(tiers[1]["path"]).parent), "/run/secrets/kvstore"} <= mounts
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        assert volumes["secrets"]["secret"] == {"secretName": "vllm-kvstore", "defaultMode": 0o440}
        assert pod["securityContext"]["runAsUser"] == int(user[1])
    assert {"name": "HOME", "value": user[2]} in _pods()["kubernetes/vllm.yaml"]["containers"][0]["env"]


def test_memory_has_room_for_the_primary_tier() -> None:
    """/dev/shm is larger than its primary tier."""
    compose, kubernetes = (
        each["kv_connector_extra_config"]["cpu_bytes_to_use"] for _, each in sorted(_transfers(), key=lambda e: e[0])
    )
    assert compose < 10 << 30 and "shm_size: 10gb" in (DEPLOY / "compose.yaml").read_text()
    for pod in _pods().values():
        (memory,) = (each["emptyDir"] for each in pod["volumes"] if each.get("emptyDir", {}).get("medium") == "Memory")
        assert kubernetes < int(memory["sizeLimit"].removesuffix("Gi")) << 30


def test_network_policies_cover_peers_valkey_and_downloads() -> None:
    """The peer port, Valkey and names are reachable; the cloud's metadata and private networks are not."""
    policies = {
        each["metadata"]["name"]: each["spec"]
        for each in _documents("kubernetes/common.yaml")
        if each["kind"] == "NetworkPolicy"
    }
    assert all(each["policyTypes"] == ["Ingress", "Egress"] for each in policies.values())
    (transfer,) = (each for name, each in _transfers() if "kubernetes" in name)
    peer = int(transfer["kv_connector_extra_config"]["secondary_tiers"][0]["listen"].rpartition(":")[2])

    def ports(rules: list[dict[str, Any]]) -> set[int]:
        return {port["port"] for rule in rules for port in rule["ports"]}

    assert ports(policies["vllm"]["ingress"]) == {8000, peer}
    assert ports(policies["vllm"]["egress"]) == {53, 6379, peer, 443}
    assert ports(policies["valkey"]["ingress"]) == {6379} and "egress" not in policies["valkey"]
    (block,) = (to["ipBlock"] for rule in policies["vllm"]["egress"] for to in rule["to"] if "ipBlock" in to)
    # Some clouds have pods, nodes or their metadata in 100.64.0.0/10.
    assert {"169.254.0.0/16", "10.0.0.0/8", "100.64.0.0/10"} <= set(block["except"])


def test_a_service_does_not_set_vllms_port() -> None:
    """No service with an address is named "vllm": vLLM would read its variable VLLM_PORT."""
    services = [
        each for path in KUBERNETES for each in yaml.safe_load_all(path.read_text()) if each["kind"] == "Service"
    ]
    assert len(services) == 3
    assert all(each["metadata"]["name"] != "vllm" for each in services)


def test_resources_select_the_pods_of_each_example() -> None:
    """The label in common.yaml and monitor.yaml is that of the pods; llm-d's chart needs one of its own."""
    stateful = _document("kubernetes/vllm.yaml", "StatefulSet")["spec"]["template"]["metadata"]["labels"]
    kserve = _documents("kubernetes/kserve.yaml")[0]["spec"]["labels"]
    stack = _documents("helm/production-stack.yaml")[0]["servingEngineSpec"]["labels"]
    assert stateful == kserve == stack == {"app": "vllm"}
    monitor = _documents("kubernetes/monitor.yaml")[0]["spec"]
    (service,) = (
        each
        for path in KUBERNETES
        for each in yaml.safe_load_all(path.read_text())
        if each["kind"] == "Service" and each["metadata"].get("labels") == monitor["selector"]["matchLabels"]
    )
    assert [each["port"] for each in monitor["endpoints"]] == [each["name"] for each in service["spec"]["ports"]]
    llm_d = (DEPLOY / "helm/llm-d.yaml").read_text()
    command = re.search(r"for file in common monitor; do sed 's\|(.*?)\|(.*?)\|'", llm_d)
    assert command is not None
    replaced = (DEPLOY / "kubernetes/monitor.yaml").read_text().replace(command[1], command[2])
    assert yaml.safe_load(replaced)["spec"]["selector"]["matchLabels"] == yaml.safe_load(command[2])
    assert yaml.safe_load(command[2]).items() <= _documents("helm/llm-d.yaml")[0]["modelArtifacts"]["labels"].items()
    common = (DEPLOY / "kubernetes/common.yaml").read_text()
    assert list(yaml.safe_load_all(common.replace(command[1], command[2])))[2]["spec"]["selector"] == yaml.safe_load(
        command[2]
    )


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
    assert _pods()["kubernetes/vllm.yaml"]["terminationGracePeriodSeconds"] == 60
    assert _pods()["kubernetes/kserve.yaml"]["terminationGracePeriodSeconds"] == 60
    assert _documents("helm/llm-d.yaml")[0]["decode"]["terminationGracePeriodSeconds"] == 60


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
    for _, transfer in _transfers():
        assert tier["path"] in [each.get("path") for each in transfer["kv_connector_extra_config"]["secondary_tiers"]]


def _resources(kind: str) -> list[dict[str, Any]]:
    """Return the resources of a kind in all files for Kubernetes."""
    return [each for path in KUBERNETES for each in yaml.safe_load_all(path.read_text()) if each["kind"] == kind]


def _workloads() -> list[dict[str, Any]]:
    return _resources("StatefulSet") + _resources("Deployment")


def test_selectors_select_pods() -> None:
    """Services, policies, budgets, controllers and spread constraints select pods of the examples, by their labels."""
    labels = [each["spec"]["template"]["metadata"]["labels"] for each in _workloads()]
    assert labels == [{"app": "vllm"}, {"app": "valkey"}]
    for workload in _workloads():
        assert workload["spec"]["selector"] == {"matchLabels": workload["spec"]["template"]["metadata"]["labels"]}
    assert all(each["spec"]["selector"] in labels for each in _resources("Service"))
    assert [each["spec"]["selector"]["matchLabels"] for each in _resources("PodDisruptionBudget")] == [{"app": "vllm"}]
    rules = {each["metadata"]["name"]: each["spec"] for each in _resources("NetworkPolicy")}
    assert {name: rule["podSelector"] for name, rule in rules.items()} == {
        name: {"matchLabels": {"app": name}} for name in ("vllm", "valkey")
    }
    # By port: the pods that may connect, and those that are connected to.
    (from_engines,) = rules["valkey"]["ingress"]
    assert from_engines["from"] == [{"podSelector": {"matchLabels": {"app": "vllm"}}}]
    peers = {
        rule["ports"][0]["port"]: rule["to"][0]["podSelector"]["matchLabels"]
        for rule in rules["vllm"]["egress"]
        if "podSelector" in rule["to"][0]
    }
    assert peers == {6379: {"app": "valkey"}, 5710: {"app": "vllm"}}
    llm_d = {"llm-d.ai/model": "qwen3"}
    for name, pod in _pods().items():
        own = llm_d if name == "helm/llm-d.yaml" else {"app": "vllm"}
        for constraint in pod.get("topologySpreadConstraints", ()):
            assert constraint["labelSelector"] == {"matchLabels": own}, name


def test_ports_and_addresses_agree() -> None:
    """Services have the ports of their pods, probes a port that exists, and tiers the address of a service."""
    ports = {
        workload["metadata"]["name"]: {
            (port["name"], port["containerPort"])
            for container in workload["spec"]["template"]["spec"]["containers"]
            for port in container.get("ports", ())
        }
        for workload in _workloads()
    }
    assert ports == {"vllm": {("http", 8000), ("peer", 5710)}, "valkey": {("valkey", 6379)}}
    for service in _resources("Service"):
        listed = {(port["name"], port["port"]) for port in service["spec"]["ports"]}
        assert listed <= ports[service["spec"]["selector"]["app"]]
    (stateful,) = _resources("StatefulSet")
    headless = [each["metadata"]["name"] for each in _resources("Service") if each["spec"].get("clusterIP") == "None"]
    assert [stateful["spec"]["serviceName"]] == headless
    for name in ("kubernetes/vllm.yaml", "helm/llm-d.yaml"):
        (engine,) = _pods()[name]["containers"]
        assert {(port["name"], port["containerPort"]) for port in engine["ports"]} == ports["vllm"]
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert engine[probe]["httpGet"] == {"path": "/health", "port": "http"}
    (transfer,) = (each for name, each in _transfers() if "kubernetes" in name)
    peer, _, redis = transfer["kv_connector_extra_config"]["secondary_tiers"]
    assert peer["listen"].endswith(":5710") and peer["request_peers"][0].endswith(":5710")
    assert redis["url"] == "rediss://valkey:6379" and "valkey" in {s["metadata"]["name"] for s in _resources("Service")}
    rules = {each["metadata"]["name"]: each["spec"] for each in _resources("NetworkPolicy")}
    dns = rules["vllm"]["egress"][0]
    assert dns["to"] == [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "kube-system"}}}]
    assert {(port["port"], port.get("protocol", "TCP")) for port in dns["ports"]} == {(53, "UDP"), (53, "TCP")}


@pytest.mark.parametrize("name", ALL_PODS)
def test_volumes_are_mounted_and_exist(name: str) -> None:
    """Each mount has a volume, and each volume its secret, configuration or class; what is written to is a volume."""
    pod = ALL_PODS[name]
    stateful = _resources("StatefulSet")[0]["spec"]
    claims = stateful["volumeClaimTemplates"] if name == "kubernetes/vllm.yaml" else []
    volumes = {each["name"]: each for each in pod["volumes"]}
    names = set(volumes) | {each["metadata"]["name"] for each in claims}
    made = {"vllm-kvstore", "valkey"}
    configured = {each["metadata"]["name"] for each in _resources("ConfigMap")}
    assert {volume["secret"]["secretName"] for volume in volumes.values() if "secret" in volume} <= made
    assert {volume["configMap"]["name"] for volume in volumes.values() if "configMap" in volume} <= configured
    specs = [each["spec"] for each in claims]
    specs += [each["ephemeral"]["volumeClaimTemplate"]["spec"] for each in volumes.values() if "ephemeral" in each]
    assert {each["storageClassName"] for each in specs} <= {"local-nvme"}
    for container in pod["containers"]:
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        assert set(mounts.values()) <= names
        is_engine = name != "kubernetes/common.yaml"
        if is_engine and container["securityContext"].get("readOnlyRootFilesystem"):
            assert "/tmp" in mounts
        # KServe's template mounts its volume "dshm".
        assert not is_engine or "/dev/shm" in mounts or (name.endswith("kserve.yaml") and "dshm" in volumes)
    if name.endswith("kserve.yaml"):
        assert [each["name"] for each in pod["containers"]] == ["main"]
    assert set(re.findall(r"profiles/[\w.-]+", json.dumps(pod))) <= {"profiles/kvstore.json"}


def test_valkey_has_memory_and_its_configuration() -> None:
    """Valkey and the reloader have the files that they name, and the limit has an eighth more than the blocks take."""
    (config,) = (each["data"] for each in _resources("ConfigMap") if each["metadata"]["name"] == "valkey")
    server = _VALKEY["containers"][0]
    (mount,) = (each["mountPath"] for each in server["volumeMounts"] if each["name"] == "config")
    assert server["command"] == ["valkey-server", f"{mount}/{next(iter(config))}"]
    for container in _VALKEY["containers"]:
        mounts = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
        named = re.findall(r"(/run/secrets/[\w.-]+)/", json.dumps([container, config]))
        assert set(named) == {mounts["secrets"]}
    (limit,) = re.findall(r"^maxmemory (\d+)gb$", config["valkey.conf"], re.MULTILINE)
    assert int(limit) * 9 / 8 < int(server["resources"]["limits"]["memory"].removesuffix("Gi"))


def test_engines_have_memory_beside_the_primary_tier() -> None:
    """The limit covers all of /dev/shm, and twice as much for the engine, which loads weights through it."""
    for name, pod in _pods().items():
        (memory,) = (each["emptyDir"] for each in pod["volumes"] if each.get("emptyDir", {}).get("medium") == "Memory")
        limit = pod["containers"][0]["resources"]["limits"]["memory"]
        assert int(limit.removesuffix("Gi")) > 2 * int(memory["sizeLimit"].removesuffix("Gi")), name


def test_compose_names_files_and_services_that_exist() -> None:
    """Mounted files and the seccomp profile exist, and Prometheus reads the port on which the engine answers."""
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    (profile,) = (each for each in services["vllm"]["security_opt"] if each.startswith("seccomp="))
    mounts = [volume for each in services.values() for volume in each.get("volumes", ()) if volume.startswith(".")]
    for path in [profile.removeprefix("seccomp="), *(mount.split(":")[0] for mount in mounts)]:
        assert (DEPLOY / path).exists(), path
    scraped = yaml.safe_load((DEPLOY / "prometheus.yaml").read_text())["scrape_configs"][0]["static_configs"][0]
    assert [f"vllm:{port.split(':')[-1]}" for port in services["vllm"]["ports"]] == scraped["targets"]
    provider = yaml.safe_load((DEPLOY / "grafana/provisioning/dashboards/kvstore.yaml").read_text())["providers"][0]
    home = services["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    mounted = dict(volume.split(":")[:2] for volume in services["grafana"]["volumes"])
    assert mounted["./grafana/dashboards"] == provider["options"]["path"] == str(Path(home).parent)
    assert (DEPLOY / "grafana/dashboards" / Path(home).name).exists()


def test_examples_have_one_version_of_the_image() -> None:
    """All examples run the version of vLLM that the Dockerfile builds on; all other images have a version, too."""
    built = re.search(r"^FROM vllm/vllm-openai:v([\d.]+)$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    assert built is not None
    texts = "".join(path.read_text() for path in YAML)
    found = re.findall(r"vllm-kvstore:([\w.]+)|tag: \"([\w.]+)\"", texts)
    assert len(found) == 4 and {"".join(each) for each in found} == {built[1]}
    images = re.findall(r"image: (\S+)", texts)
    assert len(images) == 8 and all(re.search(r":v?\d+\.[\d.]+$", image) for image in images)
