"""The secrets and the Valkey of ``deploy/kubernetes``: made by its script, used by its tiers, on real servers."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import yaml
from redis import AuthenticationError, Redis, ResponseError

from kvstore.cli.tier_argument import parse_tier
from kvstore.namespace import Namespace
from kvstore.testing.tier_rig import TierRig
from tests.cli.in_process import run_here
from tests.project.tree import ROOT
from tests.redis.servers import Server, free_ports, running

pytestmark = pytest.mark.repository

COMMON = list(yaml.safe_load_all((ROOT / "deploy/kubernetes/common.yaml").read_text()))
PAGE = ROOT / "docs/containers.md"
MOUNTS = {"/run/secrets/kvstore": "vllm-kvstore", "/run/secrets/valkey": "valkey"}
NAMESPACE = Namespace({"model": "llama"})


def make_secrets(folder: Path, *, fails_at: str = "-") -> None:
    """Run the script, with a ``kubectl`` that only notes its arguments, and fails for one secret."""
    programs = folder.parent / "bin"
    programs.mkdir(exist_ok=True)
    (programs / "kubectl").write_text(
        f'#!/bin/sh\necho "$*" >> {folder.parent / "calls"}\n'
        f'case "$*" in create\\ secret\\ generic\\ {fails_at}\\ *) ;; create*) echo made ;; *) grep -q . ;; esac\n'
    )
    (programs / "kubectl").chmod(0o755)
    command = ["sh", str(ROOT / "deploy/kubernetes/secrets.sh"), str(folder), "--namespace=llm"]
    path = f"{programs}:{os.environ['PATH']}"
    done = subprocess.run(command, env=os.environ | {"PATH": path}, capture_output=True, text=True, check=False)
    assert (done.returncode == 0) == (fails_at == "-"), done.stderr


def placed(text: str, folder: Path) -> str:
    """Return a text of the configuration with the paths of the secrets here."""
    for mount, name in MOUNTS.items():
        text = text.replace(mount, str(folder / name))
    return text


@contextmanager
def valkey(folder: Path, kind: str) -> Iterator[Server]:
    """Run a server with the configuration of the example.

    Redis lacks a right, and the option that reads certificates again; the Valkey of the tests lacks TLS.
    """
    if kind == "redis":
        users = folder / "valkey/users.acl"
        users.write_text(users.read_text().replace(" +client|no-touch", ""))
    text = next(each["data"]["valkey.conf"] for each in COMMON if each["metadata"]["name"] == "valkey")
    lines = [line for line in placed(text, folder).splitlines() if line.split()[0] not in ("port", "tls-port")]
    lacking = "tls-auto-reload" if kind == "redis" else "tls-"
    (port,) = free_ports(1)
    lines = [line for line in lines if not line.startswith(lacking)]
    lines += [f"tls-port {port}", "port 0"] if kind == "redis" else [f"port {port}"]
    home = folder.parent / kind
    home.mkdir(exist_ok=True)
    (home / "valkey.conf").write_text("\n".join([*lines, "bind 127.0.0.1", f"dir {home}"]))
    ca = folder / "ca.crt" if kind == "redis" else None
    with running(Server(kind, port, home, [str(home / "valkey.conf")], ca)) as (server,):
        yield server


def options(text: str, server: Server, folder: Path) -> dict[str, Any]:
    """Return the options of the example's Redis tier, on a server of the tests."""
    found: dict[str, Any] = json.loads(placed(text, folder))
    found["backend"] = found.pop("type")
    found["url"] = found["url"].replace("valkey:6379", f"localhost:{server.port}")
    if server.tls_ca is None:
        found["url"] = found["url"].replace("rediss:", "redis:")
        del found["tls_ca"]
    return found


def engine_tier() -> str:
    """Return the Redis tier of the engines, as JSON."""
    text = next(each["data"]["kv-transfer.json"] for each in COMMON if each["metadata"]["name"] == "vllm-kvstore")
    return json.dumps(json.loads(text)["kv_connector_extra_config"]["secondary_tiers"][2])


