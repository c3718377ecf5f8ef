"""What a round costs beside the models: wire, sockets, queues, threads, sampling, commit; over loopback TCP.

A target's engine and a drafter's service run as in production, in two processes, with models that cost
nothing (the next token is the last one plus one, and every draft is right). Compared with a bare echo of
the same bytes over asyncio streams between two processes, in the same run, in turn. Both ends are kept on different
processors, as on two machines: where the scheduler happens to put both ends of an echo on one, it takes half the time
(no other processor is to be woken), and the ratio would be a matter of luck.

    python benchmarks/framework_cost.py [--rounds 2000] [--repeats 5]
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import anyio
import numpy as np
from common import median, verdict

from paceline.cloud.drafting import DraftingConfig
from paceline.cloud.engine import Engine, EngineConfig
from paceline.cloud.events import Arrived, Cancel, LinkUp, Stop, Submit
from paceline.cloud.links import TargetLinks
from paceline.cloud.requests import Delta, Request
from paceline.core.clock import RealClock
from paceline.core.model import Segment, Span
from paceline.core.percentiles import percentile
from paceline.core.sampling import Sampling
from paceline.edge.events import Limits, PeerUp, Received
from paceline.edge.links import DrafterLinks
from paceline.edge.service import DrafterService
from paceline.edge.session import Session
from paceline.topology.connection import DrafterConnection
from paceline.topology.handshake import Identity
from paceline.topology.links.tcp import TcpTransport
from paceline.topology.process import settle_runtime
from paceline.topology.server import DrafterServer
from paceline.topology.wire import MAX_DRAFT_LENGTH, Hello, Welcome, decode, encode

PROCESSORS = sorted(os.sched_getaffinity(0))
VOCABULARY, K, LANE, LENGTH = 64, 4, 8, 1 << 20
NEXT_TOKEN = np.eye(VOCABULARY)[np.arange(1, VOCABULARY + 1) % VOCABULARY]


class Counting:
    """A model that costs nothing: the next token is the last one plus one."""

    name, vocabulary_size, max_context, kv_slots = "counting", VOCABULARY, LENGTH, LENGTH * LANE

    def allocate(self, length: int) -> Span | None:
        return Span(0, 0, length)

    def free(self, span: Span) -> None:
        pass

    def forward(self, segments: Sequence[Segment]) -> np.ndarray:
        last = [token for s in segments if s.rows for token in s.tokens[len(s.tokens) - s.rows :]]
        return NEXT_TOKEN[last]


class CountingStrategy(Counting):
    """Drafts that cost nothing and are always right."""

    quick, reads_together, keeps_tail, keeps_kv = 256, True, True, False

    def advance(self, sessions: Sequence[Session]) -> list[Session]:
        for session in sessions:
            last = session.committed[-1]
            session.tail = [(last + step) % VOCABULARY for step in range(1, session.want + 1)]
            session.computed = len(session.committed) + len(session.tail)
        return list(sessions)

    def read(self, reads: Sequence[tuple[Session, int]]) -> None:
        for session, count in reads:
            session.computed += count


async def serve_drafter() -> None:
    """The other process: says its port, then serves until stdin ends."""
    settle_runtime()
    links = DrafterLinks()
    identity = Identity("bench", "drafter", max_context=LENGTH, max_draft_length=MAX_DRAFT_LENGTH)
    service = links.service = DrafterService(CountingStrategy(), RealClock(), Limits(), links.reply, identity.epoch)
    threading.Thread(target=service.run, daemon=True).start()
    async with anyio.create_task_group() as tasks:
        address = await tasks.start(DrafterServer(TcpTransport(), "127.0.0.1:0", identity, links).run)
        print(address, flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
        tasks.cancel_scope.cancel()


async def serve_echo() -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while header := await reader.read(4):
            size = int.from_bytes(header, "little")
            await reader.readexactly(size)
            writer.write(header + bytes(int.from_bytes(header, "little")))
            await writer.drain()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    print(f"127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


def keep(pid: int, *, last: bool) -> None:
    """Puts a process on the last of this machine's processors, or on the first."""
    os.sched_setaffinity(pid, {PROCESSORS[-1 if last else 0]})


