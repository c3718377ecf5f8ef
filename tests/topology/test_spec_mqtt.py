"""What a topology over MQTT may hold: the broker's place, its secrets, and a broker of its own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from paceline.core.errors import UserError
from paceline.topology.overview import connections, who_talks_to_whom
from paceline.topology.spec import Address
from paceline.topology.transports import mqtt_place

from .spec_helpers import STAR, problems, read

LOCAL = "{transport: mqtt, broker: 'mqtt://127.0.0.1:1883'}"


def star(link: str, more: str = "") -> str:
    return f"{STAR}link: {link}\n{more}"


@pytest.mark.parametrize(
    ("broker", "address"),
    [
        ("mqtt://127.0.0.1:18830", "127.0.0.1:18830"),
        ("mqtt://localhost", "localhost:1883"),
        ("mqtt://[::1]", "[::1]:1883"),
        ("mqtt://[::1]:2000", "[::1]:2000"),
    ],
)
def test_a_broker_on_this_machine_needs_nothing_more(broker: str, address: str) -> None:
    """The operating system is the guard; ports have their usual defaults."""
    topology = read(star(f"{{transport: mqtt, broker: '{broker}'}}"))
    assert str(topology.link.broker_address) == address
    assert topology.link_address(topology.drafters[0], topology.targets[0]) == "d"
    assert connections(topology)[0].over == broker


def test_a_broker_elsewhere_needs_a_key_and_tls(tmp_path: Path) -> None:
    """Each is one sentence; with both, or with encrypt: false, it is read."""
    far = "{transport: mqtt, broker: 'mqtt://broker.lan:1883'}"
    assert problems(star(far)) == [
        "star.yaml:10:33: link.broker: broker.lan:1883 is on another machine: that needs security.key_file; "
        "write security: {key_file: secrets/deployment.key} and run: paceline keys init star.yaml",
        "star.yaml:10:33: link.broker: broker.lan:1883 is on another machine: write mqtts://, or encrypt: false",
    ]
    key = tmp_path / "deployment.key"
    key.write_text("k" * 32)
    key.chmod(0o600)
    topology = read(star("{transport: mqtt, broker: 'mqtts://broker.lan'}", f"security: {{key_file: {key}}}\n"))
    assert topology.link.broker_address == Address("broker.lan", 8883)
    assert read(star(far, f"security: {{key_file: {key}, encrypt: false}}\n")).link.broker_address.port == 1883


@pytest.mark.parametrize(
    ("link", "problem"),
    [
        ("{transport: mqtt}", "10:7: link.broker: is required with transport: mqtt"),
        (
            "{transport: mqtt, broker: 'mqtt://:::'}",
            "10:33: link.broker: must be mqtt://host:port or mqtts://host:port",
        ),
        (LOCAL[:-1] + ", username: u}", "10:68: link.username: needs password_file beside it"),
        (LOCAL[:-1] + ", ca: ca.pem}", "10:58: link.ca: is for a broker at mqtts://"),
        (
            LOCAL[:-1] + ", topic_prefix: 'a/#'}",
            "10:72: link.topic_prefix: must be 1..32 printable words of a topic such as site-1/paceline, "
            "without + # or $",
        ),
        (
            "{transport: mqtt, broker: 'mqtt://10.0.0.1:1883', local_broker: true}",
            "10:33: link.broker: local_broker is for programs on this machine only: write mqtt://127.0.0.1:18830",
        ),
        (
            "{transport: mqtt, broker: 'mqtt://127.0.0.1:8001', local_broker: true}",
            "7:5: targets[0].api.listen: 127.0.0.1:8001 is already taken by link.broker",
        ),
        ("{local_broker: true}", "10:8: link.local_broker: is only for transport: mqtt, not tcp"),
    ],
)
def test_what_does_not_fit_is_one_sentence(link: str, problem: str) -> None:
    assert problem in [line.removeprefix("star.yaml:") for line in problems(star(link))]


@pytest.mark.parametrize(
    "prefix",
    ["a+", "$SYS", "a//b", "/a", "a/", r"a\ud800b", r"a\x7fb", r"a\x85b", r"a\uFFFFb", r"a\uFDD0", "a/" * 32 + "a"],
)
def test_a_prefix_that_no_broker_takes_is_refused(prefix: str) -> None:
    """Wildcards, names of the broker's own, what is no text, and more levels than brokers follow."""
    (line,) = problems(star(LOCAL[:-1] + f', topic_prefix: "{prefix}"}}'))
    assert "link.topic_prefix: must be 1..32 printable words of a topic" in line


