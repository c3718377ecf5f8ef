"""What goes on at a broker while one connection lives: channels, and who is there."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from paceline.core.errors import LinkClosed
from paceline.topology.links import mqtt_frames as frames
from paceline.topology.links import mqtt_presence as presence
from paceline.topology.links.base import Channel
from paceline.topology.links.mqtt_channel import NONCE_BYTES, MqttChannel, Route
from paceline.topology.links.mqtt_client import MqttConnection, first_of
from paceline.topology.links.mqtt_frames import Opened
from paceline.topology.links.mqtt_paho import Broker, Will
from paceline.topology.links.mqtt_presence import INSTANCE_BYTES, LISTENING, OFFLINE, ONLINE, Presence

log = logging.getLogger(__name__)

TOPIC_PREFIX = "paceline"
ANSWER_SECONDS = 1.2  # shorter than a dial may take, so that its sentence says what is amiss
ECHO_SECONDS = 2.0
HEAL_SECONDS = 1.0
MAX_STRANGE = 1024
MAX_REMEMBERED = 4096  # Opens that were taken
MAX_UNSECURED = 256  # channels that have not finished the handshake


@dataclass(frozen=True)
class Place:
    """Where a node lives at a broker."""

    broker: Broker
    deployment: str
    node: str
    key: bytes = field(default=b"", repr=False)  # the deployment's
    prefix: str = TOPIC_PREFIX
    quiet: bool = False  # says nothing of its presence, because the node itself may be there

    def topic(self, drafter: str, way: str, target: str) -> str:
        return f"{self.prefix}/{self.deployment}/{drafter}/{way}/{target}"

    def presence(self, node: str) -> str:
        return f"{self.prefix}/{self.deployment}/presence/{node}"


class Accepting(Protocol):
    """A drafter that accepts channels."""

    address: str
    on_channel: Callable[[Channel], None]


class Life:
    """Made before the connection, whose last will it knows; over with it."""

    def __init__(self, place: Place, listeners: Mapping[str, Accepting]) -> None:
        self.instance = secrets.token_bytes(INSTANCE_BYTES)
        self._place = place
        self._listeners = listeners
        self._connection: MqttConnection | None = None
        self._channels: dict[Route, MqttChannel] = {}
        self._answers: dict[Route, asyncio.Future[None]] = {}  # of dials
        self._taken: dict[bytes, None] = {}  # nonces of Opens, oldest first: a stranger may play one back
        self._nodes: dict[str, Presence] = {}
        self._news = asyncio.Event()  # of nodes
        self._strange: set[str] = set()  # nodes whose word is not signed with the deployment's key
        self._subscribed: set[str] = set()
        self._own_topic = place.presence(place.node)
        self._announced = b""
        self._echo: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._healing: asyncio.TimerHandle | None = None

    @property
    def will(self) -> Will | None:
        """What the broker is to say once the connection is lost."""
        return None if self._place.quiet else Will(self._own_topic, self._word(OFFLINE))

    async def begin(self, connection: MqttConnection, topics: set[str]) -> None:
        """Subscribes, says that this node is there, and waits until the broker has passed that on."""
        self._connection = connection
        self._subscribed |= topics
        await connection.subscribe([self._place.presence("+"), *topics])
        if self._place.quiet:
            return
        self.announce()
        await first_of(self._echo, connection.ended, timeout=ECHO_SECONDS)
        if not self._echo.done() and not connection.ended.done():
            url = self._place.broker.url
            raise LinkClosed(f"the broker {url} does not pass on {self._own_topic}: does its access list allow it?")

    async def subscribe(self, topic: str) -> None:
        assert self._connection is not None
        if topic not in self._subscribed:
            await self._connection.subscribe([topic])
            self._subscribed.add(topic)

    def announce(self) -> None:
        """The birth, and again whenever this node's state changes."""
        self._healing = None
        self._announced = self._say(LISTENING if self._listeners else ONLINE)

    def leave(self) -> None:
        """Ends every channel, and says what the broker would say for this node if it just fell silent."""
        for channel in list(self._channels.values()):
            channel.close()
        self._say(OFFLINE)

    def end(self, reason: str) -> None:
        """The connection is gone, and every channel with it."""
        if self._healing is not None:
            self._healing.cancel()
        for channel in list(self._channels.values()):
            channel.finish(reason)
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(LinkClosed(reason))

    def _say(self, state: str) -> bytes:
        if self._place.quiet:
            return b""
        word = self._word(state)
        assert self._connection is not None
        self._connection.publish(self._own_topic, word, retain=True)
        return word

    def _word(self, state: str) -> bytes:
        return presence.encode(Presence(state, self.instance), self._place.key, self._own_topic)

    # What channels send through.

    @property
    def largest_packet(self) -> int:
        assert self._connection is not None
        return self._connection.largest_packet

    def publish(self, topic: str, payload: bytes, *, control: bool = False) -> bool:
        assert self._connection is not None
        return self._connection.publish(topic, payload, control=control)

    def forget(self, channel: MqttChannel) -> None:
        self._channels.pop(channel.route, None)

    # Dialling and accepting.

    async def dial(self, drafter: str, until: float) -> Channel:
        """Open → Accept, as soon as the drafter says that it listens. until: on the loop's clock."""
        place = self._place
        await self._hear_of(drafter, until)
        self._expect(drafter)
        out, back = place.topic(drafter, "in", place.node), place.topic(drafter, "out", place.node)
        await self.subscribe(back)
        nonce = secrets.token_bytes(NONCE_BYTES)
        channel = self._channel(Route(back, nonce[:4]), out, nonce, drafter, self._nodes[drafter].instance)
        answer = self._answers[channel.route] = asyncio.get_running_loop().create_future()
        try:
            channel.greet(frames.OPEN, nonce + self.instance)
            await asyncio.wait_for(answer, ANSWER_SECONDS)
        except asyncio.TimeoutError:
            channel.close()
            why = f"{place.broker.url} says it is there; does the access list let this node publish to {out}?"
            raise LinkClosed(f"drafter {drafter} does not answer, and {why}") from None
        except BaseException:
            channel.close()
            raise
        finally:
            del self._answers[channel.route]
        return channel

    async def _hear_of(self, drafter: str, until: float) -> None:
        """Returns when it listens, or there is no use in waiting."""
        while drafter not in self._strange and not self._listens(drafter):
            try:
                await asyncio.wait_for(self._news.wait(), until - asyncio.get_running_loop().time())
            except asyncio.TimeoutError:
                return

    def _listens(self, drafter: str) -> bool:
        there = self._nodes.get(drafter)
        return there is not None and there.state == LISTENING

    def _expect(self, drafter: str) -> None:
        """Raises LinkClosed when the broker says that nobody would answer."""
        url = self._place.broker.url
        if self._listens(drafter):
            return
        if drafter not in self._nodes and drafter in self._strange:
            raise LinkClosed(f"the word of drafter {drafter} at {url} is not signed with this deployment's key")
        raise LinkClosed(f"drafter {drafter} is not there, says the broker {url}")

    def _channel(self, route: Route, out: str, nonce: bytes, peer: str, listener: bytes) -> MqttChannel:
        place = self._place
        channel = MqttChannel(self, route, out, nonce, place.key, peer, place.broker.url, listener=listener)
        self._channels[route] = channel
        return channel

    def _accept(self, listener: Accepting, topic: str, payload: bytes) -> None:
        """A payload of no channel that is here: an Open, or nothing."""
        nonce = payload[frames.HEADER.size : frames.HEADER.size + NONCE_BYTES]
        if payload[0] != frames.OPEN or len(payload) != frames.HEADER.size + NONCE_BYTES + INSTANCE_BYTES:
            return
        if nonce in self._taken:
            return
        if sum(not channel.secured for channel in self._channels.values()) >= MAX_UNSECURED:
            return
        target = topic.rpartition("/")[2]
        channel = self._channel(
            Route(topic, nonce[:4]), self._place.topic(listener.address, "out", target), nonce, target, self.instance
        )
        opened = channel.unseal(payload)
        if opened is None:
            self.forget(channel)
            return
        self._taken[nonce] = None
        if len(self._taken) > MAX_REMEMBERED:
            del self._taken[next(iter(self._taken))]
        channel.greet(frames.ACCEPT, self.instance)
        channel.begin(opened.body[NONCE_BYTES:], dialer=opened.body[NONCE_BYTES:], listener=self.instance)
        listener.on_channel(channel)

    def unlisten(self, address: str) -> None:
        self.announce()
        inward = self._place.topic(address, "in", "")
        for channel in list(self._channels.values()):
            if channel.route.topic.startswith(inward):
                channel.close()
        self._subscribed.discard(inward + "+")

    # What comes in, on the loop.

    def on_message(self, topic: str, payload: bytes) -> None:
        """Anything on a topic that this node reads; whoever sent it."""
        if topic == self._place.presence(topic.rpartition("/")[2]):  # a drafter's may begin like it
            self._hear(topic, payload)
            return
        if len(payload) < frames.HEADER.size:
            return
        channel = self._channels.get(Route(topic, payload[1:5]))
        if channel is not None:
            opened = channel.unseal(payload)
            if opened is not None:
                self._take(channel, opened)
            return
        for listener in self._listeners.values():
            if topic.startswith(self._place.topic(listener.address, "in", "")):
                self._accept(listener, topic, payload)
                return

    def _take(self, channel: MqttChannel, opened: Opened) -> None:
        if channel.open:
            channel.take(opened)
        elif opened.kind == frames.ACCEPT and len(opened.body) == INSTANCE_BYTES:
            channel.begin(opened.body, dialer=self.instance, listener=opened.body)
            answer = self._answers.get(channel.route)
            if answer is not None and not answer.done():
                answer.set_result(None)

    def _hear(self, topic: str, payload: bytes) -> None:
        """Somebody's presence: an end counts only for the instance that it names."""
        node = topic.rpartition("/")[2]
        word = presence.decode(payload, self._place.key, topic)
        self._news.set()
        self._news = asyncio.Event()
        if topic == self._own_topic:
            self._hear_own(payload, word)
        if word is None:
            if len(self._strange) < MAX_STRANGE:
                self._strange.add(node)
            return
        known = self._nodes.get(node)
        if word.state != OFFLINE or known is None or known.instance == word.instance:
            self._nodes[node] = word
            if known is not None and known.instance != word.instance:
                self._ask_no_more(node)
        if word.state == OFFLINE:
            for channel in list(self._channels.values()):
                if channel.peer == node and channel.peer_instance == word.instance:
                    channel.finish(f"{node} is gone, says the broker {self._place.broker.url}")

    def _ask_no_more(self, node: str) -> None:
        """It began anew: an Open for the instance before means nothing to it."""
        for route, answer in self._answers.items():
            channel = self._channels.get(route)
            if channel is not None and channel.peer == node and not answer.done():
                answer.set_exception(LinkClosed(f"drafter {node} has just begun anew"))

    def _hear_own(self, payload: bytes, word: Presence | None) -> None:
        """Others know this node by what the broker keeps: what is wrong there is put right."""
        if payload == self._announced:
            if not self._echo.done():
                self._echo.set_result(None)
        elif self._echo.done() and self._healing is None:
            if word is not None and word.state != OFFLINE and word.instance != self.instance:
                log.warning("another process at %s calls itself %s, too", self._place.broker.url, self._place.node)
            self._healing = asyncio.get_running_loop().call_later(HEAL_SECONDS, self.announce)
