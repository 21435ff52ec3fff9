"""Codec choice: a planner fed by a simulated link and codec, without any I/O."""

from __future__ import annotations

import random

import pytest

from kvstore.errors import ConfigError
from kvstore.runtime.messages import JobKind
from kvstore.tiers.codecs import CodecChoice

BATCH = 4 << 20
GB = 1e9


class World:
    """A link and a codec of given rates; batches are stored and loaded one after another.

    Attributes:
        link: Bytes per second.
        encode: Bytes per second.
        decode: Bytes per second.
        ratio: Encoded size over raw size.
        overlap: Overlap of reading and decoding, as a share of the shorter of the two.
        sampled: Decode rate of single samples, relative to that of fully encoded batches.
        delay: Additional link time per byte, in seconds, while all blocks are encoded.
        seconds: Total time of all loads.
    """

    def __init__(
        self, link: float, ratio: float, *, decode: float = 2 * GB, encode: float = GB, overlap: float = 0.0,
        delay: float = 0.0, seed: int = 5,
    ):  # fmt: skip
        self.link, self.ratio, self.decode, self.encode, self.overlap = link, ratio, decode, encode, overlap
        self.delay, self.seconds = delay, 0.0
        self.sampled = 1.0
        self.now = 1e6
        self.now_sampled = False
        self.noise = random.Random(seed)

    def choice(self, objective: str = "latency") -> CodecChoice:
        """Return a planner in this world."""
        return CodecChoice({"objective": objective}, lambda: self.now)

    def work(self, choice: CodecChoice, batches: int, *, loads: bool = True) -> int:
        """Store and load batches; return the number of encoded batches."""
        encoded = 0
        for _ in range(batches):
            encodes = choice.encode_next()
            encoded += encodes
            self.now_sampled = encodes and choice.stats()["encodes"] == 0
            stored = int(BATCH * (self.ratio if encodes else 1))
            if encodes:
                self.now += BATCH / self.encode
                choice.note_encoded(BATCH, stored, BATCH / self.encode)
            self._move(choice, JobKind.STORE, stored)
            if loads:
                self._load(choice, stored, encodes)
        return encoded

    def _move(self, choice: CodecChoice, kind: JobKind, stored: int) -> None:
        choice.link_started(kind)
        self.now += stored / self.link * self.noise.uniform(0.9, 1.1)
        choice.link_ended(kind, stored)

    def _load(self, choice: CodecChoice, stored: int, encoded: bool) -> None:
        rate = self.decode * (self.sampled if self.now_sampled else 1)
        link_s, decode_s = stored / self.link, BATCH / rate if encoded else 0.0
        if encoded and not self.now_sampled:
            link_s += stored * self.delay
        link_s, decode_s = (seconds * self.noise.uniform(0.9, 1.1) for seconds in (link_s, decode_s))
        both_s = self.overlap * min(link_s, decode_s)
        self.seconds += link_s + decode_s - both_s
        choice.link_started(JobKind.LOAD)
        self.now += link_s - both_s
        if encoded:
            choice.decode_started()
        self.now += both_s
        choice.link_ended(JobKind.LOAD, stored)
        if encoded:
            self.now += decode_s - both_s
            choice.decode_ended(BATCH)


@pytest.mark.parametrize(
    ("link", "ratio", "overlap", "pays"),
    [
        (0.1 * GB, 0.7, 0.0, True),  # 7 + 0.5 s compared with 10 s per GB.
        (0.3 * GB, 0.7, 0.5, True),  # 2.33 + 0.25 compared with 3.33.
        (1.0 * GB, 0.7, 0.5, False),  # 0.7 + 0.25 compared with 1: less than a fifth.
        (3.0 * GB, 0.7, 1.0, False),
        (0.1 * GB, 1.0, 1.0, False),
        (0.1 * GB, 0.85, 1.0, False),
    ],
)
def test_loads_decide(link: float, ratio: float, overlap: float, pays: bool) -> None:
    """For latency it encodes if loading and decoding encoded blocks is faster than loading raw ones."""
    world = World(link, ratio, overlap=overlap)
    choice = world.choice()
    world.work(choice, 400)
    encoded = world.work(choice, 400)
    assert (encoded > 390) if pays else (encoded < 16), choice.stats()


@pytest.mark.parametrize(("ratio", "pays"), [(0.7, True), (0.85, True), (0.95, False), (1.0, False)])
def test_bytes_decide(ratio: float, pays: bool) -> None:
    """For bytes only the ratio counts, however fast the link is."""
    world = World(10 * GB, ratio)
    choice = world.choice("bytes")
    world.work(choice, 3000)
    encoded = world.work(choice, 100)
    assert encoded == 100 if pays else encoded < 5


def test_stores_measure_the_link_without_loads() -> None:
    """A new engine that only stores decides soon, by the rate of its stores."""
    for link, pays in ((0.1 * GB, True), (20 * GB, False)):
        world = World(link, 0.7)
        choice = world.choice()
        world.work(choice, 300, loads=False)
        assert (world.work(choice, 100, loads=False) > 90) == pays


def test_it_follows_a_link_that_changes() -> None:
    """It switches both ways within seconds of a change; at most one trial is misled by the earlier link."""
    world = World(5 * GB, 0.7)
    choice = world.choice()
    world.work(choice, 2000)
    assert world.work(choice, 100) < 5
    for link, pays in ((0.1 * GB, True), (5 * GB, False), (0.1 * GB, True)):
        world.link = link
        before, changes = world.now, choice.stats()["changes"]
        while (choice.stats()["encodes"] > 0) != pays:
            world.work(choice, 1)
            assert world.now - before < 45, "it does not follow"
        end = world.now + 60
        while world.now < end:
            world.work(choice, 1)
        assert choice.stats()["changes"] - changes in (1, 3)


