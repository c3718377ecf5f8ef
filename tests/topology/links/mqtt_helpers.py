"""Nodes at a broker, in this process and in others, and a stranger who reads and writes what they like."""

from __future__ import annotations

import contextlib
import queue
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
from paho.mqtt.client import Client
from paho.mqtt.enums import CallbackAPIVersion

from paceline.core.errors import LinkClosed
from paceline.topology.links.base import Listener
from paceline.topology.links.mqtt import MqttTransport
from paceline.topology.links.mqtt_channel import MqttChannel
from paceline.topology.links.mqtt_paho import MQTT_3

from .brokers import BrokerProcess
from .helpers import End

FRAME_KEY = b"frame key"
NODE = """
import asyncio, sys
from paceline.topology.links.mqtt import MqttTransport
from paceline.topology.links.mqtt_life import Place
from paceline.topology.links.mqtt_paho import MQTT_3, MQTT_5, Broker

async def main(port, deployment, node, drafter, version):
    transport = MqttTransport(Place(Broker("127.0.0.1", int(port)), deployment, node, key=b"k" * 32))
    transport._version = MQTT_3 if version == "3" else MQTT_5
    kept = []
    if drafter:
        kept.append(await transport.dial(drafter))
    else:
        kept.append(await transport.listen(node, kept.append))
    print("ready", flush=True)
    await asyncio.Event().wait()

asyncio.run(main(*sys.argv[1:]))
"""


@asynccontextmanager
async def closing(transport: MqttTransport) -> AsyncIterator[MqttTransport]:
    try:
        yield transport
    finally:
        await transport.close()


class Pair:
    """A drafter and a target at one broker, each with a client of its own, and a channel between them."""

    def __init__(self, drafter: MqttTransport, target: MqttTransport) -> None:
        self.drafter, self.target = drafter, target
        self.listener: Listener
        self.accepted: list[End] = []
        self.near: End

    @property
    def far(self) -> End:
        return self.accepted[-1]

    @property
    def near_channel(self) -> MqttChannel:
        assert isinstance(self.near.channel, MqttChannel)
        return self.near.channel

    @property
    def far_channel(self) -> MqttChannel:
        assert isinstance(self.far.channel, MqttChannel)
        return self.far.channel

    async def connect(self) -> None:
        """Dials again and again, as a target does."""
        with anyio.fail_after(15):
            while True:
                with contextlib.suppress(LinkClosed):
                    self.near = End(await self.target.dial(self.listener.address))
                    return
                await anyio.sleep(0.02)

    def secure(self) -> None:
        self.near.channel.secure(FRAME_KEY)
        self.far.channel.secure(FRAME_KEY)

    async def exchange(self, text: bytes = b"ping") -> None:
        """A frame each way; whatever came before has come by then."""
        self.near.channel.send(text, control=True)
        await self.far.until(lambda end: text in end.frames)
        self.far.channel.send(text[::-1], control=True)
        await self.near.until(lambda end: text[::-1] in end.frames)


@asynccontextmanager
async def pair(broker: BrokerProcess, **place: object) -> AsyncIterator[Pair]:
    """Connected, and not secured yet."""
    drafter = broker.transport("drafter", **place)
    target = broker.transport("chat-a", **{"deployment": drafter.place.deployment, **place})
    async with closing(drafter), closing(target):
        made = Pair(drafter, target)
        made.listener = await drafter.listen("drafter", lambda channel: made.accepted.append(End(channel)))
        await made.connect()
        yield made


@asynccontextmanager
async def node_process(
    broker: BrokerProcess, deployment: str, node: str, drafter: str = ""
) -> AsyncIterator[subprocess.Popen[str]]:
    """A process that listens as `node`, or dials `drafter`, and then only holds on."""
    version = "3" if broker.kind == "amqtt" else "5"
    command = [sys.executable, "-c", NODE, str(broker.port), deployment, node, drafter, version]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            assert await anyio.to_thread.run_sync(process.stdout.readline) == "ready\n"
            yield process
        finally:
            process.kill()


class Stranger:
    """A client of the broker that belongs to nobody: sees every payload, may publish anywhere."""

    def __init__(self, broker: BrokerProcess) -> None:
        self.seen: queue.SimpleQueue[tuple[str, bytes]] = queue.SimpleQueue()
        self._subscribed: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._client = Client(CallbackAPIVersion.VERSION2, protocol=MQTT_3)
        self._client.on_message = lambda client, _, message: self.seen.put((message.topic, bytes(message.payload)))
        self._client.on_subscribe = lambda *_: self._subscribed.put(None)
        self._client.on_socket_open = lambda client, _, sock: sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._client.connect("127.0.0.1", broker.port)
        self._client.loop_start()
        self._client.subscribe("#", qos=1)
        self._subscribed.get(timeout=10)

    def __enter__(self) -> Stranger:
        return self

    def __exit__(self, *exc: object) -> None:
        self._client.disconnect()
        self._client.loop_stop()

    def publish(self, topic: str, payload: bytes, retain: bool = False) -> None:
        """Returns when the broker has it."""
        self._client.publish(topic, payload, qos=1, retain=retain).wait_for_publish(10)

    async def next(self, part: str) -> tuple[str, bytes]:
        """The next payload on a topic that has this part."""
        while True:
            topic, payload = await anyio.to_thread.run_sync(lambda: self.seen.get(timeout=10))
            if part in topic:
                return topic, payload
