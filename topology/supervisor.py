"""Starts a topology's processes, waits until they are ready, restarts drafters that die, and leaves none behind.

Each child runs in its own process group, logs to RUN_DIR/NAME.log, says READY=1 over systemd's notify
protocol, and holds the read end of a pipe: when this process is gone, however it went, the pipe ends and the
child stops.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, cast

from paceline.core.errors import PacelineError, UserError
from paceline.topology.peer import Backoff
from paceline.topology.process import SUPERVISED

log = logging.getLogger(__name__)

READY_SECONDS = 300.0
STOP_SECONDS = 8.0


@dataclass(frozen=True)
class Node:
    """A process to run: its name, its command line, and whether to start it again when it dies.

    drain: seconds that it may take to let its requests finish once it is told to stop.
    """

    name: str
    command: tuple[str, ...]
    restart: bool = False
    drain: float = 0.0


@dataclass
class Child:
    """A node that was started."""

    node: Node
    log: Path
    process: asyncio.subprocess.Process | None = None
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    gone: asyncio.Event = field(default_factory=asyncio.Event)  # for good
    restarts: int = 0
    was_ready: bool = False
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        return self.process.pid if self.process is not None else None


def node_command(role: str, topology: Path, name: str | None, run_dir: Path, *options: str) -> tuple[str, ...]:
    """The command line of one node's process."""
    named = () if name is None else (name,)
    return (sys.executable, "-m", "paceline", role, str(topology), *named, "--run-dir", str(run_dir), *options)


class Supervisor:
    """`async with Supervisor(run_dir)`: children started inside are gone when the block ends."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.children: dict[str, Child] = {}
        self.leaving = False  # everything stops: who ends now is neither missed nor started again
        self.failed = asyncio.Event()
        self.failure: PacelineError | None = None

    async def __aenter__(self) -> Supervisor:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.stop(list(self.children))

    def start(self, node: Node) -> Child:
        """Starts a node in the background."""
        child = Child(node, self.run_dir / f"{node.name}.log")
        try:
            child.log.unlink(missing_ok=True)
        except OSError as error:
            raise UserError(f"{child.log}: {error.strerror}") from None
        self.children[node.name] = child
        child.task = asyncio.create_task(self._look_after(child), name=f"child {node.name}")
        return child

    async def wait_ready(self, names: Sequence[str], timeout: float = READY_SECONDS) -> None:
        """Returns once all are ready; raises what went wrong with the first that failed."""
        everything: asyncio.Future[Any] = asyncio.gather(*(self.children[name].ready.wait() for name in names))
        failed = asyncio.create_task(self.failed.wait())
        try:
            await first_of(everything, failed, timeout=timeout)
        finally:
            # One that was ready, and died while others still started, is started again: it is not late.
            late = [] if everything.done() else [name for name in names if not self.children[name].ready.is_set()]
            everything.cancel()
            failed.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await everything
        self.check()
        if late:
            raise PacelineError(f"{', '.join(late)} not ready after {timeout:.0f} s; see the logs in {self.run_dir}")

    def check(self) -> None:
        """Raises the failure of a child that may not fail."""
        if self.failure is not None:
            raise self.failure

    async def stop(self, names: Sequence[str]) -> None:
        """SIGTERM, then SIGKILL to whole process groups after a grace time that covers the longest drain."""
        children = [self.children[name] for name in names]
        for child in children:
            child.stopping.set()
            _signal(child, signal.SIGTERM)
        grace = STOP_SECONDS + max((child.node.drain for child in children), default=0.0)
        waits = [asyncio.create_task(child.gone.wait()) for child in children]
        if waits:
            await asyncio.wait(waits, timeout=grace)
        for child in children:
            if not child.gone.is_set():
                log.warning("%s did not stop within %.0f s and is killed", child.node.name, grace)
                _signal(child, signal.SIGKILL)
            if child.task is not None:
                await child.task

    def pass_on(self, number: signal.Signals) -> None:
        """A signal for every child that is ready; one that just begins would be killed by it."""
        for child in self.children.values():
            if child.ready.is_set():
                _signal(child, number)

    def status(self, name: str) -> dict[str, Any]:
        """The node's last status file; empty when it never wrote one."""
        with contextlib.suppress(OSError, ValueError):
            return cast("dict[str, Any]", json.loads((self.run_dir / f"{name}.json").read_text()))
        return {}

    # --- one child

    async def _look_after(self, child: Child) -> None:
        """Runs a child, again and again if it may be restarted, until it is stopped."""
        backoff = Backoff(first=0.1)
        while not self._ends(child):
            try:
                code = await self._run_once(child)
            except OSError as error:  # no room for one more process
                if child.node.restart and child.was_ready:
                    log.warning("%s cannot be started again yet: %s", child.node.name, error)
                    await asyncio.sleep(backoff.pause())
                    continue
                self.failure = PacelineError(f"{child.node.name} cannot be started: {error}")
                self.failed.set()
                break
            child.was_ready |= child.ready.is_set()
            child.ready.clear()
            if self._ends(child):
                break
            if not child.node.restart or not child.was_ready:
                self._fail(child, code)
                break
            child.restarts += 1
            why = _last_line(child.log) if code == 2 else _ending(code)  # its port may be taken, for a while
            log.warning("%s ended (%s) and is started again", child.node.name, why)
            await asyncio.sleep(backoff.pause())
        child.gone.set()

    def _ends(self, child: Child) -> bool:
        return self.leaving or child.stopping.is_set()

    async def _run_once(self, child: Child) -> int:
        with _NotifySocket() as notify, _open_log(child) as out:
            environment = {**os.environ, SUPERVISED: "1", "NOTIFY_SOCKET": notify.address}
            child.process = await asyncio.create_subprocess_exec(
                *child.node.command,
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=out,
                env=environment,
                start_new_session=True,
            )
            if self._ends(child):
                _signal(child, signal.SIGTERM)
            listening = asyncio.create_task(notify.listen(child))
            try:
                code = await child.process.wait()
                notify.drain(child)
                return code
            finally:
                listening.cancel()
                if child.process.returncode is None:  # cancelled: no orphan
                    _signal(child, signal.SIGKILL)

    def _fail(self, child: Child, code: int) -> None:
        last = _last_line(child.log)
        sentence = f"{child.node.name}: {last}" if last else f"{child.node.name} ended ({_ending(code)})"
        if code == 2:
            self.failure = UserError(sentence)
        else:
            self.failure = PacelineError(f"{sentence} ({_ending(code)}; log: {child.log})")
        self.failed.set()


