"""A broker as people set it up: certificates, passwords, an access list, limits. The files are those of examples/."""

from __future__ import annotations

import getpass
import shutil
import ssl
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import trustme

from paceline.core.errors import LinkClosed, UserError
from paceline.topology.links.mqtt import MqttTransport
from paceline.topology.links.mqtt_client import LARGEST_PACKET, SAFE_PACKET
from paceline.topology.links.mqtt_paho import Broker
from paceline.topology.wire import MAX_FRAME_BYTES

from .brokers import BrokerProcess, running_broker
from .helpers import End
from .mqtt_helpers import closing, pair

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(shutil.which("mosquitto_passwd") is None, reason="mosquitto is not installed"),
]

EXAMPLES = Path(__file__).parents[3] / "examples" / "mosquitto"
USERS = {"drafter": "secret of drafter", "chat-a": "secret of chat-a"}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory, authority: trustme.CA) -> Iterator[BrokerProcess]:
    """examples/mosquitto with certificates and passwords, on a port of the test's own."""
    folder = tmp_path_factory.mktemp("guarded")
    shutil.copytree(EXAMPLES, folder, dirs_exist_ok=True)
    certs = folder / "certs"
    certs.mkdir()
    authority.cert_pem.write_to_path(str(certs / "ca.pem"))
    shown = authority.issue_cert("127.0.0.1", "localhost")
    shown.private_key_pem.write_to_path(str(certs / "broker.key"))
    for pem in shown.cert_chain_pems:
        pem.write_to_path(str(certs / "broker.pem"), append=True)
    (folder / "passwords").touch(mode=0o600)
    for user, password in USERS.items():
        subprocess.run(["mosquitto_passwd", "-b", "passwords", user, password], cwd=folder, check=True)
    config = (EXAMPLES / "mosquitto.conf").read_text() + f"user {getpass.getuser()}\n"
    with running_broker("mosquitto", folder, whole_config=config) as process:
        yield process


def access(guarded: BrokerProcess, authority: trustme.CA, user: str | None, **other: object) -> Broker:
    """How a node gets in; `other` says what is different."""
    tls = ssl.create_default_context()
    authority.configure_trust(tls)
    broker = Broker("127.0.0.1", guarded.port, tls, user, USERS[user] if user else None)
    return replace(broker, **other)  # type: ignore[arg-type]