def other_process(role: str) -> tuple[Any, str]:
    process = subprocess.Popen(
        [sys.executable, __file__, role], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    keep(process.pid, last=True)
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


class Rounds:
    """A target's engine with a lane of eight; collects when each round was published."""

    def __init__(self) -> None:
        self.times: list[float] = []
        config = EngineConfig(1, LANE, 256, DraftingConfig(("drafter",), K))
        self.engine = Engine(Counting(), [b"x"] * VOCABULARY, config, self.publish)
        self.enough = threading.Event()
        self.wanted = 0

    def submit(self) -> None:
        for index in range(LANE):
            self.engine.inbox.put(Submit(Request(f"r{index}", (1, 2, 3), Sampling(temperature=0.0), 1 << 18)))

    def publish(self, deltas: list[Delta]) -> None:
        if len(deltas) == LANE and all(len(delta.token_ids) == K + 1 for delta in deltas):
            self.times.append(time.perf_counter())
            if len(self.times) >= self.wanted:
                self.enough.set()


async def our_rounds(address: str, rounds: int) -> tuple[list[float], float, float]:
    """(seconds of each round, bytes out and in a session and round)."""
    bench = Rounds()
    engine = bench.engine
    connection = DrafterConnection(
        TcpTransport(), address, Identity("bench", "target"), TargetLinks(engine), engine.drafting.live
    )
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(connection.run)
        while connection.peer is None:
            await anyio.sleep(0.01)
        bench.wanted = rounds + 50
        bench.submit()
        thread = threading.Thread(target=engine.run)
        thread.start()
        while not bench.enough.is_set():
            await anyio.sleep(0.02)
        for index in range(LANE):
            engine.inbox.put(Cancel(f"r{index}"))
        count = engine.statistics.drafted_rounds / LANE
        out, back = connection.peer.bytes_out, connection.peer.bytes_in
        engine.inbox.put(Stop())
        thread.join()
        tasks.cancel_scope.cancel()
    times = bench.times[50 : 50 + rounds]
    seconds = [later - sooner for sooner, later in itertools.pairwise(times)]
    return seconds, out / count / LANE, back / count / LANE


def python_alone(rounds: int) -> tuple[float, float]:
    """Seconds a round of the engine's and of the service's own Python: one thread, no sockets, nobody waits."""
    drafts: list[bytes] = []
    answers: list[bytes] = []
    bench = Rounds()
    engine = bench.engine
    reply = lambda name, message: answers.append(encode(message))  # noqa: E731
    service = DrafterService(CountingStrategy(), RealClock(), Limits(), reply, 1)
    service.inbox.put(PeerUp("target", Hello(1, 0, "bench", "target", b"", "", VOCABULARY)))
    welcome = Welcome(1, "", "", LANE, LENGTH, MAX_DRAFT_LENGTH)
    engine.inbox.put(LinkUp("drafter", welcome, lambda message: drafts.append(encode(message)) is None))
    bench.submit()
    ours = theirs = 0.0
    for index in range(rounds + 50):
        if index == 50:
            ours = theirs = 0.0
        started = time.perf_counter()
        engine.step()
        between = time.perf_counter()
        for frame in drafts:
            service.inbox.put(Received("target", decode(frame)))
        drafts.clear()
        while service.step():
            pass
        for frame in answers:
            engine.inbox.put(Arrived("drafter", decode(frame)))
        answers.clear()
        ours += between - started
        theirs += time.perf_counter() - between
    return ours / rounds, theirs / rounds


async def echo_rounds(address: str, out: int, rounds: int) -> list[float]:
    host, port = address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    payload = out.to_bytes(4, "little") + bytes(out)
    seconds = []
    for _ in range(rounds):
        started = time.perf_counter()
        writer.write(payload)
        await writer.drain()
        await reader.readexactly(out + 4)
        seconds.append(time.perf_counter() - started)
    writer.close()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("role", nargs="?", choices=["drafter", "echo"], help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    if arguments.role == "drafter":
        return anyio.run(serve_drafter, backend_options={"use_uvloop": True})
    if arguments.role == "echo":
        return asyncio.run(serve_echo())
    settle_runtime()
    keep(0, last=False)
    drafter, drafter_address = other_process("drafter")
    echo, echo_address = other_process("echo")
    ours, bare = [], []
    try:
        for _ in range(arguments.repeats):
            seconds, out, back = anyio.run(
                our_rounds, drafter_address, arguments.rounds, backend_options={"use_uvloop": True}
            )
            ours.append(percentile(seconds, 50) * 1e6)
            size = round((out + back) / 2 * LANE)
            bare.append(percentile(asyncio.run(echo_rounds(echo_address, size, arguments.rounds)), 50) * 1e6)
            print(f"round p50 {ours[-1]:.0f} µs, echo p50 {bare[-1]:.0f} µs", flush=True)
    finally:
        for process in (drafter, echo):
            process.stdin.close()
            process.wait(10)
    engine_s, service_s = python_alone(arguments.rounds)
    print(
        f"of a round, Python alone (one process, warm caches): engine {engine_s * 1e6:.0f} µs, service with decoding "
        f"{service_s * 1e6:.0f} µs; the rest is four thread hand-offs, two sockets and cold caches"
    )
    print(verdict("framework round against a bare echo, p50", median(ours) / median(bare), 3.0, at_least=False))
    print(verdict("bytes a session and round, target to drafter", out, 100, at_least=False))
    print(verdict("bytes a session and round, drafter to target", back, 100, at_least=False))


if __name__ == "__main__":
    main()
