"""Round trips of a 200-byte frame between two processes over loopback, in microseconds.

    python benchmarks/link_round_trip.py [--rounds 2000] [--repeats 5] [--json]

What a target and its drafter use is `channel`: the engine thread of one process sends, the loop of the other
hands the frame to its engine thread through a queue, and back. It stands beside the bare blocking socket
(the floor), the same with a reader thread and a queue (the floor of any design with an engine thread), and
asyncio streams (the usual design, without any thread). `channel tls` is the channel inside TLS 1.3 with a certificate
at both ends, as beyond loopback. Ways take turns, so that a busy machine hits all alike.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import json
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

from paceline.topology.certificate_checks import fingerprint
from paceline.topology.credentials import node_files
from paceline.topology.keyring import Keyring
from paceline.topology.links.base import Channel
from paceline.topology.links.tcp import ServerTls, TcpTransport
from paceline.topology.links.tcp_channel import split_address
from paceline.topology.tls import client_context, server_context

PAYLOAD = bytes(200)
WAYS = ["socket", "socket+queue", "streams", "streams uvloop", "channel", "channel uvloop"]
WAYS += ["channel tls", "channel tls uvloop"]
RoundTrip = Callable[[], object]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2000, help="round trips of one turn")
    parser.add_argument("--repeats", type=int, default=5, help="turns of each way")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--serve", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--certificates", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve, options.certificates)
        return
    with tempfile.TemporaryDirectory() as folder:
        certificates = Path(folder)
        Keyring(certificates, certificates / "deployment.key").fill("echo", {"drafter": [], "target": []})
        report(measured(options, certificates), options.json)


def measured(options: argparse.Namespace, certificates: Path) -> dict[str, list[float]]:
    """Seconds of each round trip, by way."""
    ways = [way for way in WAYS if "uvloop" not in way or importlib.util.find_spec("uvloop")]
    times: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(options.repeats):
        for way in ways:
            with echo_process(way, certificates) as address, client(way, address, certificates) as measure:
                measure(200)
                times[way] += measure(options.rounds)
    return times


def report(times: dict[str, list[float]], as_json: bool) -> None:
    rows = {}
    for way, samples in times.items():
        cuts = statistics.quantiles(samples, n=100)
        rows[way] = {"p50_us": cuts[49] * 1e6, "p99_us": cuts[98] * 1e6}
    for row in rows.values():
        row["ratio_to_socket"] = row["p50_us"] / rows["socket"]["p50_us"]
        row["ratio_to_streams"] = row["p50_us"] / rows["streams"]["p50_us"]
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    print(f"{'':19}{'p50 µs':>9}{'p99 µs':>9}{'× socket':>10}{'× streams':>11}")
    for way, row in rows.items():
        ratios = f"{row['ratio_to_socket']:10.2f}{row['ratio_to_streams']:11.2f}"
        print(f"{way:19}{row['p50_us']:9.1f}{row['p99_us']:9.1f}{ratios}")


@contextlib.contextmanager
def echo_process(way: str, certificates: Path) -> Iterator[str]:
    """A process that echoes; gives its address."""
    command = [sys.executable, __file__, "--serve", way, "--certificates", str(certificates)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.kill()


@contextlib.contextmanager
def event_loop(way: str) -> Iterator[asyncio.AbstractEventLoop]:
    """An event loop of the kind that the way names."""
    if "uvloop" in way:
        import uvloop

        loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    else:
        loop = asyncio.new_event_loop()
    try:
        yield loop
    finally:
        loop.close()


def transport(way: str, certificates: Path, node: str) -> TcpTransport:
    """The channel's, as one node speaks it."""
    if "tls" not in way:
        return TcpTransport()
    files = node_files(certificates, node)
    shown = ServerTls(server_context(files), fingerprint(files.certificate))
    return TcpTransport(server_tls=shown, client_tls=client_context(files))


# The echoing side.


def serve(way: str, certificates: Path) -> None:
    if way.startswith("socket"):
        serve_socket(with_queue=way.endswith("queue"))
        return
    with event_loop(way) as loop:
        streams = way.startswith("streams")
        loop.run_until_complete(serve_streams() if streams else serve_channel(transport(way, certificates, "drafter")))


