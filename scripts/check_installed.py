"""Checks that an installed kvstore works, with one of its extras or none; run by scripts/check_dist.sh."""

import importlib
import subprocess
import sys
from importlib import metadata

import kvstore
from kvstore.registry import BACKENDS, CODECS

NAMED = {
    "mooncake": BACKENDS,
    "redis": BACKENDS,
    "s3": BACKENDS,
    "zstd": CODECS,
    "aead": CODECS,
}


def main(extra: str) -> None:
    """Store and load a block, and use the extra; errors for missing extras must name them."""
    assert metadata.version("vllm-kvstore") == kvstore.__version__
    memory = bytearray(b"k" * 4096 + bytes(4096))
    config = {"backend": "memory", "capacity": "1MiB"}
    with kvstore.open_tier(
        config, primary=memory, slot_bytes=4096, namespace=kvstore.Namespace({"model": "x"})
    ) as tier:
        tier.submit_store(kvstore.TransferJob(1, keys=[b"key"], slots=[0]))
        tier.drain()
        tier.submit_load(kvstore.TransferJob(2, keys=[b"key"], slots=[1]))
        tier.drain()
        assert all(job.success for job in tier.get_finished())
    assert memory[4096:] == memory[:4096]
    for name, registry in NAMED.items():
        if name == extra:
            assert registry.find(name) is not None
        else:
            refused(registry, name)
    for command in ("kvstore", "kvstore-bench"):
        done = subprocess.run([command, "--version"], capture_output=True, text=True, check=False)
        if extra == "cli":
            assert (done.returncode, done.stdout) == (0, f"kvstore {kvstore.__version__}\n"), done
        else:
            assert (done.returncode, "vllm-kvstore[cli]" in done.stderr) == (2, True), done
    if extra == "plot":
        importlib.import_module("matplotlib")


def refused(registry: object, name: str) -> None:
    """Check that an error, if any, names the extra to install; another extra may have installed the package."""
    try:
        registry.find(name)  # type: ignore[attr-defined]
    except kvstore.ConfigError as error:
        assert f"vllm-kvstore[{name}]" in str(error), error


main(sys.argv[1])
