"""Round trips of a 200-byte frame between two processes through an MQTT broker on loopback, in microseconds.

    python benchmarks/mqtt_round_trip.py [--broker mosquitto|amqtt] [--rounds 1000] [--repeats 5] [--json]

`link` is what a target and its drafter use: the engine thread of one process sends, the other's loop hands the frame
to its engine thread, and back; frames are marked and checked. `paho` is the bare client with its own thread: it echoes
in its callback, which is the least that any design on paho costs. Both go through the same broker with QoS 0 and
TCP_NODELAY, and take turns. The ratio of the medians is asked to be 1.5 at the most.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import json
import os
import queue
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from common import verdict
from paho.mqtt.client import Client
from paho.mqtt.enums import CallbackAPIVersion

from paceline.topology.broker import BROKER_KIND, mosquitto, run_broker
from paceline.topology.links.base import Channel
from paceline.topology.links.mqtt import MqttTransport
from paceline.topology.links.mqtt_life import Place
from paceline.topology.links.mqtt_paho import MQTT_3, MQTT_5, Broker
from paceline.topology.spec_values import Address

PAYLOAD = bytes(200)
WAYS = ("paho", "link")
MOST = 1.5
FRAME_KEY = b"f" * 32
DEPLOYMENT = "round-trip"
Trip = Callable[[], object]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--broker", choices=("mosquitto", "amqtt"), help="default: both, where they are installed")
    parser.add_argument("--rounds", type=int, default=1000, help="round trips of one turn")
    parser.add_argument("--repeats", type=int, default=5, help="turns of each way")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--run-broker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run_broker:
        with tempfile.TemporaryDirectory() as folder:
            run_broker(Address("127.0.0.1", int(options.run_broker)), Path(folder))
        return
    if options.serve:
        serve(options.serve[0], options.broker, int(options.serve[1]))
    installed = {"mosquitto": bool(mosquitto()), "amqtt": bool(importlib.util.find_spec("amqtt"))}
    kinds = [options.broker] if options.broker else [kind for kind, there in installed.items() if there]
    report = {kind: measure(kind, options.rounds, options.repeats) for kind in kinds}
    show(report, options.json)
    sys.exit(any(rows["ratio"] > MOST for rows in report.values()))


def measure(kind: str, rounds: int, repeats: int) -> dict[str, Any]:
    """Both ways through one broker, in turns."""
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    with broker_process(kind) as port:
        for _ in range(repeats):
            for way in WAYS:
                with echo_process(way, kind, port), client(way, kind, port) as trip:
                    timed(trip, 200)
                    times[way] += timed(trip, rounds)
    rows: dict[str, Any] = {}
    for way, samples in times.items():
        cuts = statistics.quantiles(samples, n=100)
        rows[way] = {"p50_us": cuts[49] * 1e6, "p99_us": cuts[98] * 1e6}
    rows["ratio"] = rows["link"]["p50_us"] / rows["paho"]["p50_us"]
    return rows


def show(report: dict[str, dict[str, Any]], as_json: bool) -> None:
    if as_json:
        print(json.dumps(report, indent=2))
        return
    print(f"{'broker':12}{'way':8}{'p50 µs':>9}{'p99 µs':>9}")
    for kind, rows in report.items():
        for way in WAYS:
            print(f"{kind:12}{way:8}{rows[way]['p50_us']:9.0f}{rows[way]['p99_us']:9.0f}")
    for kind, rows in report.items():
        print(verdict(f"{kind}, round trip of the link against bare paho", rows["ratio"], MOST, at_least=False))


def timed(trip: Trip, rounds: int) -> list[float]:
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        trip()
        times.append(time.perf_counter() - start)
    return times


# Processes.


@contextlib.contextmanager
def broker_process(kind: str) -> Iterator[int]:
    """A broker of that kind on a free port, which it gives."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    command = [sys.executable, __file__, "--run-broker", str(port)]
    with subprocess.Popen(command, env={**os.environ, BROKER_KIND: kind}) as process:
        try:
            while True:
                with contextlib.suppress(OSError):
                    socket.create_connection(("127.0.0.1", port)).close()
                    break
                if process.poll() is not None:
                    sys.exit(f"{kind} did not start")
                time.sleep(0.01)
            yield port
        finally:
            process.kill()


@contextlib.contextmanager
def echo_process(way: str, kind: str, port: int) -> Iterator[None]:
    command = [sys.executable, __file__, "--serve", way, str(port), "--broker", kind]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            process.stdout.readline()
            yield
        finally:
            process.kill()


# The echoing side.


def serve(way: str, kind: str, port: int) -> None:
    if way == "paho":
        bare = bare_client(kind, port, "in")
        bare.on_message = lambda _, __, message: bare.publish("round-trip/drafter/out/target", message.payload)
        print("ready", flush=True)
        bare.loop_forever()
    with link_loop() as loop:
        inbox: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        channels: queue.SimpleQueue[Channel] = queue.SimpleQueue()

        def accept(channel: Channel) -> None:
            channel.secure(FRAME_KEY)
            channel.receive(inbox.put, lambda reason: None)
            channels.put(channel)

        asyncio.run_coroutine_threadsafe(transport(kind, port, "drafter").listen("drafter", accept), loop).result()
        print("ready", flush=True)
        channel = channels.get()
        while True:
            channel.send(inbox.get())


# The measuring side.


@contextlib.contextmanager
def client(way: str, kind: str, port: int) -> Iterator[Trip]:
    """A function that makes one round trip."""
    inbox: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    if way == "paho":
        bare = bare_client(kind, port, "out")
        bare.on_message = lambda _, __, message: inbox.put(message.payload)
        bare.loop_start()

        def trip() -> None:
            bare.publish("round-trip/drafter/in/target", PAYLOAD)
            inbox.get(timeout=10)

        yield trip
        bare.disconnect()
        bare.loop_stop()
        return
    with link_loop() as loop:
        node = transport(kind, port, "target")
        channel = asyncio.run_coroutine_threadsafe(dialled(node), loop).result()
        channel.receive(inbox.put, lambda reason: None)

        def trip() -> None:
            channel.send(PAYLOAD)
            inbox.get(timeout=10)

        yield trip
        asyncio.run_coroutine_threadsafe(node.close(), loop).result()


async def dialled(node: MqttTransport) -> Channel:
    channel = await node.dial("drafter")
    channel.secure(FRAME_KEY)
    return channel


def transport(kind: str, port: int, node: str) -> MqttTransport:
    return MqttTransport(Place(Broker("127.0.0.1", port), DEPLOYMENT, node, key=b"k" * 32))


def bare_client(kind: str, port: int, way: str) -> Client:
    """Connected and subscribed; its network loop is the caller's to run."""
    version = MQTT_3 if kind == "amqtt" else MQTT_5
    bare = Client(CallbackAPIVersion.VERSION2, f"bare-{way}-{os.getpid()}", protocol=version)
    bare.on_socket_open = lambda _, __, sock: sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    subscribed = threading.Event()
    bare.on_subscribe = lambda *_: subscribed.set()
    bare.connect("127.0.0.1", port)
    bare.subscribe(f"round-trip/drafter/{way}/target")
    while not subscribed.is_set():
        bare.loop()
    return bare


@contextlib.contextmanager
def link_loop() -> Iterator[asyncio.AbstractEventLoop]:
    """An event loop on a thread of its own, as a node has it: uvloop's where it is installed."""
    if importlib.util.find_spec("uvloop"):
        import uvloop

        loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    else:
        loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join()


if __name__ == "__main__":
    main()
