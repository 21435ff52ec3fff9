"""LoRA adapters: blocks computed with other weights, also of an adapter replaced under its name, are never found."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore.testing import eventually
from kvstore.vllm import KVStoreOffloadingSpec, compat, tags
from kvstore.vllm.tags import Adapters, Limits
from tests.vllm.engine_config import engine
from tests.vllm.engines import Engine, Start, full_blocks, managed, prompt
from tests.vllm.harness import Driver, LookupResult, key_of
from tests.vllm.models import make_adapter

TEXT = prompt(1, 320)
LORA = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2}


def digest(known: Adapters, path: Path, name: str = "a") -> bytes | None:
    """Return the digest of an adapter."""
    check = known.check(SimpleNamespace(lora_name=name, lora_path=str(path)))
    eventually(lambda: check.is_done, 60, what="the check")
    return check.digest


def test_a_digest_is_that_of_the_content(tmp_path: Path) -> None:
    """Equal files have equal digests in every process and directory; another weight or configuration changes it."""
    digests = set()
    for number, (config, weights) in enumerate([(b"{}", b"1"), (b"{ }", b"1"), (b"{}", b"2"), (b"{}1", b"")]):
        path = tmp_path / str(number)
        path.mkdir()
        (path / "adapter_config.json").write_bytes(config)
        (path / "adapter_model.bin").write_bytes(weights)
        digests.add(digest(Adapters(), path))
        copy = shutil.copytree(path, tmp_path / f"copy of {number}")
        (copy / "README.md").write_text("other")
        digests.add(digest(Adapters(), copy))
    renamed = shutil.copytree(tmp_path / "0", tmp_path / "renamed")
    (renamed / "adapter_model.bin").rename(renamed / "adapter_model.pt")
    digests.add(digest(Adapters(), renamed))
    assert len(digests) == 5 and None not in digests


@pytest.mark.parametrize("by_path", [False, True])
def test_an_adapter_that_changed_in_use_has_no_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_path: bool
) -> None:
    """Which content the engine has is unknown then; a restarted engine, or another path that vLLM hashes, has one."""
    monkeypatch.setattr(tags, "hashes_adapter_paths", lambda: by_path)
    known, path, other = Adapters(), tmp_path / "a", tmp_path / "b"
    for place, content in ((path, b"1"), (other, b"2")):
        place.mkdir()
        (place / "adapter_model.bin").write_bytes(content)
    first = digest(known, path)
    assert first is not None
    with monkeypatch.context() as unread:
        unread.setattr(hashlib, "file_digest", None)
        assert digest(known, path) == first, "an unchanged file is not read again"
    (path / "adapter_model.bin").touch()
    assert digest(known, path) == first, "the same content"
    assert (digest(known, other) is not None) is by_path
    (path / "adapter_model.bin").write_bytes(b"2")
    assert digest(known, path) is None
    (path / "adapter_model.bin").write_bytes(b"1")
    assert digest(known, path) is None, "a worker may have loaded the other content meanwhile"
    assert digest(Adapters(), path) == first


def test_an_adapter_replaced_only_while_it_is_opened_has_no_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The digest of a directory to which the path led for a moment is not that of the adapter."""
    path, other = made(tmp_path / "a"), made(tmp_path / "b")
    signature_of = tags._signature_of

    def swapped(directory: str) -> tags._Signature:
        """Return the adapter's signature; at other times its path leads to the other directory."""
        if not path.samefile(first):
            path.unlink()
            path.symlink_to(first)
        found = signature_of(directory)
        path.unlink()
        path.symlink_to(other)
        return found

    first = path.rename(tmp_path / "first")
    path.symlink_to(first)
    monkeypatch.setattr(tags, "_signature_of", swapped)
    assert digest(Adapters(), path) is None