def serve_socket(with_queue: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        print(f"127.0.0.1:{server.getsockname()[1]}", flush=True)
        connection, _ = server.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        get = reader_thread(connection) if with_queue else lambda: read_frame(connection)
        with contextlib.suppress(EOFError, OSError):
            while True:
                connection.sendall(framed(get()))


async def serve_streams() -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                length = int.from_bytes(await reader.readexactly(4), "little")
                writer.write(framed(await reader.readexactly(length)))

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    print(f"127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await asyncio.Event().wait()


async def serve_channel(transport: TcpTransport) -> None:
    def accept(channel: Channel) -> None:
        inbox: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        channel.receive(inbox.put, lambda reason: None)

        def engine() -> None:
            while True:
                channel.send(inbox.get())

        threading.Thread(target=engine, daemon=True).start()

    listener = await transport.listen("127.0.0.1:0", accept)
    print(listener.address, flush=True)
    await asyncio.Event().wait()


# The measuring side.

Measure = Callable[[int], list[float]]


@contextlib.contextmanager
def client(way: str, address: str, certificates: Path) -> Iterator[Measure]:
    """A function that makes so many round trips and returns their seconds."""
    if way.startswith("socket"):
        with socket.create_connection(split_address(address)) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            get = reader_thread(connection) if way.endswith("queue") else lambda: read_frame(connection)

            def trip() -> None:
                connection.sendall(framed(PAYLOAD))
                get()

            yield lambda rounds: timed(trip, rounds)
    elif way.startswith("streams"):
        with event_loop(way) as loop:
            reader, writer = loop.run_until_complete(asyncio_open(address))
            yield lambda rounds: loop.run_until_complete(timed_streams(reader, writer, rounds))
            writer.close()
    else:
        with channel_client(way, address, transport(way, certificates, "target")) as measure:
            yield measure


@contextlib.contextmanager
def channel_client(way: str, address: str, transport: TcpTransport) -> Iterator[Measure]:
    """The loop in its own thread, as in a target; the caller is the engine thread."""
    inbox: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    ready: queue.SimpleQueue[tuple[Channel, asyncio.AbstractEventLoop, asyncio.Event]] = queue.SimpleQueue()

    async def link() -> None:
        channel = await transport.dial(address, "drafter")
        channel.receive(inbox.put, lambda reason: None)
        stop = asyncio.Event()
        ready.put((channel, asyncio.get_running_loop(), stop))
        await stop.wait()

    def loop_thread() -> None:
        with event_loop(way) as loop:
            loop.run_until_complete(link())

    thread = threading.Thread(target=loop_thread)
    thread.start()
    channel, loop, stop = ready.get()

    def trip() -> None:
        channel.send(PAYLOAD)
        inbox.get()

    yield lambda rounds: timed(trip, rounds)
    loop.call_soon_threadsafe(stop.set)
    thread.join()


async def asyncio_open(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection(*split_address(address))


async def timed_streams(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, rounds: int) -> list[float]:
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        writer.write(framed(PAYLOAD))
        await reader.readexactly(int.from_bytes(await reader.readexactly(4), "little"))
        times.append(time.perf_counter() - start)
    return times


def timed(trip: RoundTrip, rounds: int) -> list[float]:
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        trip()
        times.append(time.perf_counter() - start)
    return times


def framed(payload: bytes) -> bytes:
    return len(payload).to_bytes(4, "little") + payload


def read_frame(connection: socket.socket) -> bytes:
    """One frame; loopback delivers these small ones whole."""
    data = connection.recv(4096)
    if not data:
        raise EOFError
    return data[4:]


def reader_thread(connection: socket.socket) -> Callable[[], bytes]:
    """Reads in a thread of its own; returns how to get the next frame."""
    inbox: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def read() -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                inbox.put(read_frame(connection))

    threading.Thread(target=read, daemon=True).start()
    return inbox.get


if __name__ == "__main__":
    main()
