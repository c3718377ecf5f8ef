"""A whole topology on this machine for the length of a block: start, use over HTTP, stop, count.

`paceline run`, the benchmarks and the tests of real processes all stand on this.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import httpx

from paceline.client import Completion, Endpoint, complete
from paceline.core.errors import PacelineError
from paceline.deployment import nodes_here
from paceline.ports import require_free
from paceline.topology.credentials import api_url
from paceline.topology.spec import Topology
from paceline.topology.spec_checks import BROKER
from paceline.topology.supervisor import Supervisor, first_of
from paceline.topology.tls import api_client_context

SETTLE_SECONDS = 3.0


class Star:
    """Running nodes. Made by `running_star`."""

    def __init__(self, topology: Topology, supervisor: Supervisor, drafters: Sequence[str]) -> None:
        self.topology = topology
        self.supervisor = supervisor
        self.drafters = list(drafters)
        self.targets = [target.name for target in topology.targets]

    async def complete(
        self,
        prompts: Sequence[str | list[int]],
        options: dict[str, Any],
        progress: Callable[[int], None] = lambda tokens: None,
        targets: Sequence[str] | None = None,
    ) -> list[Completion]:
        """Sends all prompts at once, spread over the targets in turn; answers in the prompts' order."""
        names = list(targets or self.targets)
        async with contextlib.AsyncExitStack() as stack:
            clients = {name: await stack.enter_async_context(self.client(name)) for name in dict.fromkeys(names)}
            calls = [
                complete(clients[name], self.endpoint(name), prompt, options, progress)
                for prompt, name in zip(prompts, itertools.cycle(names), strict=False)
            ]
            everything: asyncio.Future[list[Completion]] = asyncio.gather(*calls)
            failed = asyncio.create_task(self.supervisor.failed.wait())
            try:
                await first_of(everything, failed)
                if not everything.done():
                    self.supervisor.check()
                return await everything
            finally:
                failed.cancel()
                everything.cancel()
                with contextlib.suppress(asyncio.CancelledError, PacelineError):
                    await everything

    def client(self, name: str) -> httpx.AsyncClient:
        """A client that believes the certificate of that target, where it has one, and no other."""
        trust = api_client_context(self.topology.security, self.topology.target(name))
        limits = httpx.Limits(max_connections=None)
        return httpx.AsyncClient(timeout=None, limits=limits, trust_env=False, verify=trust)

    def endpoint(self, name: str) -> Endpoint:
        """Where this machine finds a target's API, and what it wants to be shown."""
        target = self.topology.target(name)
        key = target.api.key_file.read_text().strip() if target.api.key_file is not None else None
        return Endpoint(name, f"{api_url(self.topology.security, target)}/completions", key)

    async def linked(self) -> None:
        """Waits until every target has a link to its drafters, for a few seconds at the most; it serves without."""
        await self._until(lambda status: all(status.get("drafters", {"": False}).values()), self.targets)

    def warnings(self) -> list[str]:
        """Drafters that a target could not use, with the reason; the texts are right all the same."""
        found = []
        for name in self.targets:
            for drafter, reason in self.supervisor.status(name).get("link_trouble", {}).items():
                found.append(f"{name} decoded without {drafter}: {reason}")
        return found

    async def settle(self) -> None:
        """Waits until every node's status says that no session is live, for a few seconds at the most."""
        await self._until(lambda status: status.get("live_sessions") == 0, [*self.targets, *self.drafters])

    async def _until(self, holds: Callable[[dict[str, Any]], bool], names: Sequence[str]) -> None:
        """Until status files written from now on all say so, or SETTLE_SECONDS have passed."""
        asked, deadline = time.time(), time.monotonic() + SETTLE_SECONDS
        while time.monotonic() < deadline:
            states = [self.supervisor.status(name) for name in names]
            if all(state.get("time", 0.0) > asked and holds(state) for state in states):
                return
            await asyncio.sleep(0.05)

    async def stop(self) -> None:
        """Targets first, so that drafters see them leave; a broker last."""
        children = self.supervisor.children
        last = [*self.drafters, BROKER]
        await self.supervisor.stop([name for name in children if name not in last])
        for later in (self.drafters, [BROKER]):
            await self.supervisor.stop([name for name in children if name in later])

    def report(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """What `run --json` prints."""
        return {
            "outputs": [completion.report() for completion in completions],
            "targets": [self._target(name, completions) for name in self.targets],
            "drafters": [self._drafter(name) for name in self.drafters],
        }

    def _target(self, name: str, completions: Sequence[Completion]) -> dict[str, Any]:
        status = self.supervisor.status(name)
        mine = [completion for completion in completions if completion.target == name and completion.arrivals]
        seconds = max((c.arrivals[-1] for c in mine), default=0.0) - min((c.sent for c in mine), default=0.0)
        tokens = sum(len(completion.token_ids) for completion in mine)
        return {
            "name": name,
            "verification": self.topology.target(name).verification,
            "tokens_per_s": tokens / seconds if seconds > 0 else 0.0,
            "acceptance_length": status.get("acceptance_length"),
            "rounds": status.get("rounds"),
            "fallback_rounds": status.get("fallback_rounds"),
            "draft_ahead": status.get("draft_ahead"),
            "live_sessions_at_end": status.get("live_sessions"),
            "verify_ms": status.get("verify_ms"),
        }

    def _drafter(self, name: str) -> dict[str, Any]:
        status = self.supervisor.status(name)
        counted = ("utilization", "sessions_peak", "queue_ms", "draft_ms", "bytes_in", "bytes_out")
        return {
            "name": name,
            "live_sessions_at_end": status.get("live_sessions"),
            "restarts": self.supervisor.children[name].restarts if name in self.supervisor.children else 0,
            **{key: status.get(key) for key in counted},
        }


@contextlib.asynccontextmanager
async def running_star(
    topology: Topology,
    topology_file: Path,
    run_dir: Path,
    *,
    with_drafters: bool = True,
    late_drafters: bool = False,
) -> AsyncIterator[Star]:
    """Starts every node here and waits until all are ready. With `late_drafters` the caller starts those."""
    drafters, targets = nodes_here(topology, topology_file, run_dir, with_drafters=with_drafters, everything=True)
    names = [drafter.name for drafter in topology.drafters] if with_drafters else []
    require_free(topology, with_drafters=with_drafters)
    async with Supervisor(run_dir) as supervisor:
        star = Star(topology, supervisor, names)
        started = targets if late_drafters else [*drafters, *targets]
        for node in started:
            supervisor.start(node)
        await supervisor.wait_ready([node.name for node in started])
        if names and not late_drafters:
            await star.linked()
        try:
            yield star
        finally:
            await star.stop()