def test_an_adapter_rewritten_behind_the_reader_has_no_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that changed after it was read, but before the end of the check, is noticed by that check."""
    path, file_digest = made(tmp_path / "a"), hashlib.file_digest

    def rewritten(*arguments: Any) -> Any:
        """Read a file, then rewrite it with another content of the same length."""
        found = file_digest(*arguments)
        (path / "adapter_model.bin").write_bytes(b"b")
        return found

    monkeypatch.setattr(hashlib, "file_digest", rewritten)
    assert digest(Adapters(), path) is None


def test_an_adapter_that_cannot_be_read_has_no_digest(tmp_path: Path) -> None:
    """Missing files, a download that fails and a file system that hangs leave other adapters as they are."""
    known = Adapters()
    assert digest(known, tmp_path / "nowhere") is None
    (tmp_path / "empty").mkdir()
    assert digest(known, tmp_path / "empty") is None
    (tmp_path / "good").mkdir()
    (tmp_path / "good" / "adapter_model.bin").write_bytes(b"1")
    assert digest(known, tmp_path / "good", "good") is not None
    (tmp_path / "hangs").mkdir()
    os.mkfifo(tmp_path / "hangs" / "adapter_model.bin")
    assert digest(Adapters(Limits(check_s=0.2)), tmp_path / "hangs", "hangs") is None
    with open(tmp_path / "hangs" / "adapter_model.bin", "wb"):
        pass


@pytest.fixture
def hung(tmp_path: Path) -> Iterator[Path]:
    """An adapter whose files can't be read before the end of the test."""
    path = made(tmp_path / "hung")
    (path / "adapter_model.bin").unlink()
    os.mkfifo(path / "adapter_model.bin")
    yield path
    writer = os.open(path / "adapter_model.bin", os.O_RDWR)
    (path / "adapter_model.bin").unlink()  # So that no further check waits.
    os.close(writer)


def made(path: Path) -> Path:
    """Make the directory of an adapter."""
    path.mkdir()
    (path / "adapter_model.bin").write_bytes(path.name.encode())
    return path


def is_checking(known: Adapters) -> bool:
    """Return whether a check has begun and not ended."""
    return bool(known._running)


def begun(known: Adapters, path: Path) -> tags.Check:
    """Begin a check."""
    return known.check(SimpleNamespace(lora_name=path.name, lora_path=str(path)))


def test_an_adapter_that_hangs_delays_no_other(tmp_path: Path, hung: Path) -> None:
    """The check of another adapter ends while the first one still waits for its file system."""
    known = Adapters(Limits(check_s=600.0))
    checks = [begun(known, hung) for _ in range(3)]
    assert digest(known, made(tmp_path / "good")) is not None
    assert not any(check.is_done for check in checks)


def test_an_adapter_that_hangs_keeps_one_thread(tmp_path: Path, hung: Path) -> None:
    """Further requests of it wait for its check instead of starting another one, which would hang as well."""
    known = Adapters(Limits(check_s=600.0, threads_max=2))
    for _ in range(3):
        begun(known, hung)
        eventually(lambda: is_checking(known), 60, what="the start of the check")
    assert digest(known, made(tmp_path / "good")) is not None
    assert digest(known, made(tmp_path / "other")) is not None


def test_waiting_checks_are_bounded(tmp_path: Path, hung: Path) -> None:
    """Requests of one adapter share a check; beyond the limit of adapters, a request has no digest at once."""
    known = Adapters(Limits(check_s=600.0, threads_max=1, waiting_max=3))
    begun(known, hung)
    eventually(lambda: is_checking(known), 60, what="the start of the check")
    paths = [made(tmp_path / name) for name in "abc"]
    a, b, c = [begun(known, path) for path in (paths[0], paths[1], hung)]
    assert [begun(known, path) for path in (paths[0], paths[1], hung)] == [a, b, c]
    refused = begun(known, paths[2])
    assert refused.is_done and refused.digest is None
    assert not any(check.is_done for check in (a, b, c))


def test_known_adapters_are_bounded(tmp_path: Path) -> None:
    """Beyond the limit, a new adapter has no digest; the known ones keep theirs, and their changes are detected."""
    known, first, other = Adapters(Limits(known_max=1)), made(tmp_path / "first"), made(tmp_path / "other")
    assert digest(known, first) is not None
    assert digest(known, other, "other") is None
    assert digest(known, first) is not None
    (first / "adapter_model.bin").write_bytes(b"changed")
    assert digest(known, first) is None


