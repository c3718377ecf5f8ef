"""What a node's process is told from outside: to finish and leave, to leave at once, to read its file again.

SIGTERM and Ctrl-C: the first lets what runs finish, the second ends it. SIGHUP: reload; but where it means that the
terminal was closed, leave.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import Awaitable, Callable
from typing import Any

import anyio

from paceline.core.errors import UserError
from paceline.topology.process import notify
from paceline.topology.spec import Topology

log = logging.getLogger(__name__)

ONE_ORDER_SECONDS = 0.5  # service managers signal a parent and its children, and the parent passes it on


class Orders:
    """Shared by all nodes of a process. `stop`: finish what runs and leave; `end`: leave now (then stop is set too)."""

    def __init__(self, read: Callable[[], Topology]) -> None:
        """read: the topology file as it is now; UserError when it cannot be used."""
        self.stop = anyio.Event()
        self.end = anyio.Event()
        self._read = read
        self._stopped_at = 0.0
        self._followers: list[Callable[[Topology], None]] = []

    def listen(self) -> None:
        """Takes this process's signals, on the running loop."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.leave)
        leaves_with_terminal = _has_terminal() and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN  # nohup

        def hang_up() -> None:
            gone = leaves_with_terminal and not _has_terminal()
            (self.leave if gone else self.reload)()

        loop.add_signal_handler(signal.SIGHUP, hang_up)

    def leave(self) -> None:
        """The first call asks to finish and leave, a later one to leave at once."""
        now = time.monotonic()
        if not self.stop.is_set():
            self._stopped_at = now
            notify("STOPPING=1")
            self.stop.set()
        elif now - self._stopped_at >= ONE_ORDER_SECONDS:
            self.end.set()

    def follow(self, apply: Callable[[Topology], None]) -> None:
        """`apply` is called with each new topology from now on; it changes all or, raising UserError, nothing."""
        self._followers.append(apply)

    def reload(self) -> None:
        """Reads the topology again and tells who follows; a file that cannot be used changes nothing."""
        if not self._followers or self.stop.is_set():
            log.warning("not reloaded: this process %s", "stops" if self.stop.is_set() else "has not started yet")
            return
        notify(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}")
        try:
            topology = self._read()
            for apply in self._followers:
                apply(topology)
        except UserError as error:
            words = f"nothing is changed: {'; '.join(str(error).splitlines())}"
            log.error("%s", words, extra={"event": "reload_refused"})
            notify(f"STATUS={words}")
        finally:  # whoever asked for it waits for this
            notify("READY=1")


async def any_of(*waits: Callable[[], Awaitable[Any]], seconds: float | None = None) -> None:
    """Returns when one of them does, or after so many seconds."""
    with anyio.move_on_after(seconds):
        async with anyio.create_task_group() as tasks:

            async def wait(one: Callable[[], Awaitable[Any]]) -> None:
                await one()
                tasks.cancel_scope.cancel()

            for one in waits:
                tasks.start_soon(wait, one)


def _has_terminal() -> bool:
    """Whether this process belongs to a terminal that is still there."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True
