"""Sizes, durations and capacities: accepted forms, their values, and refusals."""

from __future__ import annotations

import copy
import math
import pickle
import re
from fractions import Fraction

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvstore.errors import ConfigError
from kvstore.quantity import ByteSize, Capacity, Seconds

SIZE_MAX = 2**63 - 1


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (0, 0),
        (1048576, 1048576),
        (1e9, 10**9),
        ("0", 0),
        ("17", 17),
        ("17B", 17),
        ("512MiB", 512 * 1024**2),
        ("512 mib", 512 * 1024**2),
        (" 2TB ", 2 * 10**12),
        ("2TiB", 2 * 1024**4),
        ("1.5GiB", 3 * 1024**3 // 2),
        ("0.1KB", 100),
        ("1.0001KB", 1000),
        ("7PiB", 7 * 1024**5),
        (str(SIZE_MAX), SIZE_MAX),
    ],
)
def test_sizes(text: str | float, size: int) -> None:
    """A size is bytes, or a number with a unit of powers of 1000 or 1024."""
    assert ByteSize(text) == size
    assert Capacity(text).resolve(1) == size


@pytest.mark.parametrize(
    "value",
    [
        "",
        " ",
        "MiB",
        "5 gigs",
        "5G",
        "5K",
        "-1",
        "-5MiB",
        "1e9",
        "1_000",
        "0x10",
        "5MiBs",
        "٣MiB",
        "1.5.2KB",
        ".5KB",
        "5%",
        "nan",
        "inf",
        "8EiB",
        str(SIZE_MAX + 1),
        "9" * 30,
        -1,
        SIZE_MAX + 1,
        1.5,
        math.nan,
        math.inf,
        True,
        None,
        [],
        {},
    ],
)
def test_no_sizes(value: object) -> None:
    """A text that is not a valid size is refused, and the error shows a valid one."""
    with pytest.raises(ConfigError, match=r"is not a valid size\. Expected .*512MiB"):
        ByteSize(value)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "meant"),
    [("5G", "'5GiB' or '5GB'"), ("5Gi", "'5GiB'"), ("128k", "'128KiB' or '128KB'"), ("1.5ti", "'1.5TiB'")],
)
def test_units_of_other_programs_are_asked_about(text: str, meant: str) -> None:
    """A unit from other programs, with one meaning or two, is refused with the probable meaning."""
    with pytest.raises(ConfigError, match=re.escape(f"Did you mean {meant}?")):
        ByteSize(text)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        (0, 0.0),
        (1.5, 1.5),
        (5, 5.0),
        ("250ms", 0.25),
        ("100us", 0.0001),
        ("5s", 5.0),
        ("5", 5.0),
        ("10m", 600.0),
        ("10 min", 600.0),
        ("2h", 7200.0),
        ("7d", 604800.0),
        ("0.5 H", 1800.0),
    ],
)
def test_durations(text: str | float, seconds: float) -> None:
    """A duration is seconds, or a number with a unit."""
    assert Seconds(text) == seconds


@pytest.mark.parametrize(
    "value", ["", "s", "5 sec", "-1s", "nan", "1y", -0.1, math.nan, math.inf, 1e12, True, None, "9999999d"]
)
def test_no_durations(value: object) -> None:
    """A text that is not a valid duration is refused, and the error shows a valid one."""
    with pytest.raises(ConfigError, match=r"is not a valid duration\. Expected .*250ms"):
        Seconds(value)  # type: ignore[arg-type]


@settings(deadline=None)
@given(st.integers(0, SIZE_MAX))
def test_size_as_text_is_the_same_size(size: int) -> None:
    """The text of a size is exact."""
    assert ByteSize(ByteSize(size).text) == size


@settings(deadline=None)
@given(
    st.decimals(0, 1000, places=6), st.sampled_from([("KiB", 1024), ("mb", 10**6), ("GiB", 1024**3), ("TB", 10**12)])
)
def test_fractions_are_exact(number: object, unit: tuple[str, int]) -> None:
    """A fraction of a unit is computed without rounding errors, then cut to whole bytes."""
    assert ByteSize(f"{number:f}{unit[0]}") == math.floor(Fraction(str(number)) * unit[1])


@settings(deadline=None)
@given(st.floats(0, 1e8, allow_nan=False))
def test_durations_keep_their_value(seconds: float) -> None:
    """A number of seconds is kept exactly."""
    assert Seconds(seconds) == seconds


@settings(deadline=None, max_examples=500)
@given(st.one_of(st.text(max_size=40), st.floats(), st.integers(), st.none(), st.booleans(), st.lists(st.integers())))
@example("9" * 10000)
@example("\ud800")
@example(10**400)
def test_nothing_but_a_config_error(value: object) -> None:
    """Any value is accepted or refused with a ConfigError of bounded length."""
    for kind in (ByteSize, Seconds, Capacity):
        try:
            kind(value)  # type: ignore[arg-type]
        except ConfigError as error:
            assert len(str(error)) < 600


@settings(deadline=None)
@given(st.decimals("0.01", 100, places=2), st.integers(0, 2**60))
def test_percent(percent: object, total: int) -> None:
    """A share of a filesystem is exact, never more than all of it, and prints as written."""
    capacity = Capacity(f"{percent}%")
    assert capacity.resolve(total) == math.floor(Fraction(str(percent)) * total / 100) <= total
    assert Capacity(str(capacity)) == capacity


@pytest.mark.parametrize("value", ["0%", "100.1%", "-5%", "%", "eighty%", "80%%", "1000%"])
def test_no_percent(value: str) -> None:
    """A share is above 0 and at most 100 percent."""
    with pytest.raises(ConfigError, match="80%"):
        Capacity(value)


def test_a_bad_capacity_names_both_forms() -> None:
    """The error states that a capacity may be a size or a share."""
    with pytest.raises(ConfigError, match=r"512MiB.*80%"):
        Capacity("lots")


def test_capacity_is_a_value() -> None:
    """Capacities are equal by value, can be keys, copied and sent, and can't be changed."""
    assert Capacity("1GiB") == Capacity(1024**3) != Capacity("80%")
    assert len({Capacity("80%"), Capacity("80.0%"), Capacity(1), Capacity("1")}) == 2
    assert (str(Capacity("80.50%")), repr(Capacity(1024))) == ("80.5%", "Capacity('1KiB')")
    assert Capacity(Capacity("5%")) == Capacity("5%")
    assert Capacity("1B") != 1
    with pytest.raises(AttributeError, match="immutable"):
        Capacity("1GiB").percent = Fraction(1)


@pytest.mark.parametrize("value", [ByteSize("3GiB"), Seconds("250ms"), Capacity("12.5%"), Capacity("3GiB")])
def test_values_can_be_copied_and_sent(value: object) -> None:
    """A value survives copying and pickling, as a process host needs."""
    assert copy.deepcopy(value) == value
    found = pickle.loads(pickle.dumps(value))
    assert (found, type(found)) == (value, type(value))
