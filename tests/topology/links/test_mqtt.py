"""What only MQTT has: a broker that may go, words about who is there, strangers who can write into every topic."""

from __future__ import annotations

import secrets
import signal
import statistics
import threading
import time

import anyio
import pytest

from paceline.core.errors import LinkClosed
from paceline.topology.links import mqtt_frames as frames
from paceline.topology.links import mqtt_presence as presence
from paceline.topology.links.mqtt import MqttTransport
from paceline.topology.links.mqtt_client import LARGEST_INCOMING
from paceline.topology.links.mqtt_life import MAX_UNSECURED
from paceline.topology.links.mqtt_paho import MQTT_3
from paceline.topology.links.mqtt_presence import INSTANCE_BYTES, OFFLINE, Presence

from .brokers import BrokerProcess, open_files
from .helpers import End
from .mqtt_helpers import Stranger, closing, node_process, pair

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


# The broker.


async def test_a_killed_broker_ends_the_channels_and_a_new_one_is_found(own_broker: BrokerProcess) -> None:
    """Both ends are told at once; both subscribe again, and the next dial is answered within two seconds."""
    async with pair(own_broker) as nodes:
        own_broker.kill()
        assert "was lost" in await nodes.near.closed()
        assert "was lost" in await nodes.far.closed()
        with pytest.raises(LinkClosed, match=rf"the broker mqtt://127.0.0.1:{own_broker.port}"):
            await nodes.target.dial("drafter")
        own_broker.start()
        back = time.monotonic()
        await nodes.connect()
        assert time.monotonic() - back < 3
        await nodes.exchange()


async def test_a_drafter_may_start_before_its_broker(own_broker: BrokerProcess) -> None:
    """It listens as soon as there is one."""
    own_broker.kill()
    drafter = own_broker.transport("drafter")
    target = own_broker.transport("chat-a", deployment=drafter.place.deployment)
    async with closing(drafter), closing(target):
        accepted: list[End] = []
        await drafter.listen("drafter", lambda channel: accepted.append(End(channel)))
        with pytest.raises(LinkClosed, match="refused"):
            await target.dial("drafter")
        own_broker.start()
        with anyio.fail_after(5):
            while not accepted:
                try:
                    await target.dial("drafter")
                except LinkClosed:
                    await anyio.sleep(0.02)


async def test_a_hanging_broker_is_noticed_by_its_silence(own_broker: BrokerProcess) -> None:
    """SIGSTOP: the connection stands, nothing comes; the keep-alive ends it, and SIGCONT brings everything back."""
    async with pair(own_broker) as nodes:
        own_broker.kill(signal.SIGSTOP)
        assert "was lost" in await nodes.near.closed()
        own_broker.kill(signal.SIGCONT)
        await nodes.connect()
        await nodes.exchange()


async def test_a_broker_of_mqtt_3_is_found_out(amqtt_broker: BrokerProcess) -> None:
    """It meets MQTT 5 with silence; a second later 3.1.1 is spoken, and remembered."""
    node = MqttTransport(amqtt_broker.transport("drafter").place)
    async with closing(node):
        await node.listen("drafter", lambda channel: None)
        assert node._version == MQTT_3
        await node.dial("drafter")


async def test_a_round_of_one_session_stays_under_a_hundred_bytes(broker: BrokerProcess) -> None:
    """46 bytes up and 39 down, with topic, MQTT's own header, channel, counter and MAC around them."""
    async with pair(broker, deployment="star") as nodes:
        nodes.secure()
        up, down = nodes.near_channel.bytes_out, nodes.near_channel.bytes_in
        nodes.near.channel.send(bytes(46))
        await nodes.far.until(lambda end: len(end.frames) == 1)
        nodes.far.channel.send(bytes(39))
        await nodes.near.until(lambda end: len(end.frames) == 1)
        assert nodes.near_channel.bytes_out - up < 100
        assert nodes.near_channel.bytes_in - down < 100