def test_request_with_an_unreadable_adapter_stores_nothing(tmp_path: Path) -> None:
    """Its blocks have no name, and vLLM does not offer them again."""
    config = engine()
    config.lora_config = SimpleNamespace()
    driver = Driver([{"type": "memory"}], spec_class=KVStoreOffloadingSpec, vllm_config=config)
    missing = SimpleNamespace(lora_name="a", lora_path=str(tmp_path / "missing"))
    driver.engine.request = SimpleNamespace(lora_request=missing)
    context = driver.request()
    assert driver.lookup([key_of(1)], context) == [LookupResult.MISS]
    assert driver.manager.prepare_store([key_of(1)], context).keys_to_store == []
    driver.close()


@pytest.mark.parametrize("writes", [[], [b"other"], [b"other", b"a"]])
def test_an_adapter_replaced_before_its_load_stores_nothing(tmp_path: Path, writes: list[bytes]) -> None:
    """Blocks computed with files that replaced the checked ones, if only for a while, are not stored."""
    path, key = made(tmp_path / "a"), key_of(1)
    content = (path / "adapter_model.bin").read_bytes()

    def opened() -> Driver:
        config = engine()
        config.lora_config = SimpleNamespace()
        tier = {"type": "file", "path": str(tmp_path / "kv"), "capacity": "64MiB"}
        return Driver([tier], spec_class=KVStoreOffloadingSpec, vllm_config=config)

    def request(driver: Driver) -> Any:
        driver.engine.request = SimpleNamespace(lora_request=SimpleNamespace(lora_name="a", lora_path=str(path)))
        return driver.request()

    driver = opened()
    context = request(driver)
    assert driver.lookup([key], context) == [LookupResult.MISS]
    jobs = driver.begin_store([key], context)
    for other in writes:
        (path / "adapter_model.bin").write_bytes(other)
    driver.copy(*jobs)
    driver.settle()
    driver.manager.on_request_finished(context)
    driver.close()
    (path / "adapter_model.bin").write_bytes(content)
    driver = opened()
    expected = LookupResult.MISS if writes else LookupResult.HIT
    assert driver.lookup([key], request(driver)) == [expected]
    driver.close()


@pytest.mark.parametrize("is_linked", [False, True])
def test_an_adapter_that_changed_for_a_while_has_no_digest(tmp_path: Path, is_linked: bool) -> None:
    """A worker may keep the files to which the path led between two checks, so later requests keep no blocks either."""
    path, other = made(tmp_path / "a"), made(tmp_path / "b")
    if is_linked:
        path = tmp_path / "link"
        path.symlink_to(tmp_path / "a")
    known = Adapters()

    def ended(check: tags.Check) -> tags.Check:
        eventually(lambda: check.is_done, 60, what="the check")
        return check

    first = ended(begun(known, path))
    assert known.is_unchanged(first, ended(known.check_again(first)))
    if is_linked:
        for place in (other, tmp_path / "a"):
            path.unlink()
            path.symlink_to(place)
    else:
        for content in (b"b", b"a"):
            (path / "adapter_model.bin").write_bytes(content)
    again = ended(known.check_again(first))
    assert again.digest == first.digest and not known.is_unchanged(first, again)
    assert digest(known, path, path.name) is None


