"""A namespace behind a pipe of packets: reached through it only, as late and as badly as it is told."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time

import pytest

from paceline.topology.netem import Faults
from paceline.topology.netem_tun import TunPipe, why_not

pytestmark = pytest.mark.anyio

ECHO = """
import socket, sys
server = socket.create_server((sys.argv[1], 7))
print("ready", flush=True)
peer, _ = server.accept()
while data := peer.recv(100):
    peer.sendall(data)
"""


async def test_packets_are_late_and_lost_below_tcp() -> None:
    """A byte comes back after two delays; with a third of the packets lost TCP still carries every one."""
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    async with TunPipe() as pipe:
        command = [*pipe.command, sys.executable, "-c", ECHO, pipe.inner]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as server:
            try:
                assert server.stdout is not None and await asyncio.to_thread(server.stdout.readline) == b"ready\n"
                reader, writer = await asyncio.open_connection(pipe.inner, 7)
                pipe.apply(Faults(delay=0.03))
                started = time.monotonic()
                writer.write(b"x")
                assert await reader.readexactly(1) == b"x"
                assert time.monotonic() - started >= 0.06
                pipe.apply(Faults(loss=0.3))
                for byte in b"every byte":
                    writer.write(bytes([byte]))
                    await asyncio.sleep(0.01)
                assert await asyncio.wait_for(reader.readexactly(10), 20.0) == b"every byte"
                assert pipe.seen["lost"] > 0
                writer.close()
            finally:
                server.kill()


def test_without_root_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """A probe that cannot run has a reason."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert why_not() == "network namespaces need root"