def admin_tier() -> str:
    """Return the tier of the command in the documentation, as JSON."""
    found = re.search(r"kvstore inspect --tier \"\$1\"' - \\\n\s*'(\{.*\})'", PAGE.read_text())
    assert found is not None
    return found[1]


def client(server: Server, folder: Path, user: str, file: str) -> Redis:
    """Return a client with the rights of a user."""
    tls = {"ssl": True, "ssl_ca_certs": str(folder / "ca.crt")} if server.tls_ca else {}
    word = (folder / file).read_text().strip()
    return Redis("localhost", server.port, username=user, password=word, **tls)


def denied(server: Server, folder: Path, user: str, file: str, *command: str) -> bool:
    """Return whether a server denies a command to a user."""
    with client(server, folder, user, file) as one:
        try:
            one.execute_command(*command)
        except ResponseError as error:
            return "permission" in str(error).lower()
    return False


@pytest.mark.parametrize("kind", ["redis", "valkey"])
def test_users_can_do_their_work_and_nothing_else(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine stores and loads, an administrator lists, verifies and removes, the reloader reloads; no more."""
    folder = tmp_path / "secrets"
    make_secrets(folder)
    monkeypatch.setenv("KV_ADMIN", (folder / "admin-password").read_text().strip())
    keys = [b"block-%d" % number for number in range(4)]
    with valkey(folder, kind) as server:
        with TierRig(options(engine_tier(), server, folder), namespace=NAMESPACE, slot_bytes=4096, slots=4) as rig:
            assert rig.store(keys).success and rig.load(keys).success
            assert rig.tier.stats().backend_counters["credentials_refused"] == 0
        admin = {**options(admin_tier(), server, folder), "type": "redis"}
        del admin["backend"]
        tier = json.dumps(admin)
        assert parse_tier(tier).backend == "redis"
        for command, status in (
            (["inspect"], 0),
            (["scrub", "--yes"], 0),
            (["gc", "--unused-for", "0.001s", "--yes"], 0),
        ):
            done = run_here(command[0], "--tier", tier, *command[1:])
            assert done.returncode == status, done.stderr
        users = {
            (
                "kv",
                "vllm-kvstore/valkey-password",
            ): "scan 0|keys *|del kv:a|flushall|config get *|acl list|get other|eval 1 0",
            ("kvadmin", "admin-password"): "set kv:a b|flushall|config get *|acl load|get other|keys *",
            ("reload", "valkey/reload-password"): "get kv:a|acl list|acl setuser a|config get *|flushall|info",
        }
        for (user, file), commands in users.items():
            for command in commands.split("|"):
                assert denied(server, folder, user, file, *command.split()), (user, command)
        assert not denied(server, folder, "reload", "valkey/reload-password", "acl", "load")
        with Redis("localhost", server.port, **_tls(server, folder)) as nobody, pytest.raises(AuthenticationError):
            nobody.execute_command("ping")


def test_the_commands_of_valkeys_pod_work(tmp_path: Path) -> None:
    """Each secret that a pod names is made; the probe succeeds on a server that answers, and the reloader reloads."""
    folder = tmp_path / "secrets"
    make_secrets(folder)
    for mount, name in MOUNTS.items():
        for file in re.findall(rf"{mount}/([\w.-]+)", json.dumps(COMMON)):
            assert (folder / name / file).exists(), f"{name}: {file}"
    (pod,) = (each["spec"]["template"]["spec"] for each in COMMON if each["kind"] == "Deployment")
    server_container, reloader = pod["containers"]
    probe = server_container["readinessProbe"]["exec"]["command"]
    loop = re.fullmatch(r"while sleep 30; do (.*); done", reloader["args"][0])
    assert probe == server_container["livenessProbe"]["exec"]["command"] and loop is not None
    with valkey(folder, "redis") as server:

        def run(command: list[str]) -> subprocess.CompletedProcess[str]:
            """Run a command of the pod with the client of Redis, which has another name."""
            here = [placed(word, folder).replace("VALKEYCLI_AUTH", "REDISCLI_AUTH") for word in command]
            here = [word.replace("valkey-cli", f"redis-cli -p {server.port}") for word in here]
            return subprocess.run(["sh", "-c", " ".join(here)], capture_output=True, text=True, check=False, timeout=30)

        assert run(probe).returncode == 0
        assert run([loop[1]]).stdout.strip() == "OK"
        server.kill()
        assert run(probe).returncode != 0


def test_the_rights_are_those_of_the_docs(tmp_path: Path) -> None:
    """An engine and an administrator have the rights that other pages list, for one server whose settings are read."""
    make_secrets(tmp_path / "secrets")
    lines = (tmp_path / "secrets/valkey/users.acl").read_text().splitlines()
    rights = {line.split()[1]: line[line.find("~") :] for line in lines[1:3]}
    listed = {
        page: re.findall(r"^user \w+ on >CHANGE-ME (~.*)$", (ROOT / "docs" / page).read_text(), re.MULTILINE)
        for page in ("redis.md", "admin.md")
    }
    assert rights == {"kv": f"{listed['redis.md'][0]} +info", "kvadmin": f"{listed['admin.md'][0]} +client|no-touch"}


def test_a_rotation_needs_no_restart(tmp_path: Path) -> None:
    """After the second run of the script, old and new passwords work, then only newer ones; a tier goes on."""
    folder = tmp_path / "secrets"
    make_secrets(folder)
    keep = {name: (folder / name).read_bytes() for name in ("vllm-kvstore/keyring.json", "ca.crt", "ca.key")}
    passwords = [(folder / "vllm-kvstore/valkey-password").read_text()]
    with (
        valkey(folder, "valkey") as server,
        TierRig(
            {**options(engine_tier(), server, folder), "breaker_cooldown": "100ms", "breaker_cooldown_max": "500ms"},
            namespace=NAMESPACE,
            slot_bytes=4096,
            slots=4,
        ) as rig,
    ):
        assert rig.store([b"a"]).success
        for _ in range(2):
            reload = client(server, folder, "reload", "valkey/reload-password")
            make_secrets(folder)
            assert reload.execute_command("acl", "load")
            passwords.append((folder / "vllm-kvstore/valkey-password").read_text())
            with client(server, folder, "reload", "valkey/reload-password") as one:
                assert one.execute_command("acl", "load")
            assert rig.load([b"a"]).success
        assert len(set(passwords)) == 3
        for word, is_valid in zip(passwords, (False, True, True), strict=True):
            with Redis("localhost", server.port, username="kv", password=word.strip(), **_tls(server, folder)) as one:
                if is_valid:
                    assert not one.exists("kv:a")
                else:
                    with pytest.raises(AuthenticationError):
                        one.exists("kv:a")
    assert keep == {name: (folder / name).read_bytes() for name in keep}
    applied = (tmp_path / "calls").read_text().splitlines()
    assert len([line for line in applied if line.startswith("create secret generic")]) == 6
    assert all(line.endswith("--namespace=llm") for line in applied)


@pytest.mark.parametrize("fails_at", ["valkey", "vllm-kvstore"])
def test_runs_that_fail_lock_no_engine_out(fails_at: str, tmp_path: Path) -> None:
    """After runs that applied nothing, or only Valkey's secret, each password that a pod may have is valid."""
    folder = tmp_path / "secrets"
    make_secrets(folder)
    passwords = [(folder / "vllm-kvstore/valkey-password").read_text()]
    for failure in (fails_at, fails_at, "-"):
        make_secrets(folder, fails_at=failure)
        passwords.append((folder / "vllm-kvstore/valkey-password").read_text())
    users = (folder / "valkey/users.acl").read_text()
    valid = [sha256(word.strip().encode()).hexdigest() in users for word in passwords]
    # The second one is of a failed run that another one followed.
    assert valid == [True, False, True, True]
    make_secrets(folder)
    users = (folder / "valkey/users.acl").read_text()
    assert [sha256(word.strip().encode()).hexdigest() in users for word in passwords] == [False, False, False, True]


def _tls(server: Server, folder: Path) -> dict[str, Any]:
    return {"ssl": True, "ssl_ca_certs": str(folder / "ca.crt")} if server.tls_ca else {}
