"""Opening a tier over a program's own memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvstore import ConfigError, Namespace, Outcome, open_tier
from kvstore.testing.tier_rig import TierRig


@pytest.mark.parametrize("memory", [b"\0" * 8192, "text", 8192])
def test_memory_that_can_not_be_written_is_refused(memory: Any) -> None:
    """Anything but writable memory is a configuration error with the expected type."""
    with pytest.raises(ConfigError, match=r"writable.*mmap or a bytearray"):
        open_tier({"backend": "memory"}, primary=memory, slot_bytes=4096, namespace=Namespace({}))


def test_url_opens_the_same_tier_as_its_object(tmp_path: Path) -> None:
    """A program may give a tier as the command line does."""
    url = f"file://{tmp_path / 'kv'}?capacity=64MiB&reserve=0"
    with open_tier(url, primary=bytearray(8192), slot_bytes=4096, namespace=Namespace({})) as tier:
        stats = tier.stats()
    assert (stats.name, stats.capacity_bytes) == ("file", 64 << 20)
    assert (tmp_path / "kv" / ".kvstore").is_dir()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            {"namespace": {"model": "m"}},
            "'namespace' is a dict. Expected a kvstore.Namespace, such as "
            'Namespace({"model": "my-model", "dtype": "bfloat16"}).',
        ),
        ({"slot_bytes": "4KiB"}, "'slot_bytes' is '4KiB'. Expected a number of bytes, such as 4096."),
        (
            {"config": "/mnt/kv"},
            "The tier (not shown) is text, but not a URL. Expected one such as 'file:///mnt/kv?capacity=10GiB', "
            "'redis://host:6379/0' or 's3://bucket/prefix', or a dict.",
        ),
        (
            {"config": "fiel:///mnt/kv?capacity=1GiB"},
            "Unknown backend 'fiel'. Did you mean 'file'? Known: file, memory, mooncake, nvme, peer, redis, s3. For "
            "your own class give 'module:Class'.",
        ),
        (
            {"config": "file:///mnt/kv"},
            "The file tier needs 'capacity', such as '500GiB', or '80%' of the filesystem.",
        ),
    ],
    ids=["namespace", "number", "path", "backend", "capacity"],
)
def test_wrong_argument_is_named(arguments: dict[str, Any], said: str) -> None:
    """The error says what was given, what is expected, and gives an example."""
    right: dict[str, Any] = {"config": {"backend": "memory"}, "slot_bytes": 4096, "namespace": Namespace({})}
    with pytest.raises(ConfigError) as caught:
        open_tier(primary=bytearray(8192), **right | arguments)
    assert str(caught.value) == said


def test_a_tier_is_closed_at_the_end_of_a_with() -> None:
    """Any writable memory is accepted, and it may be freed after the ``with`` block."""
    memory = bytearray(8192)
    with open_tier({"backend": "memory"}, primary=memory, slot_bytes=4096, namespace=Namespace({})) as tier:
        assert tier.stats().name == "memory"
    memory.clear()  # Refused while any view exists.


def test_codecs_of_others_with_one_wire_id_keep_their_blocks_apart() -> None:
    """Tiers with different third-party codecs of the same wire id do not find each other's blocks."""
    key = b"k" * 32
    outcomes = []
    for codec, do in (("Inverted", TierRig.store), ("Mirrored", TierRig.load), ("Inverted", TierRig.load)):
        config = {"backend": "memory", "shelf": "wire-ids", "codec": [f"tests.codec.third_party:{codec}"]}
        with TierRig(config, namespace=Namespace({}), slot_bytes=4096, slots=1) as rig:
            outcomes += do(rig, [key]).outcomes
    assert outcomes == [Outcome.OK, Outcome.MISS, Outcome.OK]
