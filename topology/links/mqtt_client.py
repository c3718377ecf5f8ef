"""One connection to an MQTT broker: paho on a thread of its own, its news told on the asyncio loop.

The thread is ours, around paho's interface for outer loops: so the reason of a failed attempt is known, the thread's
end too, and `publish` from an engine's thread writes to the socket itself, which saves a change of threads each way;
with TLS the thread does all writing. Each connection has a client of its own; nothing of an old one is sent again.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import select
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from paho.mqtt.client import MQTT_ERR_NO_CONN, MQTT_ERR_SUCCESS, MQTT_LOG_ERR, Client, MQTTMessage, MQTTMessageInfo
from paho.mqtt.enums import MQTTProtocolVersion
from paho.mqtt.properties import Properties
from paho.mqtt.reasoncodes import ReasonCode
from paho.mqtt.subscribeoptions import SubscribeOptions

from paceline.core.errors import LinkClosed
from paceline.topology.links.mqtt_paho import MQTT_3, MQTT_5, Broker, PahoClient, Will, paho_client
from paceline.topology.links.words import words

GREETING_SECONDS = 1.0  # some brokers of MQTT 3.1.1 meet MQTT 5 with silence
GOODBYE_SECONDS = 1.0
LOOK_SECONDS = 1.0  # at least so often the thread looks at the keep-alive
MAX_QUEUED_BYTES = 8 << 20
MAX_INBOX_BYTES = 16 << 20
LARGEST_PACKET = 256 << 10  # larger frames travel in parts, so that others get their turn
LARGEST_INCOMING = 4 * LARGEST_PACKET
SAFE_PACKET = 64 << 10  # what a broker of MQTT 3.1.1, which does not say, may be sent
SMALLEST_PACKET = 1024
PACKET_OVERHEAD = 16  # of a PUBLISH beside topic and payload, more than ever
PUBLISH_OVERHEAD = 4  # usually: two bytes before the topic's length and two of it

OnMessage = Callable[[str, bytes], None]


class BrokerRefused(LinkClosed):
    """The broker does not let this node in, or shows a wrong certificate: somebody has to put that right."""


class _VersionRefused(LinkClosed):
    """The broker does not speak this version of MQTT, or says nothing at all."""


async def connect(
    broker: Broker, client_id: str, will: Will | None, on_message: OnMessage, first: MQTTProtocolVersion = MQTT_5
) -> MqttConnection:
    """A connection, in the other version where the broker does not speak `first`. Raises LinkClosed with the reason."""
    try:
        return await MqttConnection.open(broker, client_id, will, on_message, first)
    except _VersionRefused:
        return await MqttConnection.open(broker, client_id, will, on_message, MQTT_3 if first == MQTT_5 else MQTT_5)


class MqttConnection:
    """Up from `open` to `ended`. `publish` may be called from any thread; everything else on the loop."""

    def __init__(self, broker: Broker, client: PahoClient, on_message: OnMessage, version: MQTTProtocolVersion) -> None:
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()  # why, once the thread is over
        self.largest_packet = SAFE_PACKET
        self.terms: Properties | None = None  # what the broker's greeting said, in MQTT 5
        self.version = version
        self._broker = broker
        self._client = client
        self._on_message = on_message
        self._loop = asyncio.get_running_loop()
        self._connected: asyncio.Future[None] = self._loop.create_future()
        self._greeted: asyncio.Future[None] = self._loop.create_future()
        self._subscribed: dict[int, asyncio.Future[list[ReasonCode]]] = {}  # by message id
        self._why = ""  # set by the thread, as are the next three
        self._refused = False
        self._welcomed = False
        self._look_at = 0.0
        self._leaving = False
        self._aborted = False
        self._lock = threading.Lock()  # guards what follows
        self._over = False
        self._unwritten: tuple[deque[MQTTMessageInfo], ...] = (deque(), deque())  # by QoS
        self._sizes: tuple[deque[int], ...] = (deque(), deque())
        self._unwritten_bytes = 0
        self._inbox: deque[tuple[str, bytes]] = deque()
        self._scheduled = False  # the loop will look into the inbox
        self._taken = 0  # bytes, counted by the thread
        self._delivered = 0  # bytes, counted by the loop
        self._woken, self._waker = socket.socketpair()
        self._waker.setblocking(False)
        self._poller = select.poll()
        self._poller.register(self._woken, select.POLLIN)
        self._thread = threading.Thread(target=self._run, name="mqtt", daemon=True)
        client.on_connect = self._greet  # type: ignore[assignment]
        client.on_disconnect = self._lose  # type: ignore[assignment]
        client.on_subscribe = self._agree
        client.on_message = self._take
        client.on_log = self._note_error

    @classmethod
    async def open(
        cls, broker: Broker, client_id: str, will: Will | None, on_message: OnMessage, version: MQTTProtocolVersion
    ) -> MqttConnection:
        """Connects; LinkClosed with the reason when it cannot be had."""
        try:
            connection = cls(broker, paho_client(broker, client_id, will, version), on_message, version)
            connection._start()
        except (OSError, RuntimeError) as error:  # no file descriptor is left, or no thread
            raise LinkClosed(f"cannot connect to the broker {broker.url}: {words(error)}") from None
        try:
            await first_of(connection._connected, connection.ended)
            await first_of(connection._greeted, connection.ended, timeout=GREETING_SECONDS)
            if not connection._greeted.done():
                connection._fail()
            connection._greeted.result()
        except BaseException:
            connection._abort()
            raise
        return connection

    def publish(self, topic: str, payload: bytes, *, control: bool = False, retain: bool = False) -> bool:
        """Hands a payload to the thread; False when too much waits there already. Never blocks."""
        qos = 1 if control or retain else 0
        with self._lock:
            if self._over:
                return True  # as lost as what was sent a moment before
            self._forget_written(qos)
            if self._unwritten_bytes > MAX_QUEUED_BYTES:
                self._forget_written(1 - qos)
                if self._unwritten_bytes > MAX_QUEUED_BYTES:
                    return False
            info = self._client.publish(topic, payload, qos, retain)
            if self._client.want_write():
                self._wake()
            self._unwritten[qos].append(info)
            self._sizes[qos].append(len(payload))
            self._unwritten_bytes += len(payload)
        return True

    async def subscribe(self, topics: Sequence[str]) -> None:
        """Returns when the broker has agreed to all; LinkClosed when it has not."""
        if self.version == MQTT_5:
            _, mid = self._client.subscribe([(topic, SubscribeOptions(qos=1)) for topic in topics])
        else:
            _, mid = self._client.subscribe([(topic, 1) for topic in topics])
        self._wake()
        if mid is None:
            raise LinkClosed(f"the connection to {self._broker.url} was lost")
        answer = self._subscribed.setdefault(mid, self._loop.create_future())
        await first_of(answer, self.ended)
        self._subscribed.pop(mid, None)
        if not answer.done():
            raise LinkClosed(self.ended.result())
        for topic, code in zip(topics, answer.result(), strict=False):
            if code.is_failure:
                raise LinkClosed(f"{self._broker.url} does not let this node read {topic}: {code.getName().lower()}")

    async def close(self) -> None:
        """After what was published, leaves in good order; the thread is over when this returns."""
        self._leaving = True
        self._client.disconnect()
        self._wake()
        _, late = await asyncio.wait({self.ended}, timeout=GOODBYE_SECONDS)
        if late:
            self._abort()
            await asyncio.wait({self.ended}, timeout=GOODBYE_SECONDS)

    def _start(self) -> None:
        try:
            self._thread.start()
        except RuntimeError:
            self._waker.close()
            self._woken.close()
            raise

    def _abort(self) -> None:
        """Makes the thread end at once."""
        self._leaving = self._aborted = True
        sock = self._client.socket()
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)  # type: ignore[attr-defined]

    def _fail(self) -> None:
        """No greeting came, or a refusal."""
        self._greeted.cancel()
        if self._why:
            raise (BrokerRefused if self._refused else LinkClosed)(self._why)
        did = "closed the connection without an answer" if self.ended.done() else "does not answer"
        raise _VersionRefused(f"the broker {self._broker.url} {did}")

    def _wake(self) -> None:
        """The thread is to look at what there is to write, and whether the socket is still there."""
        with contextlib.suppress(OSError):  # full: it has enough to wake up for
            self._waker.send(b"!")

    def _forget_written(self, qos: int) -> None:
        infos, sizes = self._unwritten[qos], self._sizes[qos]
        while infos and (infos[0].rc != MQTT_ERR_SUCCESS or infos[0].is_published()):
            infos.popleft()
            self._unwritten_bytes -= sizes.popleft()

    # On paho's thread.

    def _run(self) -> None:
        try:
            self._client.connect_to(self._broker, LARGEST_INCOMING)
            self._tell(self._connected.set_result, None)
            while not self._aborted and self._serve_once() == MQTT_ERR_SUCCESS:
                pass
        except (OSError, ValueError) as error:
            self._refused = isinstance(error, ssl.SSLError)
            self._why = self._why or f"cannot reach the broker {self._broker.url}: {words(error)}"
        finally:
            self._tell(self._end)

    def _serve_once(self) -> int:
        """Waits for the socket, or to be woken, and has paho read or write."""
        client, sock = self._client, self._client.socket()
        place = -1 if sock is None else sock.fileno()
        if place < 0:
            return MQTT_ERR_NO_CONN
        self._poller.register(place, select.POLLIN | (select.POLLOUT if client.want_write() else 0))
        unread = isinstance(sock, ssl.SSLSocket) and sock.pending() > 0
        events = dict(self._poller.poll(0 if unread else LOOK_SECONDS * 1000))
        if self._woken.fileno() in events:
            self._woken.recv(4096)
        result = MQTT_ERR_SUCCESS
        if unread or events.get(place, 0) & ~select.POLLOUT:
            result = client.loop_read()
        if not result and events.get(place, 0) & select.POLLOUT:
            result = client.loop_write()
        now = time.monotonic()
        if result or now < self._look_at:
            return result
        self._look_at = now + LOOK_SECONDS / 2
        return client.loop_misc()

    def _greet(self, client: Client, userdata: Any, flags: Any, reason: ReasonCode, properties: Properties) -> None:
        if not reason.is_failure:
            self._welcomed = True
            client.on_log = None
            self.terms = properties
            self._tell(self._welcome, getattr(properties, "MaximumPacketSize", None))
        elif reason != "Unsupported protocol version" or self.version == MQTT_3:
            self._why = self._refusal(reason)

    def _refusal(self, reason: ReasonCode) -> str:
        said = reason.getName().lower()
        if said in ("not authorized", "bad user name or password"):
            self._refused = True
            if self._broker.username is None:
                said = "it wants a user name and a password"
            else:
                said = f"wrong password, or user {self._broker.username!r} is not authorised"
        return f"the broker {self._broker.url} refuses this node: {said}"

    def _lose(self, client: Client, userdata: Any, flags: Any, reason: ReasonCode, properties: Properties) -> None:
        if self._welcomed and not self._why:
            why = self._client.too_large or reason.getName().lower()
            self._why = f"the connection to the broker {self._broker.url} was lost ({why})"

    def _agree(self, client: Client, userdata: Any, mid: int, codes: list[ReasonCode], properties: Properties) -> None:
        self._tell(self._subscription, mid, codes)

    def _take(self, client: Client, userdata: Any, message: MQTTMessage) -> None:
        """Bounded: what the loop does not get to is dropped, as by any network."""
        if self._taken - self._delivered > MAX_INBOX_BYTES:
            return
        self._taken += len(message.payload)
        self._inbox.append((message.topic, bytes(message.payload)))
        if not self._scheduled:
            self._scheduled = True
            self._tell(self._deliver)

    def _note_error(self, client: Client, userdata: Any, level: int, text: str) -> None:
        if level == MQTT_LOG_ERR and "receive on socket" in text and self._broker.tls is not None:
            self._why = f"the broker {self._broker.url} ended the connection: {text.rpartition(': ')[2]}"

    def _tell(self, callback: Callable[..., None], *arguments: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended, and all that wanted to know with it
            self._loop.call_soon_threadsafe(callback, *arguments)

    # On the loop.

    def _welcome(self, largest_packet: int | None) -> None:
        if self.version == MQTT_5:
            self.largest_packet = min(LARGEST_PACKET, largest_packet or LARGEST_PACKET)
        if self.largest_packet < SMALLEST_PACKET:
            self._why = f"the broker {self._broker.url} takes packets of {self.largest_packet} bytes only"
            self._abort()
        elif not self._greeted.done():
            self._greeted.set_result(None)

    def _subscription(self, mid: int, codes: list[ReasonCode]) -> None:
        answer = self._subscribed.setdefault(mid, self._loop.create_future())
        if not answer.done():
            answer.set_result(codes)

    def _deliver(self) -> None:
        self._scheduled = False  # first: what comes from now on calls again
        for _ in range(len(self._inbox)):
            topic, payload = self._inbox.popleft()
            self._delivered += len(payload)
            self._on_message(topic, payload)

    def _end(self) -> None:
        self._thread.join()
        with self._lock:
            self._over = True
            self._client.reinitialise()  # lets go of its socket and of the callbacks
            self._waker.close()
            self._woken.close()
        if not self.ended.done():
            self.ended.set_result("this node has left" if self._leaving else self._why or "the connection was lost")


async def first_of(*futures: asyncio.Future[Any], timeout: float | None = None) -> None:
    """Returns when one is done, or after `timeout` seconds."""
    await asyncio.wait(futures, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)


def client_name(*names: str) -> str:
    """Unique: two clients of one name would throw each other out."""
    return "-".join((*names, secrets.token_hex(4)))
