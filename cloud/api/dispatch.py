"""From the engine's thread to the coroutines that wait: one wake-up of the loop for each round."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from paceline.cloud.requests import Delta


class Mailbox:
    """Deltas of one API call, in order. Only the loop's thread touches it."""

    def __init__(self) -> None:
        self._deltas: list[Delta] = []
        self._waiter: asyncio.Future[None] | None = None

    def put(self, delta: Delta) -> None:
        """Adds a delta and wakes who waits."""
        self._deltas.append(delta)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def take(self) -> list[Delta]:
        """All that has arrived; waits for the first."""
        while not self._deltas:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        deltas, self._deltas = self._deltas, []
        return deltas


class Dispatch:
    """Where the engine publishes. It is made before the engine; `bind` tells it the loop that serves."""

    def __init__(self) -> None:
        self.idle = asyncio.Event()  # no request is open
        self.idle.set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._mailboxes: dict[str, Mailbox] = {}

    def bind(self, loop: asyncio.AbstractEventLoop) -> None:
        """Deltas go to this loop from now on."""
        self._loop = loop

    def publish(self, deltas: list[Delta]) -> None:
        """All deltas of a round, from the engine's thread; never blocks. Without a loop nobody listens."""
        loop = self._loop
        if loop is None:
            return
        try:
            loop.call_soon_threadsafe(self.deliver, deltas)
        except RuntimeError:  # the loop has closed: the process is ending
            self._loop = None

    def deliver(self, deltas: Sequence[Delta]) -> None:
        """Sorts deltas into mailboxes, on the loop's thread; an ended request leaves."""
        for delta in deltas:
            mailbox = self._mailboxes.get(delta.request_id)
            if mailbox is None:
                continue
            if delta.finish_reason is not None:
                self.remove(delta.request_id)
            mailbox.put(delta)

    def add(self, request_id: str, mailbox: Mailbox) -> None:
        self._mailboxes[request_id] = mailbox
        self.idle.clear()

    def remove(self, request_id: str) -> bool:
        """Forgets a request; False when it had ended."""
        known = self._mailboxes.pop(request_id, None) is not None
        if not self._mailboxes:
            self.idle.set()
        return known

    @property
    def open(self) -> list[str]:
        """Ids of the requests that have not ended."""
        return list(self._mailboxes)
