"""The start of vLLM's plugin in a process: mistakes are reported early in one line, and logs look like vLLM's."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore.errors import BackendUnavailableError, ConfigError
from kvstore.vllm.options import with_short_types
from kvstore.vllm.startup import check_offloading, check_start, errors_logged, transfer_faults
from tests.project.tree import ROOT


@pytest.fixture(autouse=True)
def _command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program without arguments; a test may add some."""
    monkeypatch.setattr(sys, "argv", ["program"])


_FILE = {"type": "file", "path": "DIR/kv", "capacity": "1GiB"}
_OURS = {"spec_name": "KVStoreOffloadingSpec", "spec_module_path": "kvstore.vllm", "cpu_bytes_to_use": 1 << 26}

_BAD: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "misspelt option": ({}, {"capasity": "1GiB"}, "Did you mean 'capacity'"),
    "misspelt type": ({}, {"type": "fiel"}, "Did you mean 'file'"),
    "unknown codec": ({}, {"codec": "byteplain+zstd:1"}, "byteplain"),
    "no unit": ({}, {"capacity": "500"}, "Give it a unit"),
    "no parent": ({}, {"path": "DIR/a/b/c"}, "does not exist"),
    "no primary tier": ({"cpu_bytes_to_use": None}, {}, "cpu_bytes_to_use"),
    "misspelt option of the manager": ({"tiering": {"polcy": {}}}, {}, "Did you mean 'policy'"),
    "misspelt option of the spec": ({"evicton_policy": "arc"}, {}, "Did you mean 'eviction_policy'"),
    "misspelt object": ({"teiring": {}}, {}, "Did you mean 'tiering'"),
    "primary tier in words": ({"cpu_bytes_to_use": "much"}, {}, "'much' is not a valid size"),
    "primary tier without a unit": ({"cpu_bytes_to_use": 8}, {}, "Give it a unit"),
    "negative primary tier": ({"cpu_bytes_to_use": -5}, {}, "-5 is not a valid size"),
    "block size with a unit": ({"block_size": "16k"}, {}, "'block_size' is '16k'"),
    "two block sizes": ({"block_size": 16, "blocks_per_chunk": 2}, {}, "Remove one"),
    "flag in quotes": ({"offload_prompt_only": "false"}, {}, "without quotes"),
    "threshold in words": ({"store_threshold": "two"}, {}, "'store_threshold' is 'two'"),
    "numerics without quotes": ({"numerics": 1}, {}, "'numerics' is 1. Expected a name"),
    "no number": ({"block_size": None}, {}, "'block_size' is null"),
    "no policy": ({"eviction_policy": None}, {}, "Unknown eviction policy null"),
    "no tiering": ({"tiering": None}, {}, "tiering is null"),
    "directory of all users": ({}, {"path": "/tmp"}, "Use a directory below it"),
    "another user's file": ({}, {"path": "/etc/passwd"}, "not a writable directory"),
    "Redis without TLS": ({}, {"type": "redis", "url": "redis://10.9.9.9:6379"}, "has no TLS"),
    "Sentinel without TLS": (
        {},
        {"type": "redis", "sentinels": ["10.9.9.9:1"], "sentinel_master": "m"},
        "has no TLS",
    ),
    "address without scheme": ({}, {"type": "redis", "url": "cache:6379"}, "Give 'redis://cache:6379'"),
    "name too long": ({}, {"path": "DIR/" + 300 * "x"}, "File name too long"),
    "missing TLS file": (
        {},
        {"type": "redis", "url": "rediss://h", "tls_ca": "/no/ca.pem"},
        "TLS file '/no/ca.pem' can't be read",
    ),
    "missing profile": ({}, {"type": "s3", "bucket": "bucket", "profile": "no-such"}, "no profile"),
    "missing keyring": ({}, {"codec": [{"aead": {"keys": {"file": "/no/keys"}}}]}, "can't be read"),
    "name of a product": ({}, {"type": "valkey"}, "For valkey give 'redis'"),
    "nothing to serve": (
        {"manager": "vllm"},
        {"type": "peer", "listen": "127.0.0.1:5710"},
        "'listen' serves blocks of kvstore's own primary tier",
    ),
    "no type": ({}, {"type": None}, "secondary_tiers[0] has the type null"),
    "option of the engine": ({}, {"cpu_bytes_to_use": "8GiB"}, "belongs one level up"),
    "name with another meaning": ({}, {"label": "all"}, "none of them 'cpu' or 'all'"),
    "misspelt spec": ({"spec_name": "KVStoreOfloadingSpec"}, {}, "Did you mean 'KVStoreOffloadingSpec'"),
    "unknown policy": ({"eviction_policy": "mru"}, {}, "'eviction_policy': Unknown eviction policy 'mru'"),
    "vLLM's spec on the CPU": ({"spec_name": "TieringOffloadingSpec"}, {}, "KVStoreOffloadingSpec"),
}


