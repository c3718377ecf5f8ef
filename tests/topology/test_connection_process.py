"""A drafter in a process of its own: stopped, continued, killed and started again."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import anyio
import pytest

from paceline.topology.links.tcp import TcpTransport
from paceline.topology.wire import Draft

from .helpers import Recorder, target

pytestmark = [pytest.mark.anyio, pytest.mark.integration]

DRAFTER_PROCESS = """
import sys
import anyio
from paceline.topology.handshake import Identity
from paceline.topology.links.tcp import TcpTransport
from paceline.topology.server import DrafterServer

class Nobody:
    def on_up(self, peer, greeting): pass
    def on_message(self, peer, message): pass
    def on_down(self, peer, reason): pass

async def main():
    server = DrafterServer(TcpTransport(), sys.argv[1], Identity("star", "orin-1", key=b"secret"), Nobody())
    async with anyio.create_task_group() as tasks:
        print(await tasks.start(server.run), flush=True)

anyio.run(main)
"""


async def start(folder: Path, address: str) -> tuple[subprocess.Popen[str], str]:
    """A drafter process that listens, and its address."""
    process = subprocess.Popen(
        [sys.executable, "-c", DRAFTER_PROCESS, address], cwd=folder, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    line = await anyio.to_thread.run_sync(process.stdout.readline)
    return process, line.strip()


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


async def test_a_hung_and_a_killed_drafter_are_noticed_and_found_again(tmp_path: Path) -> None:
    """A hang shows after three beats, a death at once; after both the link is up within two seconds."""
    above = Recorder()
    process, address = await start(tmp_path, "127.0.0.1:0")
    try:
        async with target(TcpTransport(), address, above, beat=0.1) as connection:
            await above.until(lambda: len(above.ups) == 1)
            process.send_signal(signal.SIGSTOP)
            await above.until(lambda: len(above.downs) == 1, seconds=2)
            assert "silent" in above.downs[0][1] and not connection.send(Draft(1, []))
            process.send_signal(signal.SIGCONT)
            await above.until(lambda: len(above.ups) == 2, seconds=2)
            end(process)
            await above.until(lambda: len(above.downs) == 2, seconds=2)
            assert not connection.send(Draft(1, []))
            process, _ = await start(tmp_path, address)
            await above.until(lambda: len(above.ups) == 3, seconds=2)
            assert connection.send(Draft(1, []))
    finally:
        end(process)
