"""Single values of a topology: sizes, seconds, addresses."""

from __future__ import annotations

import pytest
from pydantic import TypeAdapter, ValidationError

from paceline.topology.spec import Address
from paceline.topology.spec_values import (
    HostAddress,
    read_address,
    read_seconds,
    read_seconds_option,
    read_size,
    read_step_times,
)


@pytest.mark.parametrize(
    ("text", "size"), [("2GiB", 2**31), ("512MiB", 2**29), ("1GB", 10**9), (4096, 4096), ("64 KiB", 2**16)]
)
def test_sizes(text: object, size: int) -> None:
    """Binary and decimal units, and plain bytes."""
    assert read_size(text) == size


@pytest.mark.parametrize("text", ["2 gigs", "-1GiB", "0", "GiB", "1e9", True, 1.5, None, "9" * 15 + "TiB"])
def test_no_sizes(text: object) -> None:
    """Anything else is refused with an example."""
    with pytest.raises(ValueError, match="must be a size such as 2GiB or 512MiB"):
        read_size(text)


@pytest.mark.parametrize(("text", "seconds"), [(2, 2.0), (0.25, 0.25), ("200ms", 0.2), ("2s", 2.0), ("1min", 60.0)])
def test_seconds(text: object, seconds: float) -> None:
    """Plain numbers are seconds; a unit may be written."""
    assert read_seconds(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", [0, -1, "200", "fast", True, None, float("nan"), float("inf"), 4000])
def test_no_seconds(text: object) -> None:
    """Zero, negative, endless and unitless text are refused."""
    with pytest.raises(ValueError, match="must be seconds"):
        read_seconds(text)


@pytest.mark.parametrize(
    ("text", "seconds"), [("0", 0.0), ("0ms", 0.0), ("0.0 s", 0.0), ("0.2", 0.2), ("2", 2.0), ("200ms", 0.2)]
)
def test_seconds_of_an_option(text: str, seconds: float) -> None:
    """Where numbers are text, and nothing is a time too."""
    assert read_seconds_option(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "-1", "fast", "nan", "inf", "4000", "0 hours", "1e-3"])
def test_no_seconds_of_an_option(text: str) -> None:
    """The sentence is that of topology files."""
    with pytest.raises(ValueError, match="must be seconds, such as"):
        read_seconds_option(text)


def test_addresses() -> None:
    """Hosts, IPv4 and bracketed IPv6; loopback is known in all its forms."""
    assert str(read_address("[::1]:7070")) == "[::1]:7070"
    assert read_address("orin.local:7070") == Address("orin.local", 7070)
    assert [read_address(a).is_loopback for a in ("localhost:1", "127.9.9.9:1", "[::1]:1", "0.0.0.0:1", "lan:1")] == [
        True,
        True,
        True,
        False,
        False,
    ]


@pytest.mark.parametrize(
    "text", ["7070", 7070, ":7070", "host", "host:0", "host:70700", "1.2.3:1", "::1:7070", None, "a b:1"]
)
def test_no_addresses(text: object) -> None:
    """Anything that is not host:port is refused."""
    with pytest.raises(ValueError, match=r"must (be host:port|have a port)"):
        read_address(text)


LABEL = "a" * 63


@pytest.mark.parametrize(
    "host", ["orin", "orin-1.lan", "my_host.lan", "a._b.c", LABEL, ".".join([LABEL] * 3 + ["a" * 61])]
)
def test_hosts_that_can_be_looked_up(host: str) -> None:
    """Labels of 1 to 63 characters, 253 in all."""
    assert read_address(f"{host}:7070").host == TypeAdapter(HostAddress).validate_python(host) == host


@pytest.mark.parametrize(
    "host", ["orin..lan", "orin.", ".orin", "-a", "a-", "a" * 64, f"a.{'b' * 70}.c", ".".join([LABEL] * 3 + ["a" * 62])]
)
def test_hosts_that_nobody_can_have(host: str) -> None:
    """Looking one up would not just fail, Python breaks on it."""
    with pytest.raises(ValueError, match="must be host:port"):
        read_address(f"{host}:7070")
    with pytest.raises(ValidationError, match="must be a host name or an IP address"):
        TypeAdapter(HostAddress).validate_python(host)


@pytest.mark.parametrize("host", ["::1", "fe80::1:2", "::ffff:192.0.2.1", "2001:db8:0:0:0:0:0:1"])
def test_hosts_of_ipv6(host: str) -> None:
    """Without brackets, and no longer than such an address can be."""
    assert TypeAdapter(HostAddress).validate_python(host) == host
    with pytest.raises(ValidationError, match="must be a host name or an IP address"):
        TypeAdapter(HostAddress).validate_python(host + ":1" * 30)


def test_step_times_are_a_number_or_numbers_by_size() -> None:
    """YAML gives sizes as numbers or as text; the curve is sorted by size."""
    assert read_step_times(2).points == ((1, 2.0),)
    assert read_step_times({"8": 3, 1: 2.5}).points == ((1, 2.5), (8, 3.0))


@pytest.mark.parametrize("value", ["2", True, {}, {0: 1}, {1: -1}, {1: "x"}, {"one": 1}, {1: float("nan")}, [1], None])
def test_what_is_no_step_time_is_refused(value: object) -> None:
    """Sizes from 1, milliseconds from 0, at least one of them."""
    with pytest.raises(ValueError, match="must"):
        read_step_times(value)