@pytest.mark.parametrize("prefix", ["a", "Werk 3/süd", "a/$b", "a/" * 31 + "a"])
def test_a_prefix_may_be_any_other_words(prefix: str) -> None:
    """Other alphabets and spaces, too."""
    assert read(star(LOCAL[:-1] + f", topic_prefix: '{prefix}'}}")).link.topic_prefix == prefix


def test_drafters_listen_at_the_broker_only() -> None:
    """What is written of their own addresses is neither taken, nor unreachable, nor open to others."""
    text = star(LOCAL).replace("  - name: d\n", "  - name: d\n    listen: 0.0.0.0:8001\n")
    assert read(text).drafters[0].listen.is_any


def test_a_loopback_broker_is_for_one_machine() -> None:
    """A node elsewhere could not reach it."""
    hosts = "hosts: {far: {address: 10.0.0.2}}\n"
    text = star(LOCAL, hosts).replace("  - name: t\n", "  - name: t\n    host: far\n")
    assert any("t runs on far and cannot reach 127.0.0.1:1883" in problem for problem in problems(text))


def test_the_local_broker_has_its_name_alone() -> None:
    """No node may be called as it is."""
    local = LOCAL[:-1] + ", local_broker: true}"
    text = star(local).replace("name: t", "name: broker")
    assert any("broker is what the local broker is called" in problem for problem in problems(text))
    caption = who_talks_to_whom(read(star(local))).caption
    assert caption == "The broker at mqtt://127.0.0.1:1883 is started on this machine with the nodes."


def test_a_node_takes_password_and_key_from_their_files(tmp_path: Path) -> None:
    """Without line ends, and shown by nobody; a password that others can read is refused."""
    password = tmp_path / "password"
    password.write_text("open sesame\n")
    password.chmod(0o600)
    text = star(LOCAL[:-1] + f", username: u, password_file: '{password}', topic_prefix: site/a}}")
    place = mqtt_place(read(text), "t")
    assert (place.broker.username, place.broker.password) == ("u", "open sesame")
    assert place.topic("d", "in", "t") == "site/a/star/d/in/t"
    assert place.presence("t") == "site/a/star/presence/t"
    assert "sesame" not in repr(place)
    password.chmod(0o644)
    assert any("can be read by other users" in problem for problem in problems(text))


def test_each_node_has_a_user_of_its_own(tmp_path: Path) -> None:
    """${NODE} is its name, whatever the environment says; each password that this machine needs is looked at."""
    link = LOCAL[:-1] + ", username: 'edge-${NODE}', password_file: '${NODE}.password'}"
    for node in ("d", "t"):
        password = tmp_path / f"{node}.password"
        password.write_text(f"secret of {node}\n")
        password.chmod(0o600)
    for node in ("d", "t"):
        broker = mqtt_place(read(star(link), tmp_path), node).broker
        assert (broker.username, broker.password) == (f"edge-{node}", f"secret of {node}")
    (tmp_path / "d.password").unlink()
    (line,) = problems(star(link), tmp_path)
    assert line.endswith(f"link.password_file: {tmp_path}/d.password does not exist")


def test_no_other_variable_is_a_user_name() -> None:
    """A slip of the pen is no user at the broker."""
    lines = problems(star(LOCAL[:-1] + ", username: '${NAME}', password_file: x}"))
    sentence = "link.username: holds ${NAME}; only ${NODE}, the node's own name, is replaced here"
    assert any(line.endswith(sentence) for line in lines)


def test_a_certificate_that_is_none_is_one_sentence(tmp_path: Path) -> None:
    """The broker's authority is read when a node starts."""
    authority = tmp_path / "ca.pem"
    authority.write_text("no certificate")
    text = star(f"{{transport: mqtt, broker: 'mqtts://127.0.0.1:8883', ca: '{authority}'}}")
    with pytest.raises(UserError, match=r"cannot read what the broker mqtts://127\.0\.0\.1:8883 needs"):
        mqtt_place(read(text), "t")
    os.remove(authority)
    with pytest.raises(UserError, match="cannot read what the broker"):
        mqtt_place(read(text), "t")
