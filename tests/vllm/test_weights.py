"""A model's weights count by samples of every tensor, or by the commit of its repository."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.kv_offload.config import OffloadingModelConfig

from kvstore.vllm.connector import EngineContext
from kvstore.vllm.namespace import engine_namespace
from tests.vllm.engine_config import HFConfig, engine
from tests.vllm.harness import offloading_config

MIB = 1 << 20
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def digest(model: Path | str, declared: str | None = None, **changes: Any) -> str:
    """Return the namespace of an engine with this model."""
    extra = {} if declared is None else {"weights": declared}
    name = OffloadingModelConfig(name=str(model), dtype="float16")
    spec = SimpleNamespace(config=offloading_config([], model=name, extra_config=extra))
    return engine_namespace(spec, 4096, EngineContext(engine(**changes))).hex


def save(path: Path, tensors: dict[str, bytes], **header: Any) -> None:
    """Write a safetensors file."""
    at, entries = 0, dict(header)
    for name, data in tensors.items():
        entries[name] = {"dtype": "U8", "shape": [len(data)], "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(entries).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(tensors.values()))


def append(path: Path, data: bytes, **header: Any) -> None:
    """Write a safetensors file with this header and data, which need not fit together."""
    save(path, {}, **header)
    path.write_bytes(path.read_bytes() + data)


OTHER = bytes(byte ^ 0x55 for byte in range(256))
"""Another value for each byte."""


def patch(path: Path, at: int, length: int) -> None:
    """Change bytes of a file, all of them."""
    with path.open("r+b") as file:
        file.seek(at)
        old = file.read(length)
        file.seek(at)
        file.write(old.translate(OTHER))


def test_a_change_of_any_tensor_counts(tmp_path: Path) -> None:
    """Each tensor is sampled, so weights updated in place under the same path have a namespace of their own."""
    lengths = (2, 128, 4096, 7000, 3 * MIB, 1, 300_000, 64)
    tensors = {f"model.layers.{i}.weight": random.Random(i).randbytes(length) for i, length in enumerate(lengths)}
    weights = tmp_path / "model.safetensors"
    found = set()
    for name in (None, *tensors):
        changed = {name: bytes(byte ^ 1 for byte in tensors[name])} if name else {}
        save(weights, {**tensors, **changed}, __metadata__={"format": "pt"})
        found.add(digest(tmp_path))
    assert len(found) == 1 + len(tensors)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "model.pt", "consolidated.pth", "q.gguf"])
def test_a_change_of_a_mebibyte_counts_anywhere(tmp_path: Path, name: str) -> None:
    """Long tensors, and files whose tensors are unknown, are sampled in each MiB."""
    weights = tmp_path / name
    content = random.Random(1).randbytes(5 * MIB)
    rng = random.Random(2)
    starts = [0, 4 * MIB, *(rng.randrange(4 * MIB) for _ in range(20))]
    save(weights, {"a": content})
    first, header = digest(tmp_path), weights.stat().st_size - len(content)
    for start in starts:
        patch(weights, header + start, MIB)
        assert digest(tmp_path) != first, start
        patch(weights, header + start, MIB)
    assert digest(tmp_path) == first


def test_a_change_of_any_column_of_a_matrix_counts(tmp_path: Path) -> None:
    """The samples of a matrix do not all lie in the same columns: a changed head of an output projection is found."""
    row, head = 16 * 1024, 2048
    weights = tmp_path / "model.safetensors"
    content = random.Random(1).randbytes(8 * MIB)
    found = set()
    for start in (None, *range(0, row, head)):
        data = bytearray(content)
        for at in range(start, len(data), row) if start is not None else ():
            data[at : at + head] = bytes(head)
        save(weights, {"o_proj": bytes(data)})
        found.add(digest(tmp_path))
    assert len(found) == 1 + row // head


MALFORMED: dict[str, Callable[[Path, bytes], object]] = {
    "no header": lambda path, data: path.write_bytes(bytes(8) + data),
    "a header longer than the file": lambda path, data: path.write_bytes(b"\xff" * 8 + data),
    "no JSON": lambda path, data: path.write_bytes((9).to_bytes(8, "little") + b"{tensors}" + data),
    "a list": lambda path, data: path.write_bytes((2).to_bytes(8, "little") + b"[]" + data),
    "deep JSON": lambda path, data: path.write_bytes((90_000).to_bytes(8, "little") + b"[" * 90_000 + data),
    "a tensor without offsets": lambda path, data: save(path, {"a": data}, b={}),
    "offsets that are no numbers": lambda path, data: save(path, {"a": data}, b={"data_offsets": ["0", None]}),
    "offsets that are no integers": lambda path, data: append(path, data, b={"data_offsets": [0.0, float(len(data))]}),
    "three offsets": lambda path, data: save(path, {"a": data}, b={"data_offsets": [0, 1, 2]}),
    "a gap": lambda path, data: append(path, data, b={"data_offsets": [0, 9]}, c={"data_offsets": [11, len(data)]}),
    "an overlap": lambda path, data: save(path, {"a": data}, b={"data_offsets": [0, len(data)]}),
    "bytes after the last tensor": lambda path, data: append(path, data, b={"data_offsets": [0, 9]}),
    "nothing": lambda path, data: path.write_bytes(b""),
}


@pytest.mark.parametrize("fault", MALFORMED)
def test_malformed_safetensors_are_sampled_like_other_formats(tmp_path: Path, fault: str) -> None:
    """A file without a valid header counts by its length and a sample in each MiB; no start fails because of it."""
    weights = tmp_path / "model.safetensors"
    MALFORMED[fault](weights, random.Random(1).randbytes(3 * MIB))
    first = digest(tmp_path)
    assert digest(tmp_path) == first
    if weights.stat().st_size:
        patch(weights, weights.stat().st_size - MIB, MIB)
        assert digest(tmp_path) != first
    weights.write_bytes(weights.read_bytes() + b"1")
    assert digest(tmp_path) != first


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Return a model's directory."""
    path = tmp_path / "model"
    path.mkdir()
    save(path / "model.safetensors", {"a": random.Random(1).randbytes(MIB)})
    for name in ("config.json", "preprocessor_config.json", "tokenizer.json", "model.safetensors.index.json"):
        (path / name).write_text("{}")
    return path