async def test_control_frames_have_no_nagle_delay(broker: BrokerProcess) -> None:
    """QoS 1 without TCP_NODELAY would take 40 to 90 ms a round trip."""
    async with pair(broker) as nodes:
        times = []
        for number in range(30):
            start = time.perf_counter()
            await nodes.exchange(b"frame %d" % number)
            times.append(time.perf_counter() - start)
        assert statistics.median(times) < 0.03


async def test_a_closed_transport_leaves_nothing_behind(broker: BrokerProcess) -> None:
    """Threads and file descriptors are as before."""
    async with pair(broker):
        pass
    threads, files = threading.active_count(), open_files()
    for _ in range(3):
        async with pair(broker) as nodes:
            await nodes.exchange()
    assert threading.active_count() == threads
    assert open_files() == files


async def test_a_packet_over_the_limit_is_not_read(amqtt_broker: BrokerProcess) -> None:
    """In MQTT 3.1.1 nobody told the broker of a limit: the connection ends before the packet is in memory."""
    async with pair(amqtt_broker) as nodes:
        with Stranger(amqtt_broker) as stranger:
            stranger.publish(nodes.far_channel.route.topic, bytes(LARGEST_INCOMING + 1))
            assert "over the limit of 1048576" in await nodes.far.closed()
        await nodes.connect()
        await nodes.exchange()


# Who is there.


async def test_a_drafter_may_be_called_presence(broker: BrokerProcess) -> None:
    """Its topics begin as those of the nodes' words do."""
    drafter = broker.transport("presence")
    target = broker.transport("in", deployment=drafter.place.deployment)
    async with closing(drafter), closing(target):
        accepted: list[End] = []
        await drafter.listen("presence", lambda channel: accepted.append(End(channel)))
        near = End(await target.dial("presence"))
        near.channel.send(b"there", control=True)
        await accepted[0].until(lambda end: end.frames == [b"there"])
        accepted[0].channel.send(b"and back", control=True)
        await near.until(lambda end: end.frames == [b"and back"])


async def test_an_absent_drafter_is_one_sentence_within_a_dial(broker: BrokerProcess) -> None:
    """One that has never been there, or has left, is waited for as long as a dial may take, and not longer."""
    async with pair(broker) as nodes:
        start = time.monotonic()
        with pytest.raises(LinkClosed, match="drafter nobody is not there, says the broker"):
            await nodes.target.dial("nobody")
        await nodes.drafter.close()
        assert await nodes.near.closed() == "closed by the peer"
        assert time.monotonic() - start < 2
        with anyio.fail_after(5):  # the broker may say it a moment after the channel has ended
            while "drafter drafter is not there" not in await dial_sentence(nodes.target, "drafter"):
                pass


async def dial_sentence(target: MqttTransport, drafter: str) -> str:
    with pytest.raises(LinkClosed) as caught:
        await target.dial(drafter)
    return str(caught.value)


async def test_a_killed_drafter_is_noticed_through_its_last_will(broker: BrokerProcess) -> None:
    """kill -9: the broker says so, and the target's channel ends within a second or two."""
    target = broker.transport("chat-a")
    async with closing(target):
        async with node_process(broker, target.place.deployment, "drafter") as process:
            near = End(await target.dial("drafter"))
            process.kill()
            with anyio.fail_after(3):
                assert await near.closed() == f"drafter is gone, says the broker {broker.broker.url}"
        assert "is not there" in await dial_sentence(target, "drafter")


async def test_a_killed_target_is_noticed_by_its_drafter(broker: BrokerProcess) -> None:
    """The same the other way."""
    drafter = broker.transport("drafter")
    accepted: list[End] = []
    async with closing(drafter):
        await drafter.listen("drafter", lambda channel: accepted.append(End(channel)))
        async with node_process(broker, drafter.place.deployment, "chat-a", "drafter") as process:
            process.kill()
            with anyio.fail_after(3):
                assert await accepted[0].closed() == f"chat-a is gone, says the broker {broker.broker.url}"


