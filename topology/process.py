"""What every node's process has in common: it says when it is ready, keeps its status, never outlives its parent."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio

SUPERVISED = "PACELINE_SUPERVISED"  # set by the supervisor: stdin is a pipe that ends with it
STATUS_SECONDS = float(os.environ.get("PACELINE_STATUS_SECONDS", "0.5"))  # shorter where tests want to see more
LAST_WORD_SECONDS = 10.0
GIL_SWITCH_SECONDS = 0.0005


def notify(state: str) -> None:
    """Tells whoever started this process (systemd's protocol: READY=1, STOPPING=1 …); silent when nobody asked."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    if address.startswith("@"):
        address = "\0" + address[1:]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as out:
        out.setblocking(False)  # who does not listen is not waited for
        try:
            out.sendto(state.encode(), address)
        except OSError:
            logging.getLogger(__name__).warning("could not notify %s", os.environ["NOTIFY_SOCKET"])


def follow_parent(drain: float = 0.0) -> None:
    """Under a supervisor: stops this process in good order, then by force, when the supervisor is gone.

    drain: seconds that this process may take to let its requests finish.
    """
    if os.environ.pop(SUPERVISED, None):
        threading.Thread(target=_wait_for_parent, args=(drain,), name="parent", daemon=True).start()


def _wait_for_parent(drain: float) -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(drain + LAST_WORD_SECONDS)
    os._exit(1)


def configure_logging(level: str = "info") -> None:
    """Log lines on stderr, with the time to the millisecond."""
    handler = logging.StreamHandler()
    formatter = logging.Formatter("%(asctime)s.%(msecs)03d %(levelname)s %(name)s: %(message)s", "%H:%M:%S")
    handler.setFormatter(formatter)
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def settle_runtime() -> None:
    """Call once the model is loaded: a thread that holds the model must not wait 5 ms for one that reads sockets,
    and the garbage collector need not walk what was loaded."""
    sys.setswitchinterval(GIL_SWITCH_SECONDS)
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 50, 100)


class StatusFile:
    """RUN_DIR/NAME.json: what a node counts, rewritten twice a second and at its end."""

    def __init__(self, run_dir: Path | None, role: str, name: str) -> None:
        self.path = None if run_dir is None else run_dir / f"{name}.json"
        self._about = {"name": name, "role": role, "pid": os.getpid()}
        self.state = "running"  # what `keep` writes
        self._trouble = ""  # why it could not be written last time, as logged

    def write(self, state: str, snapshot: dict[str, Any]) -> None:
        """Replaces the file in one step; a reader never sees half of it."""
        if self.path is None:
            return
        text = json.dumps({**self._about, "state": state, "time": time.time(), **snapshot})
        partial = self.path.with_suffix(".partial")
        try:
            partial.write_text(text)
            partial.replace(self.path)
            self._trouble = ""
        except OSError as error:  # a full disk costs the status, not the service
            trouble = error.strerror or str(error)
            if trouble != self._trouble:  # once, not twice a second
                logging.getLogger(__name__).warning("cannot write %s: %s", self.path, trouble)
            self._trouble = trouble

    async def keep(self, snapshot: Callable[[], dict[str, Any]]) -> None:
        """Writes until cancelled."""
        while True:
            self.write(self.state, snapshot())
            await anyio.sleep(STATUS_SECONDS)


async def load_or_stop(stop: anyio.Event, name: str, load: Callable[[], Any]) -> Any:
    """What `load` returns, or None as soon as the process is to stop: nobody waits for a model then."""
    loaded = None
    async with anyio.create_task_group() as tasks:

        async def leave() -> None:
            await stop.wait()
            tasks.cancel_scope.cancel()

        tasks.start_soon(leave)
        loaded = await on_thread(name, load)
        tasks.cancel_scope.cancel()
    return loaded


async def on_thread(name: str, work: Callable[[], Any]) -> Any:
    """Runs blocking work on a thread of its own, so that the loop still hears signals."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[Any] = loop.create_future()

    def finish(value: Any, error: BaseException | None) -> None:
        if result.done():
            return
        if error is not None:
            result.set_exception(error)
        else:
            result.set_result(value)

    def body() -> None:
        try:
            value, error = work(), None
        except BaseException as caught:
            value, error = None, caught
        with contextlib.suppress(RuntimeError):  # nobody waited for it, and the loop has ended
            loop.call_soon_threadsafe(finish, value, error)

    threading.Thread(target=body, name=name, daemon=True).start()
    return await result
