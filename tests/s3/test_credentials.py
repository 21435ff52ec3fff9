"""Renewal of credentials: once for all waiting requests, and within each request's own deadline."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from botocore.credentials import RefreshableCredentials

from kvstore.backends.s3.config import S3Config
from kvstore.backends.s3.credentials import Credentials, CurrentCredentials, find_credentials, make_session
from kvstore.backends.s3.failures import Cause, S3Error
from kvstore.testing.waiting import eventually_async


class Role(RefreshableCredentials):  # type: ignore[misc] # botocore has no types.
    """Temporary credentials whose renewal lasts until released; ``left_s`` is their remaining lifetime."""

    def __init__(self) -> None:
        self.left_s = 0.0
        self.renewals = 0
        self.running = 0
        self.let_go = asyncio.Event()
        self.failure: Exception | None = None

    def refresh_needed(self, refresh_in: float | None = None) -> bool:
        return self.left_s < (900.0 if refresh_in is None else refresh_in)

    async def get_frozen_credentials(self) -> Any:
        self.renewals += 1
        self.running += 1
        try:
            await self.let_go.wait()
        finally:
            self.running -= 1
        if self.failure is not None:
            raise self.failure
        return SimpleNamespace(access_key=f"key{self.renewals}", secret_key="secret", token="token")


def of_provider(provider: Any, pause_s: float = 10.0) -> CurrentCredentials:
    """Credentials of a provider, without files to follow."""

    async def find() -> Any:
        return provider

    return CurrentCredentials(find, pause_s=pause_s)


async def test_one_renewal_serves_all_waiting_requests() -> None:
    """A request without time left stops waiting; the only renewal continues for later requests."""
    role = Role()
    credentials = of_provider(role)
    for _ in range(3):
        with pytest.raises(S3Error, match="still being renewed") as caught:
            await credentials.get(0.01)
        assert caught.value.cause is Cause.TIMEOUT
        assert caught.value.may_pass
    later = [asyncio.create_task(credentials.get(30)) for _ in range(5)]
    await asyncio.sleep(0)
    role.let_go.set()
    assert [found.access_key for found in await asyncio.gather(*later)] == ["key1"] * 5
    assert role.renewals == 1
    await credentials.close()


@pytest.mark.parametrize("pause_s", [3600.0, 0.0])
async def test_credentials_that_are_still_good_are_used_meanwhile(pause_s: float) -> None:
    """Credentials valid for ten more minutes are used while new ones are requested now and then; then callers wait."""
    role = Role()
    role.let_go.set()
    credentials = of_provider(role, pause_s)
    assert (await credentials.get(30)).access_key == "key1"
    role.left_s = 3600.0
    assert (await credentials.get(30)).access_key == "key1"
    assert role.renewals == 1
    role.let_go.clear()
    role.left_s = 800.0
    assert (await credentials.get(30)).access_key == "key1"
    if pause_s:
        await asyncio.sleep(0)
        assert role.renewals == 1, "asked again within the pause"
        await credentials.close()
        return
    await eventually_async(lambda: role.renewals == 2)
    role.left_s = 500.0
    with pytest.raises(S3Error):
        await credentials.get(0.01)
    role.let_go.set()
    assert (await credentials.get(30)).access_key == "key2"
    await credentials.close()


async def test_a_renewal_that_fails_is_tried_again() -> None:
    """Any exception of a provider means missing credentials for this request; the next request tries again."""
    role = Role()
    role.let_go.set()
    role.failure = ZeroDivisionError("secret things")
    credentials = of_provider(role)
    with pytest.raises(S3Error, match="ZeroDivisionError") as caught:
        await credentials.get(30)
    assert caught.value.cause is Cause.CREDENTIALS
    assert "secret things" not in str(caught.value)
    role.failure = None
    assert (await credentials.get(30)).access_key == "key2"
    await credentials.close()


async def test_fixed_credentials_are_asked_for_once() -> None:
    """Credentials that do not expire are read once, and then returned without waiting."""
    asked = []

    class Fixed:
        async def get_frozen_credentials(self) -> Any:
            asked.append(1)
            return SimpleNamespace(access_key="key", secret_key="secret", token=None)

    credentials = of_provider(Fixed())
    assert {(await credentials.get(30)).access_key for _ in range(3)} == {"key"}
    assert len(asked) == 1
    await credentials.close()


async def test_close_ends_a_renewal() -> None:
    """No renewal continues after close, and closing before the first use is allowed."""
    role = Role()
    credentials = of_provider(role)
    await credentials.close()
    with pytest.raises(S3Error):
        await credentials.get(0.01)
    assert role.running == 1
    await credentials.close()
    assert role.running == 0


@pytest.mark.parametrize("source", ["options", "profile"])
async def test_tokens_in_files_are_renewed_for_days(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Temporary keys whose files are renewed are used from then on: by themselves, or at once after a refusal."""
    names = {"access_key_id": "id", "secret_access_key": "secret", "session_token": "token"}
    paths = {option: tmp_path / name for option, name in names.items()}
    options: dict[str, Any] = {option: {"file": str(path)} for option, path in paths.items()}
    if source == "profile":
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
        options = {"profile": "work"}

    def renew_files(number: int) -> Credentials:
        for path in paths.values():
            path.write_text(f"{path.name}-{number}")
        lines = [f"aws_{option} = {path.name}-{number}" for option, path in paths.items()]
        (tmp_path / "credentials").write_text("\n".join(["[work]", *lines]))
        return Credentials(*[f"{name}-{number}" for name in ("id", "secret", "token")])

    first = renew_files(0)
    config = S3Config(bucket="bucket", **options)
    credentials = await find_credentials(config, make_session(config)[0], pause_s=0.0)
    assert await credentials.get() == first
    for quarter in range(1, 20, 2):
        expected = renew_files(quarter)

        async def is_used(expected: Credentials = expected) -> bool:
            return await credentials.get() == expected

        await eventually_async(is_used)
        expected = renew_files(quarter + 1)
        assert await credentials.refused(credentials.last, is_certain=True)
        assert credentials.last == expected
    assert credentials.refusals == 0
    assert not await credentials.refused(credentials.last, is_certain=True)
    assert credentials.refusals == 1
    await credentials.close()
