"""A bench mode with real processes on this machine: started afresh, warmed up, loaded, stopped."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import yaml

from paceline.bench import Job, Measured, Mode, Timed, check_room, in_use
from paceline.client import complete
from paceline.core.errors import PacelineError, UserError
from paceline.star import Star, running_star


async def measure(mode: Mode, job: Job, progress: Callable[[int], None] = lambda tokens: None) -> Measured:
    """Runs the load of every target to its end. progress: told of every token that is measured.

    UserError when a target refuses a request itself, PacelineError when a warm-up fails.
    """
    check_room(mode.topology, job)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "bench.yaml"
        path.write_text(yaml.safe_dump(mode.topology.model_dump(mode="json", exclude_unset=True)))
        async with running_star(mode.topology, path, Path(folder)) as star:
            async with AsyncExitStack() as stack:
                users = []
                for number, name in enumerate(mode.targets):
                    client = await stack.enter_async_context(star.client(name))
                    users.append(_Users(star, client, name, job, number, progress))
                await asyncio.gather(*(user.warm_up() for user in users))
                await asyncio.gather(*(user.run() for user in users))
            await star.settle()
            plans = [star.supervisor.status(name) for name in mode.targets]
        report = star.report([])
    accepted = [target["acceptance_length"] for target in report["targets"] if target["acceptance_length"] is not None]
    lanes, length = in_use(mode, job, [(plan.get("lanes", 1), plan.get("draft_length", 0)) for plan in plans])
    busy = [drafter["utilization"] for drafter in report["drafters"] if drafter["utilization"] is not None]
    return Measured(
        answers={user.target: user.answers for user in users},
        acceptance_length=sum(accepted) / len(accepted) if accepted else None,
        drafter_utilization=sum(busy) / len(busy) if busy else None,
        lanes=lanes,
        draft_length=length,
    )


class _Users:
    """Keeps a target's places taken."""

    def __init__(
        self, star: Star, client: httpx.AsyncClient, target: str, job: Job, number: int, progress: Callable[[int], None]
    ) -> None:
        self.target = target
        self.answers: list[Timed] = []
        self._star, self._client, self._job, self._number = star, client, job, number
        self._progress = progress
        self._next = 0

    async def warm_up(self) -> None:
        """As many requests as are in flight; nothing of them counts."""
        await asyncio.gather(*(self._ask(-1 - index, lambda tokens: None) for index in range(self._job.in_flight)))

    async def run(self) -> None:
        """The requests that are measured."""
        found: dict[int, Timed] = {}

        async def user() -> None:
            while self._next < self._job.requests:
                index, self._next = self._next, self._next + 1
                found[index] = await self._answer(index)

        await asyncio.gather(*(user() for _ in range(self._job.in_flight)))
        self.answers = [found[index] for index in sorted(found)]

    async def _answer(self, index: int) -> Timed:
        """One that fails is told with the others: it must not cost what they measured."""
        sent = time.monotonic()
        try:
            return await self._ask(index, self._progress)
        except UserError:
            raise
        except PacelineError as error:
            return Timed(sent, ended=time.monotonic(), error=str(error))

    async def _ask(self, index: int, progress: Callable[[int], None]) -> Timed:
        counts: list[int] = []

        def arrived(tokens: int) -> None:
            counts.append(tokens)
            progress(tokens)

        options: dict[str, Any] = {
            "max_tokens": self._job.max_tokens,
            "temperature": self._job.temperature,
            "seed": (self._number << 32) + index % (1 << 32),
            "ignore_eos": True,
            "stream_options": {"include_usage": True},
        }
        done = await complete(self._client, self._star.endpoint(self.target), self._job.prompt(index), options, arrived)
        arrivals = list(zip(done.arrivals, counts, strict=True))
        return Timed(done.sent, done.token_ids, arrivals, done.arrivals[-1], done.prompt_tokens)
