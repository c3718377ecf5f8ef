"""A fake drafter that finishes the handshake like a real one and then answers nonsense."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from random import Random
from typing import Any

import anyio

from paceline.core.emulated import toy_vocabulary
from paceline.topology.handshake import Identity
from paceline.topology.links.tcp import TcpTransport
from paceline.topology.peer import Peer
from paceline.topology.server import DrafterServer
from paceline.topology.wire import MAX_DRAFT_LENGTH, Draft, Drafted, DraftedItem, DraftItem, Message, pack_tokens

IDS = (0, 1, 7, 42, 299, 300, 2**31, 2**32 - 1)  # the vocabulary ends at 300


class NonsenseDrafter:
    """Valid frames without sense: wrong ids, positions, counts, statuses, sessions and epochs, some of them right."""

    def __init__(self, seed: int = 0) -> None:
        self.answers = 0
        self._random = Random(seed)

    def on_up(self, peer: Peer, greeting: Any) -> None:
        """Links come and go."""

    def on_down(self, peer: Peer, reason: str) -> None:
        """Nothing is kept."""

    def on_message(self, peer: Peer, message: Message) -> None:
        if not isinstance(message, Draft):
            return
        for _ in range(self._random.choice((0, 1, 1, 1, 2))):
            epoch = message.epoch if self._random.random() < 0.95 else self._random.randrange(2**63)
            peer.send(Drafted(epoch, [self._item(item) for item in message.items]))
            self.answers += 1

    def _item(self, asked: DraftItem) -> DraftedItem:
        random = self._random
        version = asked.base + len(asked.tokens) // 4
        near = (0, version, version, version, version + 1, asked.base, max(0, version - 3), 2**31 - 1)
        return DraftedItem(
            session=asked.session if random.random() < 0.9 else random.randrange(2**63),
            status=random.choice((0, 0, 0, 0, 1, 2, 3, 4, 5, 255)),
            held=random.choice(near),
            position=random.choice(near),
            tokens=pack_tokens([random.choice(IDS) for _ in range(random.randint(0, MAX_DRAFT_LENGTH))]),
            retry_after_ms=random.choice((0, 1, 50)),
        )


@contextlib.asynccontextmanager
async def nonsense_drafter(deployment: str, name: str, address: str) -> AsyncIterator[NonsenseDrafter]:
    """Listens in this process for as long as the block runs."""
    fake = NonsenseDrafter()
    identity = Identity(
        deployment,
        name,
        vocabulary=toy_vocabulary(300).identity,
        max_sessions=16,
        max_context=2048,
        max_draft_length=MAX_DRAFT_LENGTH,
    )
    ready = asyncio.Event()
    serving = asyncio.create_task(_serve(DrafterServer(TcpTransport(), address, identity, fake), ready))
    await ready.wait()
    try:
        yield fake
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


async def _serve(server: DrafterServer, ready: asyncio.Event) -> None:
    """In a task of its own: whoever made the fake need not be who ends it."""
    async with anyio.create_task_group() as tasks:
        await tasks.start(server.run)
        ready.set()
