"""Retries, their budget, and concurrency, with a client whose failures are scripted."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping, Sequence

import pytest

from kvstore.backends.s3.client import ListPage, ObjectClient, ObjectInfo, backoff_s
from kvstore.backends.s3.config import S3Config
from kvstore.backends.s3.failures import Cause, S3Error
from kvstore.testing.waiting import eventually_async


class Script(ObjectClient):
    """A client whose calls fail with the given causes, one after the other, and then succeed."""

    def __init__(
        self, causes: Sequence[Cause] = (), *, always: Cause | None = None, takes_s: float = 0.0, **options: object
    ) -> None:
        super().__init__(S3Config(bucket="bucket", **options))  # type: ignore[arg-type]
        self.causes = list(causes)
        self.always = always
        self.takes_s = takes_s
        self.attempts = 0
        self.running = 0
        self.most = 0
        self.timeouts: list[float] = []
        self.order: list[str] = []
        self.listed_names: list[str] = []
        self.etag = "etag"

    async def act(self, timeout_s: float, name: str = "") -> None:
        """Make the next scripted result, within the time, as every client must."""
        self.attempts += 1
        self.timeouts.append(timeout_s)
        self.order.append(name)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await asyncio.sleep(min(self.takes_s, timeout_s))
        finally:
            self.running -= 1
        if self.takes_s > timeout_s:
            raise S3Error(Cause.TIMEOUT, "As told.")
        cause = self.always or (self.causes.pop(0) if self.causes else None)
        if cause is not None:
            raise S3Error(cause, "As told.")

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    async def _put(
        self, key: str, buffers: Sequence[bytes | memoryview], timeout_s: float, condition: Mapping[str, str]
    ) -> str:
        await self.act(timeout_s, key)
        return "etag"

    async def _get_into(
        self, key: str, buffers: Sequence[memoryview], capacity: int, timeout_s: float, offset: int | None
    ) -> ObjectInfo:
        await self.act(timeout_s, key)
        return ObjectInfo(key, 1, self.etag)

    async def _head(self, key: str, timeout_s: float) -> ObjectInfo:
        await self.act(timeout_s, key)
        raise S3Error(Cause.REJECTED, "Not there.", 404)

    async def _delete_many(self, keys: Sequence[str], timeout_s: float) -> None:
        await self.act(timeout_s)

    async def _list_page(self, prefix: str, timeout_s: float, start_after: str) -> ListPage:
        await self.act(timeout_s)
        return ListPage([ObjectInfo(name, 1) for name in self.listed_names], more=False)


async def test_temporary_failures_are_retried_and_counted() -> None:
    """A request that fails twice succeeds at the third attempt, and each failure is counted by its cause."""
    client = Script([Cause.RESET, Cause.SERVER_ERROR])
    assert await client.head("k", timeout_s=30) is None
    assert client.attempts == 3
    assert client.failures == {Cause.RESET: 1, Cause.SERVER_ERROR: 1}
    assert client.retries == 2


@pytest.mark.parametrize("cause", list(Cause))
async def test_which_failures_are_final(cause: Cause) -> None:
    """A permanent failure is raised at once, others after the third attempt."""
    client = Script(always=cause)
    with pytest.raises(S3Error) as caught:
        await client.get_into("k", [memoryview(bytearray(8))], timeout_s=30)
    assert caught.value.cause is cause
    assert client.attempts == (3 if caught.value.may_pass else 1)


async def test_an_outage_is_not_made_worse() -> None:
    """If every request fails, a thousand requests make at most 1,100 attempts."""
    client = Script(always=Cause.SERVER_ERROR)
    calls = [client.head("k", timeout_s=30) for _ in range(1000)]
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(result, S3Error) for result in results)
    assert 1000 < client.attempts <= 1100
    assert client.retries_denied > 0


def test_pauses() -> None:
    """A pause is random up to a bound, which doubles up to a second."""
    rng = random.Random(1)
    for tries, bound_s in ((1, 0.1), (2, 0.2), (3, 0.4), (9, 1.0)):
        pauses = [backoff_s(tries, rng=rng.random) for _ in range(500)]
        assert 0 <= min(pauses) < bound_s / 10
        assert bound_s * 0.9 < max(pauses) <= bound_s


@pytest.mark.parametrize("names", [["kv/a", "other/b"], ["a"], ["kw/"]])
async def test_objects_outside_of_the_prefix_are_no_answer(names: list[str]) -> None:
    """A service that ignores the prefix fails: the housekeeper would treat another tier's objects as its own."""
    client = Script()
    client.listed_names = names
    with pytest.raises(S3Error, match="outside") as caught:
        await client.list_page("kv/", timeout_s=30)
    assert caught.value.cause is Cause.PROTOCOL
    client.listed_names = ["kv/a", "kv/b"]
    assert len((await client.list_page("kv/", timeout_s=30)).objects) == 2


async def test_a_list_that_begins_again_is_no_answer() -> None:
    """A service that ignores the start of a page would give an endless list."""
    client = Script()
    client.listed_names = ["kv/b", "kv/c"]
    for after in ("kv/b", "kv/bb"):
        with pytest.raises(S3Error, match="beginning") as caught:
            await client.list_page("kv/", timeout_s=30, start_after=after)
        assert caught.value.cause is Cause.PROTOCOL
    assert (await client.list_page("kv/", timeout_s=30, start_after="kv/a")).objects