async def test_the_example_lets_a_star_work(guarded: BrokerProcess, authority: trustme.CA) -> None:
    """TLS, passwords and the access list as shipped: frames pass both ways, large ones too."""
    drafter = guarded.transport("drafter", broker=access(guarded, authority, "drafter"))
    target = guarded.transport(
        "chat-a", deployment=drafter.place.deployment, broker=access(guarded, authority, "chat-a")
    )
    async with closing(drafter), closing(target):
        accepted: list[End] = []
        await drafter.listen("drafter", lambda channel: accepted.append(End(channel)))
        near = End(await target.dial("drafter"))
        big = bytes(range(256)) * (MAX_FRAME_BYTES // 256)
        near.channel.send(big)
        near.channel.send(b"after", control=True)
        await accepted[0].until(lambda end: len(end.frames) == 2)
        assert accepted[0].frames == [big, b"after"]
        accepted[0].channel.send(b"answer")
        await near.until(lambda end: end.frames == [b"answer"])


def test_the_broker_has_nothing_to_say_of_the_example(guarded: BrokerProcess) -> None:
    """No line of the access list is warned of at its start."""
    log = (guarded.folder / f"mosquitto-{guarded.port}.log").read_text()
    assert "Config loaded" in log and "ACL" not in log


async def test_a_wrong_password_is_one_sentence_without_it(guarded: BrokerProcess, authority: trustme.CA) -> None:
    """It names broker and user. A process that starts with it ends with that sentence, as a wrong port would."""
    target = guarded.transport("chat-a", broker=access(guarded, authority, "chat-a", password="guessed"))
    async with closing(target):
        with pytest.raises(LinkClosed) as caught:
            await target.dial("drafter")
        sentence = str(caught.value)
        assert sentence == (
            f"the broker mqtts://127.0.0.1:{guarded.port} refuses this node: "
            "wrong password, or user 'chat-a' is not authorised"
        )
        with pytest.raises(UserError, match="wrong password"):
            await target.listen("drafter", lambda channel: None)
        assert "guessed" not in repr(target.place)


async def test_a_missing_user_is_one_sentence(guarded: BrokerProcess, authority: trustme.CA) -> None:
    """The broker wants one, and the topology names none."""
    target = guarded.transport("chat-a", broker=access(guarded, authority, None))
    async with closing(target):
        with pytest.raises(LinkClosed, match="refuses this node: it wants a user name and a password"):
            await target.dial("drafter")


async def test_a_target_cannot_speak_as_another(guarded: BrokerProcess, authority: trustme.CA) -> None:
    """The access list gives each user the topics of its own name only."""
    drafter = guarded.transport("drafter", broker=access(guarded, authority, "drafter"))
    other = guarded.transport(
        "chat-b", deployment=drafter.place.deployment, broker=access(guarded, authority, "chat-a")
    )
    async with closing(drafter), closing(other):
        accepted: list[End] = []
        await drafter.listen("drafter", lambda channel: accepted.append(End(channel)))
        sentence = ""
        while "access list" not in sentence:
            with pytest.raises(LinkClosed) as caught:
                await other.dial("drafter")
            sentence = str(caught.value)
        assert "presence/chat-b: does its access list allow it?" in sentence
        quiet = MqttTransport(replace(other.place, quiet=True))  # says nothing of itself, so that Open comes first
        async with closing(quiet):
            with pytest.raises(LinkClosed, match="does the access list let this node publish to"):
                await quiet.dial("drafter")
        assert accepted == []


async def test_another_authority_is_one_sentence(guarded: BrokerProcess, authority: trustme.CA) -> None:
    """A certificate that this node has no reason to believe."""
    stranger = ssl.create_default_context()
    trustme.CA().configure_trust(stranger)
    target = guarded.transport("chat-a", broker=access(guarded, authority, "chat-a", tls=stranger))
    async with closing(target):
        with pytest.raises(LinkClosed, match=r"cannot reach the broker mqtts://.*certificate verify failed"):
            await target.dial("drafter")


async def test_plain_words_at_a_broker_with_tls_are_one_sentence(guarded: BrokerProcess, authority: trustme.CA) -> None:
    """mqtt:// where mqtts:// is meant."""
    target = guarded.transport("chat-a", broker=access(guarded, authority, "chat-a", tls=None))
    async with closing(target):
        with pytest.raises(LinkClosed, match=r"the broker mqtt://127.0.0.1:\d+ closed the connection"):
            await target.dial("drafter")


async def test_tls_at_a_broker_without_it_is_one_sentence(
    mosquitto_broker: BrokerProcess, authority: trustme.CA
) -> None:
    """mqtts:// where mqtt:// is meant."""
    broker = access(mosquitto_broker, authority, "chat-a")
    target = mosquitto_broker.transport("chat-a", broker=broker)
    async with closing(target):
        with pytest.raises(LinkClosed, match=r"mqtts://127.0.0.1:\d+"):
            await target.dial("drafter")


async def test_a_packet_limit_of_the_broker_is_kept(tmp_path: Path) -> None:
    """MQTT 5 says it, and larger frames come in parts: nothing is dropped in silence."""
    with running_broker("mosquitto", tmp_path, "max_packet_size 2000\n") as broker:
        async with pair(broker) as nodes:
            nodes.secure()
            assert nodes.target._life is not None and nodes.target._life.largest_packet == 2000
            big = bytes(range(256)) * 400
            nodes.near.channel.send(big)
            nodes.near.channel.send(big[:1990], control=True)
            await nodes.far.until(lambda end: len(end.frames) == 2)
            assert nodes.far.frames == [big, big[:1990]]


async def test_a_limit_too_small_is_one_sentence(tmp_path: Path) -> None:
    """No frame of any use would pass."""
    with running_broker("mosquitto", tmp_path, "max_packet_size 300\n") as broker:
        target = broker.transport("chat-a")
        async with closing(target):
            with pytest.raises(LinkClosed, match="takes packets of 300 bytes only"):
                await target.dial("drafter")


async def test_packets_have_a_bound_where_the_broker_names_none(mosquitto_broker: BrokerProcess) -> None:
    """256 KiB in MQTT 5, 64 KiB in 3.1.1, whose brokers drop what is too large and do not say so."""
    async with pair(mosquitto_broker) as nodes:
        assert nodes.target._life is not None and nodes.target._life.largest_packet == LARGEST_PACKET
    assert SAFE_PACKET == 64 << 10