def test_it_follows_contents_that_change() -> None:
    """Samples detect that a tier's blocks begin to compress well; if they no longer do, encoding stops."""
    world = World(0.2 * GB, 1.0)
    choice = world.choice()
    world.work(choice, 2000)
    world.ratio = 0.6
    world.work(choice, 2000)
    assert world.work(choice, 100) == 100
    world.ratio = 1.0
    world.work(choice, 500)
    assert world.work(choice, 100) < 10


def test_decoding_rates_of_samples_do_not_hide_a_gain() -> None:
    """A sample is decoded alone, on one thread; this slower rate does not hide that encoding would pay."""
    world = World(5 * GB, 0.7, overlap=0.5)
    world.sampled = 0.5
    choice = world.choice()
    world.work(choice, 3000)
    # 0.7 / 0.3 + 1 / 4 s saves a fifth of 1 / 0.3 s; at half the decode rate it would not.
    world.link = 0.3 * GB
    world.work(choice, 3000)
    assert world.work(choice, 100) == 100


def test_at_the_break_even_it_stays() -> None:
    """If both take about the same time, measurements that differ by a tenth cause no oscillation."""
    # 0.7 / link + 0.5 / 2 is four fifths of 1 / link at 0.4 GB/s.
    world = World(0.4 * GB, 0.7, overlap=0.5)
    choice = world.choice()
    world.work(choice, 20_000)
    assert choice.stats()["changes"] <= 3


def test_sampling_costs_little() -> None:
    """A tier that stores raw blocks encodes less than one batch in a hundred in the long run."""
    world = World(10 * GB, 0.7)
    choice = world.choice()
    world.work(choice, 3000)
    assert 1 <= world.work(choice, 10_000) < 100


def test_a_link_that_encoding_slows_down_is_seen_through() -> None:
    """If encoding slows the link down, it is tried rarely; with another link it is used."""
    # Raw 2 s per GB; encoded 1.4 s on the link alone, and 2.8 s with the slowdown of the link.
    world = World(0.5 * GB, 0.7, decode=5 * GB, overlap=0.5, delay=2 / GB)
    choice = world.choice()
    world.work(choice, 30_000)
    assert world.work(choice, 30_000) < 3000
    world.link, world.delay = 0.1 * GB, 0.0
    world.work(choice, 1000)
    assert world.work(choice, 100) == 100


@pytest.mark.parametrize("seed", range(24))
def test_loads_take_little_longer_than_the_better_of_both(seed: int) -> None:
    """For any link, codec and contents, a wrong choice costs no more than a quarter."""
    rng = random.Random(seed)
    link = 0.02 * GB * 500 ** rng.random()
    world = World(link, rng.uniform(0.55, 1.0), decode=0.3 * GB * 12 ** rng.random(), overlap=0.5, seed=seed)
    choice = world.choice()
    world.work(choice, 6000)
    world.seconds = 0.0
    world.work(choice, 6000)
    raw_s, link_s, decode_s = 1 / world.link, world.ratio / world.link, 1 / world.decode
    encoded_s = link_s + decode_s - 0.5 * min(link_s, decode_s)
    of_best = world.seconds / (6000 * BATCH) / min(raw_s, encoded_s)
    assert of_best < 1.27, f"{of_best}: {raw_s * GB} raw, {encoded_s * GB} encoded, {choice.stats()}"


def test_overlapping_batches_count_once() -> None:
    """Eight batches that share the link at the same time give the link's rate, not an eighth of it."""
    now = [50.0]
    choice = CodecChoice({}, lambda: now[0])
    for _ in range(4):
        assert choice.encode_next()
        choice.note_encoded(BATCH, BATCH // 2, 0.01)
    for _ in range(20):
        for _ in range(8):
            choice.link_started(JobKind.LOAD)
        for _ in range(8):
            now[0] += BATCH / GB
            choice.link_ended(JobKind.LOAD, BATCH)
    assert choice.stats()["link_bytes_per_s"] == pytest.approx(GB, rel=0.01)


def test_an_idle_tier_keeps_its_choice() -> None:
    """Hours without work neither corrupt the numbers nor change the choice."""
    world = World(5 * GB, 0.7)
    choice = world.choice()
    world.work(choice, 2000)
    for hours in (1, 100, 10_000):
        world.now += 3600.0 * hours
        stats = choice.stats()
        assert stats["encodes"] == 0 and all(value >= 0 for value in stats.values())
        assert not choice.encode_next()


def test_failures_of_the_link_are_no_evidence() -> None:
    """Batches that moved no bytes leave the planner undecided and cause no division by zero."""
    world = World(GB, 0.7)
    choice = world.choice()
    for number in range(100):
        assert choice.encode_next() == (number < 4)
        choice.note_encoded(BATCH, BATCH, 0.0)
        choice.link_started(JobKind.STORE)
        choice.link_ended(JobKind.STORE, 0)
    assert choice.stats()["link_bytes_per_s"] == 0


def test_without_a_batch_nothing_is_known() -> None:
    """Before the first batch all rates are 0, and a block is as long encoded as raw."""
    stats = World(GB, 0.7).choice().stats()
    assert [stats[name] for name in ("link_bytes_per_s", "decode_bytes_per_s", "ratio")] == [0, 0, 1]


def test_an_unknown_objective_is_refused() -> None:
    """The error names the two valid ones."""
    with pytest.raises(ConfigError, match="latency"):
        CodecChoice({"objective": "latancy"})
