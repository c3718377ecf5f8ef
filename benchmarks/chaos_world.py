"""A star of real processes in which anything can be killed, stopped, cut off or slowed down.

Models are emulated (DESIGN §9), so a text is the same to the last token or something is wrong. A further target
without a drafter gives the plain answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chaos_fakes import NonsenseDrafter, nonsense_drafter
from chaos_load import now
from chaos_setup import (
    DEPLOYMENT,
    REFERENCE,
    Places,
    Setup,
    deployment_key,
    free_ports,
    jumping_clock,
    small_disk,
    write_topology,
)

from paceline.client import Endpoint
from paceline.core.errors import PacelineError
from paceline.topology.netem import LinkEmulator
from paceline.topology.netem_tun import TunPipe
from paceline.topology.supervisor import Node, Supervisor, node_command

BROKER = "broker"
STATUS_SECONDS = 0.1


@dataclass(frozen=True)
class Footprint:
    """What a process holds of the machine."""

    fds: int
    threads: int

    @classmethod
    def of(cls, pid: int) -> Footprint | None:
        """None when the process has gone."""
        try:
            return cls(len(os.listdir(f"/proc/{pid}/fd")), len(os.listdir(f"/proc/{pid}/task")))
        except OSError:
            return None


class World:
    """A running star. `async with World(setup) as world`.

    links: what emulates the network, by who is cut off with it: each drafter, over a broker also "targets".
    """

    def __init__(self, setup: Setup, brief: bool = True) -> None:
        self.setup = setup
        self.brief = brief  # faults last only as long as they must
        self.drafters = [f"drafter-{index}" for index in range(setup.drafters)]
        self.targets = [f"target-{index}" for index in range(setup.targets)]
        self.nodes = [*(() if setup.nonsense else self.drafters), *self.targets, REFERENCE]
        self.links: dict[str, LinkEmulator] = {}
        self.pipe: TunPipe | None = None
        self.fake: NonsenseDrafter | None = None
        self.endpoints: dict[str, Endpoint] = {}
        self.problems: list[str] = []  # of the scenario that is being played
        self._environment = [f"PACELINE_STATUS_SECONDS={STATUS_SECONDS}"]
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> World:
        try:
            folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="chaos-")))
            self.run_dir = folder / "run"
            self.run_dir.mkdir()
            if self.setup.small_disk:
                self._stack.enter_context(small_disk(self.run_dir))
            if self.setup.clock_jumps:
                self._environment.append(f"PYTHONPATH={jumping_clock(folder)}")
            places = await self._places(folder)
            files = {role: write_topology(folder, role, self.setup, places) for role in (BROKER, "drafter", "target")}
            self.supervisor = await self._stack.enter_async_context(Supervisor(self.run_dir))
            if self.setup.over_broker:
                self._environment.append(f"PACELINE_BROKER={self.setup.transport}")
                self._start(BROKER, BROKER, files[BROKER])
                await self.supervisor.wait_ready([BROKER])
            for name in self.nodes:
                role = "drafter" if name in self.drafters else "target"
                self._start(role, name, files[role])
            await self._ready()
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._wake()  # one that sleeps would not hear that it is to stop
        await self._stack.aclose()

    # --- making it

    async def _places(self, folder: Path) -> Places:
        """Addresses, with what emulates the network already in between."""
        ports = iter(free_ports(len(self.drafters) + len(self.targets) + 2))
        listen = {name: f"127.0.0.1:{next(ports)}" for name in self.drafters}
        places = Places(listen, {name: f"127.0.0.1:{next(ports)}" for name in [*self.targets, REFERENCE]})
        self.endpoints = {n: Endpoint(n, f"http://{at}/v1/completions", None) for n, at in places.api.items()}
        if self.setup.over_broker:
            places.broker = f"127.0.0.1:{next(ports)}"
            for role, name in (("drafter", "drafter-0"), ("target", "targets")):
                places.broker_dial[role] = await self._emulate(name, places.broker, framed=False)
        elif self.setup.namespace:
            self.pipe = await self._stack.enter_async_context(TunPipe())
            places.listen = {name: f"{self.pipe.inner}:{at.rpartition(':')[2]}" for name, at in listen.items()}
            places.security = deployment_key(folder)
        else:
            places.dial = {name: await self._emulate(name, at) for name, at in listen.items()}
        if self.setup.nonsense:
            fake = nonsense_drafter(DEPLOYMENT, self.drafters[0], listen[self.drafters[0]])
            self.fake = await self._stack.enter_async_context(fake)
        return places

    async def _emulate(self, name: str, address: str, framed: bool = True) -> str:
        link = LinkEmulator(address, framed=framed, seed=len(self.links))
        self.links[name] = await self._stack.enter_async_context(link)
        return link.address

    def _start(self, role: str, name: str, topology: Path) -> None:
        prefix = self.pipe.command if self.pipe is not None and role == "drafter" else ()
        named = None if role == BROKER else name
        command = (*prefix, "env", *self._environment, *node_command(role, topology, named, self.run_dir))
        self.supervisor.start(Node(name, command, restart=True))

    async def _ready(self) -> None:
        """Every node serves, every target has its drafters."""
        heard = [name for name in self.nodes if not (self.setup.namespace and name in self.drafters)]
        await self.supervisor.wait_ready(heard)
        await self.until(self._linked, "every target to have its drafters", 20.0)
        if not self._linked():
            raise PacelineError("the targets found no drafters")

    def _linked(self) -> bool:
        return all(all(self.status(name).get("drafters", {"": False}).values()) for name in self.targets)

    # --- looking

    def pid(self, name: str) -> int:
        pid = self.supervisor.children[name].pid
        assert pid is not None
        return pid

    def status(self, name: str) -> dict[str, Any]:
        return self.supervisor.status(name)

    def logged(self, name: str, words: str) -> Callable[[], bool]:
        """A test whether a node has said so since now."""
        path = self.run_dir / f"{name}.log"
        before = path.read_text(errors="replace").count(words)
        return lambda: path.read_text(errors="replace").count(words) > before

    def live_sessions(self) -> int:
        """At both ends, as the last status files say; a node without one counts as one."""
        return sum(self.status(name).get("live_sessions", 1) for name in self.nodes)

    def footprints(self) -> dict[str, Footprint]:
        found = {name: Footprint.of(self.pid(name)) for name in self.supervisor.children}
        return {name: footprint for name, footprint in found.items() if footprint is not None}

    def drafted_rounds(self, target: str) -> tuple[int, int]:
        """(pid, rounds that verified a draft): grows while the target speculates."""
        status = self.status(target)
        return status.get("pid", 0), status.get("drafted_rounds", 0)

    def drafted_tokens(self, drafter: str) -> int:
        """Of its present process; 0 as long as that has written no status."""
        status = self.status(drafter)
        return int(status["tokens_drafted"]) if status.get("pid") == self.pid(drafter) else 0

    async def until(self, holds: Callable[[], Any], what: str, seconds: float = 15.0) -> float:
        """Seconds until it held; a problem of this scenario, and `seconds`, when it never did."""
        started = now()
        while not holds():
            if now() - started > seconds:
                self.problems.append(f"waited {seconds:g} s for {what}")
                return seconds
            await asyncio.sleep(0.01)
        return now() - started

    async def fresh_statuses(self, names: Sequence[str]) -> None:
        """Returns once each of them has written a status file from now on."""
        paths = [self.run_dir / f"{name}.json" for name in names]
        before = [_written_at(path) for path in paths]
        await self.until(
            lambda: all(_written_at(path) != at for path, at in zip(paths, before, strict=True)), "a new status of each"
        )

    # --- what can be done to it

    def signal(self, name: str, number: signal.Signals) -> None:
        os.kill(self.pid(name), number)

    async def restart(self, name: str, number: signal.Signals) -> None:
        """Ends a process and returns as soon as the supervisor's next one is ready."""
        child = self.supervisor.children[name]
        before = child.restarts
        self.signal(name, number)
        await self.until(lambda: child.restarts > before and child.ready.is_set(), f"{name} to come back", 30.0)

    async def freeze(self, name: str, seconds: float) -> None:
        """SIGSTOP, and SIGCONT later."""
        self.signal(name, signal.SIGSTOP)
        try:
            await asyncio.sleep(seconds)
        finally:
            self.signal(name, signal.SIGCONT)

    async def recover(self) -> None:
        """Ends every fault, and waits until the star is whole again."""
        for link in self.links.values():
            link.clear()
        self._wake()
        await self._ready()

    def _wake(self) -> None:
        for name in self.supervisor.children:
            with contextlib.suppress(ProcessLookupError):
                self.signal(name, signal.SIGCONT)

    def expect(self, holds: bool, sentence: str) -> None:
        """What a scenario itself promises."""
        if not holds:
            self.problems.append(sentence)

    @contextlib.asynccontextmanager
    async def full_disk(self) -> AsyncIterator[None]:
        """Not a byte is left where status files and logs go."""
        filler = self.run_dir / "filler"
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        try:
            yield
        finally:
            filler.unlink()


def _written_at(path: Path) -> tuple[int, int]:
    with contextlib.suppress(OSError):
        about = path.stat()
        return about.st_mtime_ns, about.st_ino
    return 0, 0
