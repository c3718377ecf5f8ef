"""paho's client as Paceline uses it: no Nagle delay, one writer at a time, sockets closed when TLS fails."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from dataclasses import dataclass, field
from typing import Any

from paho.mqtt.client import Client
from paho.mqtt.enums import CallbackAPIVersion, MQTTErrorCode, MQTTProtocolVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

MQTT_5, MQTT_3 = MQTTProtocolVersion.MQTTv5, MQTTProtocolVersion.MQTTv311
KEEPALIVE_SECONDS = 4  # half as long again, and the broker takes back the word of a node that is gone
CONNECT_SECONDS = 5.0


@dataclass(frozen=True)
class Broker:
    """Where the broker is, and how to get in."""

    host: str
    port: int
    tls: ssl.SSLContext | None = None
    username: str | None = None
    password: str | None = field(default=None, repr=False)

    @property
    def url(self) -> str:
        """As people write it, without the password."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"mqtt{'s' if self.tls else ''}://{host}:{self.port}"


@dataclass(frozen=True)
class Will:
    """What the broker says for this client when it is gone."""

    topic: str
    payload: bytes


class _TlsSocket(ssl.SSLSocket):
    """paho forgets to close one whose handshake fails."""

    def do_handshake(self, block: bool = False) -> None:
        try:
            super().do_handshake(block)
        except OSError:
            self.close()
            raise


class PahoClient(Client):
    """paho's own, except that only one thread writes at a time. It is for one connection; its owner runs its loop."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._writing = threading.Lock()
        self._largest_packet = 0
        self.too_large = ""  # what was, if anything
        super().__init__(*arguments, **options)

    def connect_to(self, broker: Broker, largest_packet: int) -> None:
        """Blocks until the socket stands. largest_packet: a larger one ends the connection, read by nobody."""
        self._largest_packet = largest_packet
        if self.protocol == MQTT_5:
            properties = Properties(PacketTypes.CONNECT)  # type: ignore[no-untyped-call]
            properties.MaximumPacketSize = largest_packet
            self.connect(broker.host, broker.port, KEEPALIVE_SECONDS, clean_start=True, properties=properties)
        else:
            self.connect(broker.host, broker.port, KEEPALIVE_SECONDS)

    def _sock_recv(self, bufsize: int) -> bytes:
        """paho asks for the rest of a packet: up to 256 MiB where the broker does not know, or keep, our bound."""
        if bufsize > self._largest_packet:
            self.too_large = f"a packet of {bufsize} bytes, over the limit of {self._largest_packet}"
            raise OSError(self.too_large)
        return super()._sock_recv(bufsize)

    def loop_write(self) -> MQTTErrorCode:
        """From any thread."""
        with self._writing:
            return super().loop_write()


def paho_client(broker: Broker, client_id: str, will: Will | None, version: MQTTProtocolVersion) -> PahoClient:
    """Ready to connect."""
    client = PahoClient(CallbackAPIVersion.VERSION2, client_id, protocol=version, reconnect_on_failure=False)
    client.connect_timeout = CONNECT_SECONDS
    client.on_socket_open = _no_delay
    if will is not None:
        client.will_set(will.topic, will.payload, qos=1, retain=True)
    if broker.username is not None:
        client.username_pw_set(broker.username, broker.password)
    if broker.tls is not None:
        broker.tls.sslsocket_class = _TlsSocket
        client.tls_set_context(broker.tls)
        client.on_socket_register_write = _leave_to_the_thread
    return client


def _no_delay(client: Client, userdata: Any, sock: Any) -> None:
    """Nagle's algorithm would add 40 to 90 ms to a round trip."""
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _leave_to_the_thread(client: Client, userdata: Any, sock: Any) -> None:
    """That this callback is there keeps paho from writing on the caller's thread: TLS is for one thread at a time."""
