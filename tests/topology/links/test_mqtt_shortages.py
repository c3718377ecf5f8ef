"""What a node lacks for a while (descriptors, threads, a broker's sense) does not end its contact with the broker."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import socket
import threading

import anyio
import pytest

from paceline.topology.links.mqtt_life import Life

from .brokers import BrokerProcess, open_files
from .mqtt_helpers import pair

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.mark.parametrize("side", ["drafter", "target"])
@pytest.mark.parametrize("lacking", ["file descriptors", "threads", "sense"])
async def test_what_runs_out_while_connecting_is_missed_until_it_is_back(
    own_broker: BrokerProcess,
    side: str,
    lacking: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Told once, nothing of the failed attempts is left behind, and the link comes back by itself."""
    scarce = {
        "file descriptors": (socket, "socketpair", OSError(errno.EMFILE, "Too many open files")),
        "threads": (threading.Thread, "start", RuntimeError("can't start new thread")),
        "sense": (Life, "begin", KeyError("a bug")),
    }
    owner, name, error = scarce[lacking]
    async with pair(own_broker) as nodes:
        starving = getattr(nodes, side)
        tries, real = [], getattr(owner, name)

        def lack(*arguments: object) -> object:
            if asyncio.current_task() is not starving._keeper:
                return real(*arguments)
            tries.append(open_files())
            raise error

        monkeypatch.setattr(owner, name, lack)
        own_broker.kill()
        await nodes.near.closed()
        own_broker.start()
        with anyio.fail_after(10):
            while len(tries) < 4:
                await anyio.sleep(0.02)
        told = [record.message for record in caplog.records if str(error.args[-1]).lower() in record.message.lower()]
        assert len(told) == 1, caplog.text
        assert max(tries[1:]) - min(tries[1:]) <= 2  # the other node's comings and goings
        monkeypatch.undo()
        await nodes.connect()
        await nodes.exchange()


async def test_a_node_without_a_free_file_descriptor_comes_back(own_broker: BrokerProcess) -> None:
    """The process is at its limit while the broker restarts: both ends try on, and link once there is room."""
    async with pair(own_broker) as nodes:
        own_broker.kill()
        await nodes.near.closed()
        await nodes.far.closed()
        own_broker.start()
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 1, limits[1]))
        hoard: list[socket.socket] = []
        try:
            with pytest.raises(OSError, match="Too many open files"):
                while True:
                    hoard.append(socket.socket())
            with anyio.fail_after(10):
                while "too many open files" not in f"{nodes.target._trouble}{nodes.drafter._trouble}":
                    await anyio.sleep(0.02)
        finally:
            for one in hoard:
                one.close()
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        await nodes.connect()
        await nodes.exchange()