async def test_an_object_without_an_etag_is_no_object() -> None:
    """A proxy's page is a failure of the service, not a damaged object to delete."""
    client = Script()
    client.etag = ""
    with pytest.raises(S3Error, match="ETag") as caught:
        await client.get_into("kv/a", [memoryview(bytearray(8))], timeout_s=30)
    assert caught.value.cause is Cause.PROTOCOL


async def test_the_whole_call_has_a_deadline() -> None:
    """A service that never answers costs the given time, however many attempts fit into it."""
    client = Script(takes_s=3600)
    with pytest.raises(S3Error) as caught:
        await client.head("k", timeout_s=0.05)
    assert caught.value.cause is Cause.TIMEOUT
    assert client.failures == {Cause.TIMEOUT: 1}
    assert client.limiter.in_use == client.running == 0


async def test_no_turn_in_time() -> None:
    """A call that waits too long for a request slot fails with that reason, and leaves the slot to the next call."""
    client = Script(takes_s=3600, concurrency=1, timeout=300)
    first = asyncio.create_task(client.head("first", timeout_s=3600))
    await eventually_async(lambda: client.running == 1)
    with pytest.raises(
        S3Error, match=r"Timed out waiting for a request slot within 0\.05 s, after 0 attempts"
    ) as caught:
        await client.head("second", timeout_s=0.05)
    assert caught.value.cause is Cause.TIMEOUT
    third = asyncio.create_task(client.head("third", timeout_s=3600))
    await eventually_async(lambda: client.limiter.waiting > 0)
    first.cancel()
    await eventually_async(lambda: client.order == ["first", "third"])
    third.cancel()
    await asyncio.wait([first, third])
    assert (client.limiter.in_use, client.limiter.waiting) == (0, 0)


async def test_no_attempt_after_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a pause that ends past the deadline, no request is sent."""
    client = Script([Cause.RESET])

    def backoff(tries: int) -> float:
        asyncio.get_running_loop().call_soon(time.sleep, 2.5)
        return 0.01

    monkeypatch.setattr("kvstore.backends.s3.client.backoff_s", backoff)
    with pytest.raises(S3Error, match=r"after 1 attempts\. The last failure: reset") as caught:
        await client.head("k", timeout_s=2)
    assert (caught.value.cause, client.attempts) == (Cause.TIMEOUT, 1)


async def test_an_attempt_has_its_share_of_time() -> None:
    """One attempt may take the configured time, plus time for the bytes of a large object."""
    client = Script(timeout="2s", bytes_per_second_min="1MiB")
    await client.head("k", timeout_s=30)
    await client.put("k", [bytes(3 << 20)], timeout_s=30)
    assert client.timeouts == pytest.approx([2, 5])


async def test_so_many_at_once() -> None:
    """The number of concurrent requests stays within the configured limit, and all of them run."""
    client = Script(takes_s=0.001, concurrency=7)
    await asyncio.gather(*(client.head(str(number), timeout_s=60) for number in range(100)))
    assert (client.attempts, client.most, client.limiter.in_use) == (100, 7, 0)


async def test_reads_go_first() -> None:
    """Among waiting requests, reads run before writes."""
    client = Script(takes_s=0.001, concurrency=1)
    calls = [client.put(f"w{n}", [b"x"], timeout_s=60) for n in range(4)]
    calls += [client.head(f"r{n}", timeout_s=60) for n in range(4)]  # type: ignore[misc]
    await asyncio.gather(*calls)
    assert client.order == ["w0", "r0", "r1", "r2", "r3", "w1", "w2", "w3"]


async def test_slow_down() -> None:
    """After SlowDown the concurrency limit is halved, and it grows again with successful answers."""
    client = Script([Cause.SLOW_DOWN], concurrency=64)
    await client.head("k", timeout_s=30)
    assert client.limiter.total == 32
    for _ in range(64 * 64):
        await client.head("k", timeout_s=30)
    assert client.limiter.total == 64


async def test_other_failures_do_not_slow_down() -> None:
    """A failing service gets fewer retries, not fewer concurrent requests."""
    client = Script(always=Cause.SERVER_ERROR, concurrency=64, tries=1)
    with pytest.raises(S3Error):
        await client.head("k", timeout_s=30)
    assert client.limiter.total == 64


async def test_one_order_to_slow_down_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Concurrent SlowDown answers halve the limit once, later ones again, and at least one request may always run."""
    client = Script(always=Cause.SLOW_DOWN, concurrency=64, tries=1)
    calls = [client.head("k", timeout_s=30) for _ in range(50)]
    await asyncio.gather(*calls, return_exceptions=True)
    assert client.limiter.total == 32
    monkeypatch.setattr("kvstore.backends.s3.client._CUT_INTERVAL_S", 0.0)
    for _ in range(20):
        with pytest.raises(S3Error):
            await client.head("k", timeout_s=30)
    assert client.limiter.total == 1


async def test_cancelled_waiters_hold_nothing(rng: random.Random) -> None:
    """However many calls are cancelled, waiting or running, the limiter is empty and open afterwards."""
    client = Script(takes_s=0.002, concurrency=3)
    for _ in range(30):
        tasks = [asyncio.ensure_future(client.head("k", timeout_s=60)) for _ in range(12)]
        for _ in range(rng.randrange(6)):
            await asyncio.sleep(0)
        for task in rng.sample(tasks, 9):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert (client.limiter.in_use, client.limiter.waiting, client.running) == (0, 0, 0)
    assert await client.head("k", timeout_s=60) is None