def _extra(tmp_path: Path, more: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    base = _FILE if change.get("type", "file") in ("file", "fiel") else {}
    tier = {
        key: value.replace("DIR", str(tmp_path)) if isinstance(value, str) else value
        for key, value in (base | change).items()
    }
    return {**_OURS, "secondary_tiers": [tier], **more}


def _transfer(extra: dict[str, Any]) -> dict[str, Any]:
    return {"kv_connector": "KVStoreConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}


@pytest.mark.parametrize("name", _BAD)
def test_a_mistake_is_found_and_explained(tmp_path: Path, name: str) -> None:
    """A mistake is found before anything is created, and the troubleshooting page has a heading that quotes it."""
    more, change, said = _BAD[name]
    with pytest.raises(ConfigError, match=re.escape(said)) as refused:
        check_offloading(_extra(tmp_path, more, change))
    assert not list(tmp_path.iterdir())
    page = (ROOT / "docs/troubleshooting.md").read_text()
    quoted = [text for line in page.splitlines() if line.startswith("### ") for text in re.findall("`([^`]+)`", line)]
    patterns = [".+".join(map(re.escape, text.split("…"))) for text in quoted if len(text.replace("…", "")) > 9]
    assert any(re.search(pattern, str(refused.value)) for pattern in patterns), str(refused.value)


def test_all_mistakes_are_reported_at_once_with_their_places(tmp_path: Path) -> None:
    """Each fault has a line of its own, with its tier."""
    tiers = [{"type": "file", "path": str(tmp_path / "kv")}, {"type": "fiel"}, {"type": "memory", "capasity": 1}]
    with pytest.raises(ConfigError) as refused:
        check_offloading({**_OURS, "block_size": "16k", "teiring": {}, "secondary_tiers": tiers})
    lines = str(refused.value).split("\nkvstore: ")
    starts = ["secondary_tiers[1]", "'block_size'", "Unknown key 'teiring'", "secondary_tiers[0]", "secondary_tiers[2]"]
    assert len(lines) == len(starts) and all(map(str.startswith, lines, starts)), lines


def test_two_tiers_may_not_share_a_directory(tmp_path: Path) -> None:
    """Two tiers on one directory, in any spelling of the path, are refused with both places."""
    tiers = [_FILE | {"path": str(tmp_path / "kv")}, _FILE | {"path": f"{tmp_path}/./kv", "label": "second"}]
    with pytest.raises(ConfigError, match=re.escape("secondary_tiers[1]: secondary_tiers[0] uses")):
        check_offloading({**_OURS, "secondary_tiers": tiers})


def test_a_directory_of_another_format_is_refused_and_unchanged(tmp_path: Path) -> None:
    """A directory that the tier would refuse when it opens is refused before, and nothing is written there."""
    state = tmp_path / "kv" / ".kvstore"
    state.mkdir(parents=True)
    (state / "disk.json").write_text('{"format": 99}')
    with pytest.raises(ConfigError, match=r"secondary_tiers\[0\]: .* is of format 99"):
        check_offloading(_extra(tmp_path, {}, {}))
    assert [path.name for path in (tmp_path / "kv").rglob("*")] == [".kvstore", "disk.json"]


@pytest.mark.parametrize("inner", [0, 1])
def test_a_directory_inside_another_tiers_directory_is_refused(tmp_path: Path, inner: int) -> None:
    """Tiers whose directories lie within each other are refused, in either order."""
    tiers = [_FILE | {"path": f"{tmp_path}/kv"}, _FILE | {"path": f"{tmp_path}/kv", "label": "second"}]
    tiers[inner]["path"] += "/deeper"
    (tmp_path / "kv").mkdir()
    with pytest.raises(ConfigError, match="lie within each other"):
        check_offloading({**_OURS, "secondary_tiers": tiers})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"capacity": "8PiB"}, "has .* GiB. The tier fills it up to 'reserve'"),
        ({"capacity": "1MiB"}, "room for few blocks"),
        ({"path": "kv"}, "Give an absolute path, such as '/"),
    ],
)
def test_a_doubtful_directory_or_capacity_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, change: dict[str, Any], said: str
) -> None:
    """A capacity beyond the disk or for few blocks, and a relative path, are warnings with the tier's place."""
    monkeypatch.chdir(tmp_path)
    check_offloading(_extra(tmp_path, {}, change))
    assert re.search(rf"secondary_tiers\[0\]: .*{said}", caplog.text)


