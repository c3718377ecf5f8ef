"""The users of a chaos run: requests with known answers, sent without a pause while things go wrong."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import httpx

from paceline.client import Completion, Endpoint, complete
from paceline.core.errors import PacelineError


@dataclass(frozen=True)
class Request:
    """A prompt and how to sample; frozen, so that its answer can be looked up."""

    prompt: str
    max_tokens: int
    temperature: float
    seed: int

    @property
    def options(self) -> dict[str, Any]:
        return {"max_tokens": self.max_tokens, "temperature": self.temperature, "seed": self.seed}


@dataclass(frozen=True)
class Answer:
    """What came back. seconds: in all; longest_gap: between two pieces, or before the first; gap_at: when it began."""

    request: Request
    target: str
    token_ids: tuple[int, ...]
    text: str
    seconds: float
    longest_gap: float
    gap_at: float


def random_request(random: Random, tokens: tuple[int, int] = (40, 160)) -> Request:
    """Greedy and sampled ones in turn of a coin."""
    prompt = "".join(random.choice("abcdefghij klm") for _ in range(random.randint(3, 60)))
    return Request(prompt, random.randint(*tokens), random.choice((0.0, 0.8)), random.randrange(2**32))


async def ask(client: httpx.AsyncClient, endpoint: Endpoint, request: Request) -> Answer:
    """Streams one answer; PacelineError when the target cannot serve it or breaks off."""
    done = await complete(client, endpoint, request.prompt, request.options)
    return _answer(request, done)


def _answer(request: Request, done: Completion) -> Answer:
    times = [done.sent, *done.arrivals]
    gap, gap_at = max(((later - sooner, sooner) for sooner, later in itertools.pairwise(times)), default=(0.0, 0.0))
    return Answer(request, done.target, tuple(done.token_ids), done.text, times[-1] - times[0], gap, gap_at)


def differing(answer: Answer, plain: Answer) -> int:
    """Tokens that are not those of the plain run; a text that differs although its ids agree counts as one."""
    pairs = itertools.zip_longest(answer.token_ids, plain.token_ids)
    return sum(a != b for a, b in pairs) or int(answer.text != plain.text)


class Reference:
    """The plain run: a target without a drafter, asked once for each request."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.answers: dict[Request, Answer] = {}

    async def prepare(self, requests: Sequence[Request]) -> None:
        """Answers all that are new, at once."""
        async with plain_client() as client:
            for answer in await asyncio.gather(
                *(ask(client, self.endpoint, one) for one in requests if one not in self.answers)
            ):
                self.answers[answer.request] = answer

    def __getitem__(self, request: Request) -> Answer:
        return self.answers[request]


@dataclass
class Load:
    """Workers that send requests over and over. `async with` starts them; the end of the block lets each finish."""

    endpoints: Sequence[Endpoint]
    requests: Sequence[Request]
    workers: int = 3  # of each target
    impatience: float = 0.0  # the chance that a client leaves in the middle of its answer
    random: Random = field(default_factory=lambda: Random(0))
    answers: list[Answer] = field(default_factory=list)
    failed: list[tuple[str, str]] = field(default_factory=list)  # target, what its client was told
    left: int = 0  # clients that went away
    _stop: asyncio.Event = field(default_factory=asyncio.Event)
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)

    async def __aenter__(self) -> Load:
        places = [endpoint for endpoint in self.endpoints for _ in range(self.workers)]
        offsets = range(0, len(self.requests), max(1, len(self.requests) // len(places)))
        self._tasks = [
            asyncio.create_task(self._work(endpoint, offset))
            for endpoint, offset in zip(places, itertools.cycle(offsets), strict=False)
        ]
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._stop.set()
        await asyncio.gather(*self._tasks)

    async def _work(self, endpoint: Endpoint, offset: int) -> None:
        """One user: the next request as soon as the last has its answer."""
        rotated = itertools.cycle((*self.requests[offset:], *self.requests[:offset]))
        async with plain_client() as client:
            while not self._stop.is_set():
                await self._one(client, endpoint, next(rotated))

    async def _one(self, client: httpx.AsyncClient, endpoint: Endpoint, request: Request) -> None:
        try:
            if self.random.random() < self.impatience:
                await self._leave_early(client, endpoint, request)
            else:
                self.answers.append(await ask(client, endpoint, request))
        except PacelineError as error:
            self.failed.append((endpoint.target, str(error)))
            await asyncio.sleep(0.05)

    async def _leave_early(self, client: httpx.AsyncClient, endpoint: Endpoint, request: Request) -> None:
        """Closes the connection in the middle of the stream, or before its first piece."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(ask(client, endpoint, request), self.random.uniform(0.0, 0.3))
        self.left += 1


def plain_client() -> httpx.AsyncClient:
    """Without limits of its own; what takes too long is for the checks to see."""
    return httpx.AsyncClient(timeout=60.0, limits=httpx.Limits(max_connections=None), trust_env=False)


def now() -> float:
    return time.monotonic()