def test_an_adapter_of_a_hub_is_asked_for_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check after a worker has loaded it finds the copy on this machine, without a request to the hub."""
    path, downloads = made(tmp_path / "a"), list[bool]()

    def snapshot_download(*, repo_id: str = "", local_files_only: bool = False, **more: Any) -> str:
        downloads.append(not local_files_only)
        return str(path)

    monkeypatch.setattr(
        "huggingface_hub.snapshot_download", lambda name, **more: snapshot_download(repo_id=name, **more)
    )
    monkeypatch.setattr("vllm.lora.utils.get_adapter_absolute_path", lambda name: snapshot_download(repo_id=name))
    known = Adapters()
    first = known.check(SimpleNamespace(lora_name="a", lora_path="nobody/adapter"))
    eventually(lambda: first.is_done, 60, what="the check")
    again = known.check_again(first)
    eventually(lambda: again.is_done, 60, what="the second check")
    assert known.is_unchanged(first, again) and downloads == [True, False]


def test_an_error_at_the_end_of_a_checked_store_ends_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store is not repeated, and the I/O of this step and of later ones is submitted."""
    path, key = made(tmp_path / "a"), key_of(1)
    config = engine()
    config.lora_config = SimpleNamespace()
    tier = {"type": "file", "path": str(tmp_path / "kv"), "capacity": "64MiB"}
    driver = Driver([tier], spec_class=KVStoreOffloadingSpec, vllm_config=config)
    driver.expects_errors = True
    driver.engine.request = SimpleNamespace(lora_request=SimpleNamespace(lora_name="a", lora_path=str(path)))
    context = driver.request()
    driver.lookup([key], context)
    driver.copy(*driver.begin_store([key], context))
    ended: list[bool] = []
    monkeypatch.setattr(driver.manager.manager, "complete_store", lambda *_: 1 / 0)
    monkeypatch.setattr(driver.manager.manager, "on_step_end", lambda _: ended.append(True))

    def has_failed() -> bool:
        driver.step()
        return bool(driver.manager.errors.count)

    eventually(has_failed, 60, what="the end of the check")
    before = len(ended)
    driver.step()
    assert driver.manager.errors.count == 1 and before and len(ended) == before + 1
    monkeypatch.undo()
    driver.close()


def test_vllm_hashes_the_paths_of_adapters() -> None:
    """The feature is found in the installed version."""
    assert compat.hashes_adapter_paths()


def ask(engine: Engine, adapter: list[Any] | None = None, salt: str | None = None) -> tuple[list[int], int]:
    """Send the prompt to an engine with an empty device cache; return the answer and the number of cached tokens."""
    engine.call("forget_device")
    (answer,) = engine.call("ask", [TEXT], 6, None, None, salt, adapter)
    engine.call("settle")
    return answer["tokens"], answer["cached"]


@pytest.mark.engine
@pytest.mark.timeout(600)
def test_requests_with_other_weights_share_nothing(start: Start, tmp_path: Path, model: Path) -> None:
    """Base model, adapters and salts, even of one name, have separate blocks in each tier, also after a restart."""
    one, two = (make_adapter(tmp_path / name, model, seed) for seed, name in enumerate(("one", "two")))
    kinds = [(None, None), (["one", 1, str(one)], None), (["two", 2, str(two)], None), (None, "salt"), (None, "one")]
    plain = start(llm=LORA)
    expected = [ask(plain, *kind)[0] for kind in kinds]
    plain.close()
    assert expected[0] == expected[3] == expected[4] and len({*map(tuple, expected)}) == 3
    shared = managed(tmp_path / "kv")
    engine = start(offloading=shared, llm=LORA)
    assert [ask(engine, *kind) for kind in kinds] == [(tokens, 0) for tokens in expected]
    for _ in range(2):
        assert [ask(engine, *kind) for kind in kinds] == [(tokens, full_blocks(320)) for tokens in expected]
        engine.kill()
        engine = start(offloading=shared, llm=LORA)

    # Replaced under its name and path: while the engine runs, and before the next engine starts.
    make_adapter(one, model, 7)
    engine.kill()
    plain = start(llm=LORA)
    replaced, _ = ask(plain, ["one", 1, str(one)])
    plain.close()
    assert replaced not in expected
    engine = start(offloading=shared, llm=LORA)
    assert ask(engine, ["one", 1, str(one)]) == (replaced, 0), "nothing of its predecessor"
    assert ask(engine, ["one", 1, str(one)]) == (replaced, full_blocks(320))
    make_adapter(one, model, 8)
    for _ in range(2):
        assert ask(engine, ["one", 1, str(one)]) == (replaced, 0), "its workers have the old one, the disk the new one"
    assert "changed while this engine used it" in engine.text()
    assert ask(engine, *kinds[2]) == (expected[2], full_blocks(320)), "other adapters are unaffected"
    engine.close()