@pytest.mark.parametrize("tiers", [{"secondary_tiers": []}, {}])
def test_no_tier_is_a_warning(tiers: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    """An engine without secondary tiers starts, with a warning that names the remedy."""
    check_offloading({**_OURS, **tiers})
    assert "There are no 'secondary_tiers'" in caplog.text and "Add one" in caplog.text


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"kv_role": "both"}, "'kv_role' is 'both'. Expected one of .*Did you mean 'kv_both'"),
        ({"kv_role": ...}, "'kv_role' is missing"),
        (
            {"kv_connector_module_path": "kvstore.vlm"},
            "'kvstore.vlm', and there is no such module. Give 'kvstore.vllm'",
        ),
        (
            {"kv_connector_extra_config": {**_OURS, "spec_module_path": "kvstore.vlm"}},
            "'spec_module_path' is 'kvstore.vlm'",
        ),
        ({"kv_rol": "kv_both"}, "no option 'kv_rol'. Did you mean 'kv_role'"),
        ({"kv_connector": "KVStoreConector"}, "Did you mean 'KVStoreConnector'"),
    ],
)
def test_a_mistake_beside_the_tiers_is_found(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    """Mistakes in vLLM's own part of the object are reported too, as vLLM would only do in a traceback."""
    transfer = {key: value for key, value in (_transfer(_extra(tmp_path, {}, {})) | change).items() if value != ...}
    for each in transfer, _transfer({"connectors": [transfer]}) | {"kv_connector": "MultiConnector"}:
        found = transfer_faults(each)
        if each is transfer or "kv_connector" not in change:
            assert found is not None and any(re.search(said, str(fault)) for fault in found[0]), found


def test_doubtful_configurations_are_warnings(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A key that a newer vLLM may read, and a second tier without a label, are warnings and do not stop an engine."""
    tiers = [_FILE | {"path": str(tmp_path / name)} for name in "ab"]
    check_offloading({**_OURS, "lazy_offload": True, "secondary_tiers": tiers})
    assert "'lazy_offload' is not an option of kvstore" in caplog.text
    assert "secondary_tiers[1]: without a label" in caplog.text
    caplog.clear()
    check_offloading({**_OURS, "secondary_tiers": [tiers[0], {"type": "memory"}]})
    assert not caplog.text


@pytest.mark.parametrize("size", ["64MiB", "67108864", 1 << 26, float(1 << 26), 0.1 + (1 << 26)])
def test_the_primary_tier_takes_a_size_with_a_unit(tmp_path: Path, size: object) -> None:
    """``cpu_bytes_to_use`` may be a size with a unit, as every other size; vLLM gets a number."""
    extra = _extra(tmp_path, {"cpu_bytes_to_use": size}, {})
    check_offloading(extra)
    assert int(with_short_types(extra)["cpu_bytes_to_use"]) == 1 << 26


@pytest.mark.parametrize("backend", ["native", "lmcache"])
def test_an_option_of_vllm_that_replaces_the_connector_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    """``--kv-offloading-size`` with another connector would run the engine without kvstore."""
    monkeypatch.setenv("VLLM_USE_SIMPLE_KV_OFFLOAD", "1")

    def __post_init__(self: Any) -> None:
        check_start()

    def engine_core(vllm_config: Any, executor_class: Any) -> None:
        check_start()

    ours = _transfer(_extra(tmp_path, {}, {}))
    __post_init__(SimpleNamespace(kv_transfer_config=ours, kv_offloading_size=None))
    replaced = SimpleNamespace(kv_transfer_config=ours, kv_offloading_size=1.0, kv_offloading_backend=backend)
    with pytest.raises(ConfigError, match="kv-offloading-size"):
        __post_init__(replaced)
    changed = SimpleNamespace(kv_transfer_config=ours | {"kv_connector": "SimpleCPUOffloadConnector"})
    with pytest.raises(ConfigError, match="does not use kvstore"):
        engine_core(changed, None)


def test_vllms_argument_gives_the_size_of_the_primary_tier(tmp_path: Path) -> None:
    """With its native backend, --kv-offloading-size sets ``cpu_bytes_to_use`` after the check."""
    extra = {name: value for name, value in _extra(tmp_path, {}, {}).items() if name != "cpu_bytes_to_use"}
    native = SimpleNamespace(kv_offloading_size=8.0, kv_offloading_backend="native")
    assert transfer_faults(_transfer(extra), native) == ([], [])
    assert transfer_faults(_transfer(extra)) != ([], [])


def test_valid_and_foreign_configurations_pass(tmp_path: Path) -> None:
    """A valid configuration, one of vLLM's own tiers, and one of another spec pass."""
    check_offloading(_extra(tmp_path, {}, {}))
    check_offloading({"spec_name": "TieringOffloadingSpec", "secondary_tiers": [{"type": "fs", "root_dir": "/x"}]})
    check_offloading({"spec_name": "CPUOffloadingSpec"})
    check_offloading({})


def test_a_third_party_may_keep_its_records_in_a_file(tmp_path: Path) -> None:
    """An engine whose third-party backend has a file as ``path`` starts also after the file has been made."""
    tier = {"type": "tests.cli.file_database:FileDatabase", "path": str(tmp_path / "records.db")}
    check_offloading({**_OURS, "secondary_tiers": [tier]})
    (tmp_path / "records.db").touch()
    check_offloading({**_OURS, "secondary_tiers": [tier]})


def test_another_machine_is_not_checked_from_here(tmp_path: Path) -> None:
    """Directories and devices are not checked on another machine, because they are the engine's."""
    check_offloading(_extra(tmp_path, {}, {"path": "DIR/a/b/c"}), here=False)
    with pytest.raises(ConfigError, match="capasity"):
        check_offloading(_extra(tmp_path, {}, {"capasity": 1}), here=False)
    theirs = {
        "spec_name": "TieringOffloadingSpec",
        "cpu_bytes_to_use": 1 << 30,
        "secondary_tiers": [{"type": "memory"}],
    }
    check_offloading(theirs, here=False)
    with pytest.raises(ConfigError, match="this vLLM is for the CPU"):
        check_offloading(theirs)


def test_the_command_line_is_read_before_it_is_parsed(tmp_path: Path) -> None:
    """One line ends the server, in any spelling of the option, even inside a multi-connector."""
    bad = _transfer(_extra(tmp_path, {}, {"capasity": "1GiB"}))
    several = bad | {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": [bad]}}
    for arguments in (
        ["--kv-transfer-config", json.dumps(bad)],
        [f"--kv-transfer-config={json.dumps(bad)}"],
        ["--kv_transfer_config", json.dumps(several)],
    ):
        sys.argv[1:] = arguments
        with pytest.raises(SystemExit) as ended:
            check_start()
        assert isinstance(ended.value.code, str)
        assert ended.value.code.startswith("kvstore: ")
        assert "\n" not in ended.value.code
    for arguments in (["--kv-transfer-config"], ["--kv-transfer-config", "{"], ["--kv-transfer-config", "[1]"], []):
        sys.argv[1:] = arguments
        check_start()


@pytest.mark.parametrize("arguments", [["--kv-offloading-size", "8"], ["--kv_offloading_size=0.5"]])
def test_the_command_line_may_give_the_size_of_the_primary_tier(tmp_path: Path, arguments: list[str]) -> None:
    """A server takes ``--kv-offloading-size`` for ``cpu_bytes_to_use``, unless vLLM would then not find kvstore."""
    transfer = _transfer(_extra(tmp_path, {"cpu_bytes_to_use": None}, {}))
    del transfer["kv_connector_extra_config"]["cpu_bytes_to_use"]
    given = sys.argv[1:] = [*arguments, "--kv-transfer-config", json.dumps(transfer)]
    check_start()
    for more, text in (
        (["--kv-offloading-backend", "lmcache"], "which does not use kvstore"),
        (["--kv-transfer-config", json.dumps(transfer | {"kv_connector_module_path": "kvstore.vllm"})], "Leave that"),
    ):
        sys.argv[1:] = [*given, *more]
        with pytest.raises(SystemExit, match=text):
            check_start()


def test_a_primary_tier_without_room_ends_the_start(tmp_path: Path) -> None:
    """What does not fit into memory or /dev/shm ends the server before it loads weights, with the remedy."""
    transfer = _transfer(_extra(tmp_path, {"cpu_bytes_to_use": "1PiB"}, {}))
    sys.argv[1:] = ["--kv-transfer-config", json.dumps(transfer)]
    with pytest.raises(SystemExit, match=r"^kvstore: 'cpu_bytes_to_use': .* does not fit: .*[Mm]ake it smaller\.$"):
        check_start()


def test_a_program_gets_an_error_that_it_can_catch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is raised when ``EngineArgs`` are created, and when an engine starts in its caller's process."""
    bad = SimpleNamespace(kv_transfer_config=_transfer(_extra(tmp_path, {}, {"capasity": "1GiB"})))

    def __post_init__(self: Any) -> None:
        check_start()

    def engine_core(vllm_config: Any, executor_class: Any) -> None:
        check_start()

    with pytest.raises(ConfigError, match=r"^kvstore: .*capasity"):
        __post_init__(bad)
    with pytest.raises(ConfigError, match=r"^kvstore: .*capasity"):
        engine_core(bad, None)
    # An engine in a process of its own has no caller to catch it.
    monkeypatch.setattr("multiprocessing.parent_process", lambda: object())
    with pytest.raises(SystemExit, match=r"^kvstore: .*capasity"):
        engine_core(bad, None)


def test_only_the_process_of_an_engine_checks_its_configuration(tmp_path: Path) -> None:
    """A configuration that another function was given does not count: it may be of another engine."""

    def frontend(vllm_config: Any) -> None:
        check_start()

    frontend(SimpleNamespace(kv_transfer_config=_transfer(_extra(tmp_path, {}, {"capasity": "1GiB"}))))


def test_other_objects_made_on_the_way_are_not_taken_for_the_engines(tmp_path: Path) -> None:
    """A dataclass created by ``EngineArgs`` has no configuration of a connector; ``EngineArgs`` have it."""

    def __post_init__(self: Any) -> None:
        if self.part is None:
            check_start()
        else:
            __post_init__(self.part)

    bad = SimpleNamespace(kv_transfer_config=_transfer(_extra(tmp_path, {}, {"capasity": "1GiB"})))
    bad.part = SimpleNamespace(part=None)
    with pytest.raises(ConfigError, match=r"^kvstore: .*capasity"):
        __post_init__(bad)


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | {"PYTHONPATH": str(ROOT), "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.mark.engine
def test_a_real_server_ends_with_one_line(tmp_path: Path) -> None:
    """The server loads nothing: the last line is kvstore's, and there is no traceback."""
    transfer = _transfer(_extra(tmp_path, {}, {"capasity": "1GiB"}))
    server = "vllm.entrypoints.openai.api_server"
    done = _run("-m", server, "--model", str(tmp_path / "none"), "--kv-transfer-config", json.dumps(transfer))
    assert done.returncode == 1
    last = done.stderr.rstrip().splitlines()[-1]
    assert last.startswith("kvstore: "), done.stderr
    assert "Did you mean 'capacity'?" in last
    assert "Traceback" not in done.stdout + done.stderr


@pytest.mark.parametrize("parent", [None, object()])
def test_a_tier_that_cannot_be_opened_is_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, parent: object
) -> None:
    """The reason is logged once; vLLM's own process ends without a traceback, a program gets the exception."""
    monkeypatch.setattr("multiprocessing.parent_process", lambda: parent)
    with pytest.raises(SystemExit if parent else BackendUnavailableError), errors_logged():
        raise BackendUnavailableError("no answer", backend="redis")
    assert caplog.messages == ["kvstore: [redis] no answer"]


@pytest.mark.engine
def test_log_lines_look_like_vllms() -> None:
    """Lines have time, level and logger, including INFO, once, and the program's own logging is kept."""
    code = """
import logging, sys
{before}
import logging.config
from vllm.logger import DEFAULT_LOGGING_CONFIG
logging.config.dictConfig(DEFAULT_LOGGING_CONFIG)
from kvstore.vllm.startup import show_logs
show_logs(); show_logs()
logging.getLogger("kvstore.some.place").info("a line")
logging.getLogger("kvstore.some.place").debug("not shown")
"""
    done = _run("-c", code.format(before=""))
    lines = [line for line in (done.stdout + done.stderr).splitlines() if "kvstore.some.place" in line]
    assert len(lines) == 1, done.stdout + done.stderr
    assert re.fullmatch(r"INFO \d\d-\d\d \d\d:\d\d:\d\d \[kvstore\.some\.place\] a line", lines[0])
    done = _run("-c", code.format(before="logging.basicConfig(level=logging.INFO, format='mine %(message)s')"))
    assert [line for line in (done.stdout + done.stderr).splitlines() if "a line" in line] == ["mine a line"]