@pytest.mark.parametrize(
    "name",
    [
        "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json", "modeling_own.py",
        "model.safetensors.index.json", "hf_quant_config.json", "something_new.json", "other.safetensors",
        "speech-lora/adapter_config.json", "speech-lora/adapter_model.safetensors", "folder.bin/adapter_config.json",
    ],
)  # fmt: skip
def test_files_that_describe_the_model_or_its_input_count_by_content(model: Path, name: str) -> None:
    """Another resolution of pictures, another list of weight files, or other code gives other blocks."""
    first = digest(model)
    (model / name).parent.mkdir(exist_ok=True)
    (model / name).write_text('{"size": 224}')
    second = digest(model)
    (model / name).write_text('{"size": 448}')
    third = digest(model)
    assert len({first, second, third}) == 3
    assert digest(model) == third


def test_a_long_description_counts_to_its_end(model: Path) -> None:
    """The list of a large model's weight files has some MiB, and is read whole."""
    text = "[" + " " * (MIB + MIB // 2)
    found = set()
    for end in ("1]", "2]"):
        (model / "model.safetensors.index.json").write_text(text + end)
        found.add(digest(model))
    assert len(found) == 2


@pytest.mark.parametrize(
    "name",
    [
        "tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.json",
        "chat_template.jinja", "README.md", "vocab.json", "config.json", ".cache/download.json",
    ],
)  # fmt: skip
def test_files_that_change_no_block_do_not_count(model: Path, name: str) -> None:
    """The engine's configuration has config.json with its overrides, and keys of blocks have the ids of tokens."""
    first = digest(model)
    (model / name).parent.mkdir(exist_ok=True)
    (model / name).write_text('{"something": 1}')
    assert digest(model) == first


def test_times_and_links_do_not_count(model: Path, tmp_path: Path) -> None:
    """Files copied over themselves, or replaced by links to copies, are the same model."""
    first = digest(model)
    copy = shutil.copytree(model, tmp_path / "copy")
    shutil.rmtree(model)
    model.mkdir()
    for path in copy.iterdir():
        (model / path.name).symlink_to(path)
    assert digest(model) == first


def test_a_model_of_a_hub_counts_by_its_commit() -> None:
    """The commit of the weights counts, not of another repository's configuration."""
    assert digest("org/model") == digest("org/model")
    assert digest("org/model") != digest("org/model", **{"model_config.hf_config": HFConfig(commit=COMMIT)})
    pinned = {"model_config.revision": COMMIT, "model_config.hf_config_path": "org/other"}
    assert digest("org/model", **pinned) == digest("org/model", **pinned)
    pinned["model_config.revision"] = "main"
    assert digest("org/model", **pinned) != digest("org/model", **pinned)


def test_a_model_of_modelscope_counts_by_its_files(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That hub's cache has no commits, so the files count where vLLM has downloaded them."""

    def snapshot_download(model_id: str, revision: str | None, *, local_files_only: bool) -> str:
        assert local_files_only
        if model_id != "org/model":
            raise ValueError("Cannot find the requested files in the cached path")
        return str(model)

    name = "modelscope.hub.snapshot_download"
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(snapshot_download=snapshot_download))
    monkeypatch.setenv("VLLM_USE_MODELSCOPE", "True")
    no_commit = {"model_config.hf_config": HFConfig(commit=None)}
    first = digest("org/model", **no_commit)
    assert digest("org/model", **no_commit) == first
    save(model / "model.safetensors", {"a": bytes(MIB)})
    assert digest("org/model", **no_commit) != first
    assert digest("org/absent", **no_commit) != digest("org/absent", **no_commit)


UNKNOWN: dict[str, dict[str, Any]] = {
    "an object store": {"model_config.model_weights": "s3://bucket/model"},
    "a server": {"load_config.load_format": "tensorizer"},
    "a format of a plugin": {"load_config.load_format": "new"},
    "no commit": {"model_config.hf_config": HFConfig(commit=None)},
}


@pytest.mark.parametrize("case", UNKNOWN)
def test_unidentified_weights_are_no_other_engines(case: str, caplog: pytest.LogCaptureFixture) -> None:
    """Weights that may differ at the next start share no blocks with it, unless the operator gives them a name."""
    changes = UNKNOWN[case]
    assert digest("org/model", **changes) != digest("org/model", **changes)
    assert "can't identify the weights" in caplog.text
    assert digest("org/model", "a", **changes) == digest("org/model", "a", **changes)
    assert digest("org/model", "a", **changes) != digest("org/model", "b", **changes)


def test_unreadable_weights_are_unidentified(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A file that this process can't read is no reason to take the path for an identity."""
    (model / "model.safetensors").unlink()
    (model / "model.safetensors").symlink_to(model / "absent")
    assert digest(model) != digest(model)
    assert "can't be read" in caplog.text


@pytest.mark.parametrize("kind", ["pipe", "socket"])
def test_files_that_can_not_be_read_again_are_unidentified(
    model: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A pipe or socket with the name of a description does not hang the start, and may have any content."""
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as server, contextlib.chdir(model):
        if kind == "pipe":
            os.mkfifo("events.json")
        else:
            server.bind("events.json")
        assert digest(model) != digest(model)
    assert "can't be read" in caplog.text and "events.json" in caplog.text


def test_each_spelling_of_a_path_is_the_same_model(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The place of the model counts, not how a command line names it."""
    (model.parent / "link").symlink_to(model)
    monkeypatch.chdir(model.parent)
    monkeypatch.setenv("HOME", str(model.parent))
    spellings = [model, f"{model}/", "model", "./model", "model/../model", "link", "~/model"]
    assert len({digest(each) for each in spellings}) == 1
    shutil.copytree(model, "copy")
    assert digest("copy") != digest("model")


def test_every_change_of_a_list_of_files_counts(tmp_path: Path) -> None:
    """Contents of two files that change places, a new name, another end that no sample has, one more empty file."""
    content = {"a.bin": b"a" * 9000, "b.bin": b"b" * 9000}
    lists = [
        content,
        {"a.bin": content["b.bin"], "b.bin": content["a.bin"]},
        {"a.bin": content["a.bin"], "c.bin": content["b.bin"]},
        {**content, "a.bin": content["a.bin"] + b"a"},
        {**content, "a.bin": content["a.bin"] + b"b" * 9000},
        {"a.bin": content["a.bin"]},
        {**content, "c.json": b""},
        {**content, "c.py": b""},
        {"folder/a.bin": content["a.bin"], "folder/b.bin": content["b.bin"]},
    ]
    found = set()
    for files in lists:
        shutil.rmtree(tmp_path)
        for name, data in files.items():
            (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
            (tmp_path / name).write_bytes(data)
        found.add(digest(tmp_path))
    assert len(found) == len(lists)


def test_the_order_in_which_a_directory_lists_its_files_does_not_count(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy on another file system may have another one."""
    found, listed = set(), Path.iterdir
    for backward in (False, True):
        monkeypatch.setattr(Path, "iterdir", lambda path, to=backward: iter(sorted(listed(path), reverse=to)))
        found.add(digest(model))
    assert len(found) == 1


def test_a_declared_name_hides_no_change_of_files(model: Path) -> None:
    """Files that kvstore can read count beside the operator's name for the weights."""
    first = digest(model, "a")
    assert digest(model, "a") == first
    save(model / "model.safetensors", {"a": bytes(MIB)})
    assert digest(model, "a") != first


def test_random_weights_are_identified(model: Path) -> None:
    """The random weights of vLLM have a constant seed."""
    dummy = {"load_config.load_format": "dummy"}
    assert digest(model, **dummy) == digest(model, **dummy)
    assert digest(model, **dummy) != digest(model)