async def first_of(*futures: asyncio.Future[Any], timeout: float | None = None) -> None:
    """Returns when one is done, or after `timeout` seconds."""
    await asyncio.wait(futures, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)


class _NotifySocket:
    """Where one child says that it is ready, and what its operator should know (STATUS=…)."""

    def __enter__(self) -> _NotifySocket:
        self.address = f"@paceline-{os.getpid()}-{secrets.token_hex(8)}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind("\0" + self.address[1:])
        self._socket.setblocking(False)
        return self

    def __exit__(self, *exc: object) -> None:
        self._socket.close()

    def drain(self, child: Child) -> None:
        """What a child said just before it ended."""
        with contextlib.suppress(BlockingIOError):
            while True:
                self._take(self._socket.recv(4096), child)

    @staticmethod
    def _take(message: bytes, child: Child) -> None:
        for line in message.decode(errors="replace").split("\n"):
            if line == "READY=1":
                child.ready.set()
            elif line.startswith("STATUS="):
                name = child.node.name
                log.info("%s: %s", name, line.removeprefix("STATUS=").removeprefix(f"{name} "))

    async def listen(self, child: Child) -> None:
        """Until cancelled: what a child says later is read too, so that it never finds the socket full."""
        loop = asyncio.get_running_loop()
        while True:
            self._take(await loop.sock_recv(self._socket, 4096), child)


def _open_log(child: Child) -> BinaryIO:
    """The child's log, at its end; a disk without room for one costs the log, not a child that ran before."""
    try:
        return child.log.open("ab")
    except OSError as error:
        if not child.was_ready:
            raise
        log.warning("%s: %s; what %s says is lost", child.log, error.strerror, child.node.name)
        return open(os.devnull, "ab")


def _signal(child: Child, number: signal.Signals) -> None:
    if child.process is not None and child.process.returncode is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.process.pid, number)


def _ending(code: int) -> str:
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _last_line(path: Path) -> str:
    with contextlib.suppress(OSError):
        lines = [line for line in path.read_text(errors="replace").splitlines() if line.strip()]
        return lines[-1].strip() if lines else ""
    return ""