async def test_a_forged_or_old_word_ends_nothing(broker: BrokerProcess) -> None:
    """Only the deployment's key makes a word, and only the present instance's end counts."""
    async with pair(broker) as nodes:
        place = nodes.drafter.place
        topic = place.presence("drafter")
        instance = nodes.near_channel.peer_instance
        with Stranger(broker) as stranger:
            for word in (
                b"",
                b"offline",
                f"offline {instance.hex()} {bytes(16).hex()}".encode(),
                presence.encode(Presence(OFFLINE, instance), b"other key", topic),
                presence.encode(Presence(OFFLINE, instance), place.key, place.presence("chat-a")),
                presence.encode(Presence(OFFLINE, bytes(INSTANCE_BYTES)), place.key, topic),
            ):
                stranger.publish(topic, word, retain=True)
            await nodes.exchange()
        assert nodes.near.reasons == nodes.far.reasons == []
        await nodes.target.dial("drafter")


async def test_a_word_that_somebody_took_away_is_said_again(broker: BrokerProcess) -> None:
    """Whoever comes later finds the drafter all the same."""
    async with pair(broker) as nodes:
        with Stranger(broker) as stranger:
            topic = nodes.drafter.place.presence("drafter")
            for _ in range(2):
                stranger.publish(topic, b"", retain=True)
                while await stranger.next(topic) != (topic, b""):
                    pass
                assert (await stranger.next(topic))[1].startswith(b"listening ")
        later = broker.transport("chat-b", deployment=nodes.drafter.place.deployment)
        async with closing(later):
            await later.dial("drafter")


async def test_another_deployment_key_is_one_sentence(broker: BrokerProcess) -> None:
    """The word of a drafter with another key is not believed, and the sentence says why."""
    async with pair(broker) as nodes:
        other = broker.transport("chat-b", deployment=nodes.drafter.place.deployment, key=b"another")
        async with closing(other):
            assert "is not signed with this deployment's key" in await dial_sentence(other, "drafter")


# Strangers.


async def test_doubled_and_replayed_payloads_are_dropped(broker: BrokerProcess) -> None:
    """A broker may deliver twice, a stranger may play back what they heard: each frame is told once."""
    async with pair(broker) as nodes:
        nodes.secure()
        with Stranger(broker) as stranger:
            nodes.near.channel.send(b"one", control=True)
            topic, payload = await stranger.next("/in/")
            for _ in range(3):
                stranger.publish(topic, payload)
            await nodes.exchange()
            assert nodes.far.frames == [b"one", b"ping"]
            assert nodes.far_channel.dropped == 3
        assert nodes.far.reasons == []


async def test_forged_payloads_are_dropped_and_end_nothing(broker: BrokerProcess) -> None:
    """Bits turned, marks of the wrong key, of the stage before the handshake's end, Closes of a stranger."""
    async with pair(broker) as nodes:
        route = nodes.far_channel.route
        early = frames.Sealer(route.channel, nodes.near_channel._sealer._key)
        early._counter = 1
        nodes.secure()
        await nodes.exchange(b"first")
        with Stranger(broker) as stranger:
            nodes.near.channel.send(b"one", control=True)
            topic, payload = await stranger.next("/in/")
            stranger_sealer = frames.Sealer(route.channel, b"wrong" * 6, frames.SECURED)
            forged = [
                payload[:-1] + bytes([payload[-1] ^ 1]),
                payload[:8] + bytes(7) + payload[15:],
                stranger_sealer.seal(frames.DATA, b"stranger"),
                stranger_sealer.seal(frames.CLOSE),
                early.seal(frames.DATA, b"unmarked"),
                early.seal(frames.CLOSE),
                payload[:10],
                b"",
            ]
            for one in forged:
                stranger.publish(topic, one)
            await nodes.exchange()
        assert nodes.far.frames == [b"first", b"one", b"ping"]
        assert nodes.far_channel.dropped == 6  # the two short ones belong to no channel
        assert nodes.far.reasons == nodes.near.reasons == []


