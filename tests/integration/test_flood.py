"""A drafter that floods its target with valid frames costs only itself."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import anyio
import httpx
import pytest

from paceline.topology.handshake import Identity
from paceline.topology.links.tcp import TcpTransport
from paceline.topology.peer import Peer
from paceline.topology.server import DrafterServer
from paceline.topology.spec import load_topology
from paceline.topology.wire import Draft, Drafted, DraftedItem, Message

from .conftest import EmulatedStar, wait_for

pytestmark = pytest.mark.integration


class FloodingDrafter:
    """A fake drafter: answers each Draft with a thousand answers, and keeps count of its links."""

    def __init__(self, items: int) -> None:
        self.items = items
        self.links = 0

    def on_up(self, peer: Peer, greeting: Any) -> None:
        self.links += 1

    def on_message(self, peer: Peer, message: Message) -> None:
        if isinstance(message, Draft):
            session = message.items[0].session
            answer = Drafted(message.epoch, [DraftedItem(session, 0, 0, 0)] * self.items)
            for _ in range(1000):
                peer.send(answer)

    def on_down(self, peer: Peer, reason: str) -> None:
        pass


@pytest.mark.parametrize("items", [1, 4096])
def test_a_flooding_drafter_costs_only_itself(emulated: Callable[..., EmulatedStar], items: int) -> None:
    """The text is that of a plain target, and it comes at once; the flooder's link is closed."""
    star = emulated(targets=1)
    topology = load_topology(star.path)
    body = {"prompt": "abc", "max_tokens": 200, "temperature": 0}
    plain = star.run("--no-drafter", "--max-tokens", "200", "--prompt", "abc")["outputs"][0]["text"]
    flooder = FloodingDrafter(items)
    identity = Identity(topology.name, "drafter", max_sessions=8, max_context=4096, max_draft_length=16)

    async def serve(stop: threading.Event) -> None:
        async with anyio.create_task_group() as tasks:
            address = str(topology.drafters[0].listen)
            await tasks.start(DrafterServer(TcpTransport(), address, identity, flooder).run)
            while not stop.is_set():
                await anyio.sleep(0.02)
            tasks.cancel_scope.cancel()

    stop = threading.Event()
    thread = threading.Thread(target=lambda: anyio.run(serve, stop))
    thread.start()
    try:
        star.start("target", str(star.path), "target-0", "--run-dir", str(star.run_dir))
        wait_for(lambda: flooder.links > 0, "the link")
        for _ in range(3):
            response = httpx.post(f"{star.api[0]}/v1/completions", json=body, trust_env=False, timeout=20.0)
            assert response.json()["choices"][0]["text"] == plain
        wait_for(lambda: flooder.links > 1, "the closed link to be dialled again")
    finally:
        stop.set()
        thread.join()