async def test_a_peer_that_never_secured_can_still_close(broker: BrokerProcess) -> None:
    """A target that refuses the drafter's last word of the handshake has no key of it."""
    async with pair(broker) as nodes:
        nodes.far.channel.secure(b"only here")
        nodes.near.channel.send(b"not heard any more", control=True)
        nodes.near.channel.close()
        assert await nodes.far.closed() == "closed by the peer"
        assert nodes.far.frames == []


async def test_an_opening_is_taken_once(broker: BrokerProcess) -> None:
    """Played back when its channel is over, or to the drafter's next life, it comes to nothing."""
    drafter = broker.transport("drafter")
    target = broker.transport("chat-a", deployment=drafter.place.deployment)
    accepted: list[End] = []
    async with closing(target):
        with Stranger(broker) as stranger:
            async with closing(drafter):
                await drafter.listen("drafter", lambda channel: accepted.append(End(channel)))
                near = End(await target.dial("drafter"))
                topic, opening = await stranger.next("/in/")
                near.channel.close()
                await accepted[0].closed()
                stranger.publish(topic, opening)
                await target.dial("drafter")
                assert len(accepted) == 2
            again = MqttTransport(drafter.place)
            again._version = drafter._version
            async with closing(again):
                await again.listen("drafter", lambda channel: accepted.append(End(channel)))
                stranger.publish(topic, opening)
                await target.dial("drafter")
                assert len(accepted) == 3


async def test_a_drafter_that_begins_anew_is_not_waited_for(broker: BrokerProcess) -> None:
    """What it was asked as the instance before, it does not understand: the dial ends at once, to be tried again."""
    target = broker.transport("chat-a")
    place = target.place
    topic = place.presence("drafter")
    async with closing(target):
        with Stranger(broker) as stranger:

            def listening() -> bytes:
                word = Presence(presence.LISTENING, secrets.token_bytes(INSTANCE_BYTES))
                return presence.encode(word, place.key, topic)

            async def begin_anew() -> None:
                await stranger.next("/in/")
                await anyio.to_thread.run_sync(stranger.publish, topic, listening(), True)

            stranger.publish(topic, listening(), retain=True)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(begin_anew)
                with pytest.raises(LinkClosed, match="drafter has just begun anew"):
                    await target.dial("drafter")


async def test_openings_of_strangers_cost_nothing(broker: BrokerProcess) -> None:
    """Without the deployment's key no channel comes of them; with it there is a bound."""
    async with pair(broker) as nodes:
        nodes.secure()
        topic = nodes.drafter.place.topic("drafter", "in", "chat-a")
        with Stranger(broker) as stranger:
            for number in range(50):
                nonce = number.to_bytes(16, "little")
                sealer = frames.Sealer(nonce[:4], b"no key of this deployment")
                stranger.publish(topic, sealer.seal(frames.OPEN, nonce + bytes(INSTANCE_BYTES)))
            await nodes.exchange()
            assert len(nodes.accepted) == 1
            key, instance = nodes.drafter.place.key, nodes.near_channel.peer_instance
            for number in range(MAX_UNSECURED + 5):
                nonce = number.to_bytes(16, "little")
                sealer = frames.Sealer(nonce[:4], frames.derive(key, b"channel", topic.encode(), nonce, instance))
                stranger.publish(topic, sealer.seal(frames.OPEN, nonce + bytes(INSTANCE_BYTES)))
            nodes.near.channel.send(b"again", control=True)
            await nodes.accepted[0].until(lambda end: b"again" in end.frames)
            assert len(nodes.accepted) == 1 + MAX_UNSECURED
