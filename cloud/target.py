"""The target's process: one engine thread, and an asyncio loop for users, drafters and the status file."""

from __future__ import annotations

import asyncio
import logging
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import anyio
from fastapi import FastAPI

from paceline import __version__
from paceline.cloud.api.app import create_app
from paceline.cloud.api.dispatch import Dispatch
from paceline.cloud.api.service import CompletionService
from paceline.cloud.api.serving import bind, serve
from paceline.cloud.drafting import DraftingConfig
from paceline.cloud.engine import Engine, EngineConfig
from paceline.cloud.events import Reconfigure, Stop
from paceline.cloud.links import Connections, TargetLinks
from paceline.core.clock import Clock
from paceline.core.emulated import Pace, ToyLanguage, ToyModel, toy_vocabulary
from paceline.core.errors import PacelineError, UserError
from paceline.core.manifest import check_tokenizer
from paceline.core.model import PackedModel
from paceline.core.vocabulary import Vocabulary
from paceline.topology.changes import changed, log_reload, pending, with_sections_of
from paceline.topology.connection import DrafterConnection
from paceline.topology.handshake import Identity
from paceline.topology.key_checks import read_api_key
from paceline.topology.links.base import Transport
from paceline.topology.orders import Orders, any_of
from paceline.topology.process import StatusFile, load_or_stop, settle_runtime
from paceline.topology.spec import DrafterSpec, Profile, TargetSpec, Topology
from paceline.topology.tls import api_context, api_files
from paceline.topology.transports import renew_transport

log = logging.getLogger(__name__)

STOP_GRACE_SECONDS = 2.0
# What a running target takes over from its topology; its weight is for its drafters to take over.
RELOADED = frozenset({"draft_length", "draft_ahead", "lanes", "deadline", "prefill_chunk", "drain", "weight"})
RELOADED |= {"verify_budget", "api.key_file", "drafters.names", "drafters.policy"}


async def run_target(
    topology: Topology,
    spec: TargetSpec,
    transport: Transport,
    *,
    key: bytes = b"",
    run_dir: Path | None = None,
    with_drafters: bool = True,
    ready: Callable[[], None],
    orders: Orders,
) -> None:
    """Serves until it is told to stop. UserError when the model, the port or the key is not to be had.

    Then it drains: requests that run have `drain` seconds to end, all others are answered 503 meanwhile.
    """
    listen = str(spec.api.listen)
    bind(listen).close()  # before minutes are spent on a model
    https = api_context(api_files(topology, spec))
    api_key = _api_key(spec)
    loaded = await load_or_stop(orders.stop, f"load {spec.name}", lambda: load_target(spec))
    if loaded is None:
        return
    settle_runtime()
    model, vocabulary = loaded
    drafters = topology.drafters_of(spec) if with_drafters else ()
    dispatch = Dispatch()
    token_bytes = [
        b"" if token in vocabulary.special_ids else data for token, data in enumerate(vocabulary.token_bytes)
    ]
    engine = Engine(model, token_bytes, engine_config(spec, drafters), dispatch.publish)
    service = CompletionService(engine, vocabulary, dispatch, max_queued=4 * spec.max_sessions)
    app = create_app(service, spec.name, api_key=api_key)
    about = f"paceline {__version__}"
    identity = Identity(topology.name, spec.name, key, vocabulary.identity, software=about, model=spec.model)
    links = TargetLinks(engine)

    def connect(name: str, address: str) -> DrafterConnection:
        return DrafterConnection(transport, address, identity, links, partial(engine.drafting.live, name), drafter=name)

    arguments = (engine, asyncio.get_running_loop(), orders.stop)
    thread = threading.Thread(target=_run_engine, args=arguments, name=spec.name)
    thread.start()
    status = StatusFile(run_dir, "target", spec.name)
    try:
        async with anyio.create_task_group() as tasks:
            connections = Connections(tasks, connect)
            service.link_trouble = connections.trouble
            running = _Running(topology, spec, engine, transport, connections, app, https, with_drafters)
            running.connect(topology, drafters)
            async with serve(app, listen, grace=STOP_GRACE_SECONDS, tls=https) as url:
                tasks.start_soon(status.keep, lambda: _snapshot(engine, connections))
                log.info("target %s serves %s", spec.name, url, extra={"event": "ready", "target": spec.name})
                orders.follow(running.renew)
                ready()
                await orders.stop.wait()
                status.state = "stopping"
                status.write("stopping", _snapshot(engine, connections))
                await _drain(service, orders, running.spec.drain)
            tasks.cancel_scope.cancel()
    finally:
        engine.inbox.put(Stop())
        thread.join()
    status.write("stopped", _snapshot(engine, connections))
    if engine.failure is not None:
        raise PacelineError(f"target {spec.name}: {engine.failure}") from engine.failure


async def _drain(service: CompletionService, orders: Orders, seconds: float) -> None:
    """What runs has so long to end, or until the second order."""
    started = time.monotonic()
    running, waiting = service.engine.live_sessions, service.engine.queued
    words = "no request is running"
    if running:
        refuses = f" and refuses {waiting} in the queue" if waiting else ""
        words = f"waits up to {seconds:g} s for {_requests(running)}{refuses}; a second signal ends it at once"
    log.info("stopping: %s", words, extra={"event": "stopping", "running": running, "queued": waiting})
    await any_of(service.drain, orders.end.wait, seconds=seconds)
    if cut := service.open_requests:
        took = time.monotonic() - started
        log.warning("cut %s after %.0f s", _requests(cut), took, extra={"event": "drained", "cut": cut})
    else:
        log.info("all requests have ended", extra={"event": "drained", "cut": 0})
    service.close()


def _requests(count: int) -> str:
    return "1 request" if count == 1 else f"{count} requests"


@dataclass
class _Running:
    """A target that runs. spec: its section as last read; it was started with that of `started`."""

    started: Topology
    spec: TargetSpec
    engine: Engine
    transport: Transport
    connections: Connections
    app: FastAPI
    https: ssl.SSLContext | None
    with_drafters: bool

    def renew(self, topology: Topology) -> None:
        """Takes over what a running target can. UserError, and nothing is changed, when it cannot be used."""
        name = self.spec.name
        spec = next((target for target in topology.targets if target.name == name), None)
        if spec is None:
            raise UserError(f"target {name} is no longer in the topology")
        key = _api_key(spec)
        certificates = self._renew_certificates(topology)
        done = [name for name in changed(self.spec, spec) if name in RELOADED]
        if key != self.app.state.api_key:
            done.append("the API key")
        self.spec, self.app.state.api_key = spec, key
        drafters = topology.drafters_of(spec) if self.with_drafters else ()
        self._reconfigure(drafters)
        self.connect(topology, drafters)
        later = pending((self.started, self.started.target(name)), (topology, spec), RELOADED)
        log_reload(name, done, later, certificates=certificates)

    def _renew_certificates(self, topology: Topology) -> bool:
        """From the files that this target was started with; whether there are any is decided at a start."""
        own = self.started.target(self.spec.name)
        files = api_files(self.started, own)
        api_context(files)  # in order
        any_of_links = renew_transport(self.transport, with_sections_of(self.started, topology), own.name)
        if self.https is not None and files is not None:
            self.https.load_cert_chain(*files)
        return any_of_links or self.https is not None

    def connect(self, topology: Topology, drafters: Sequence[DrafterSpec]) -> None:
        """Dials these drafters, and lets go of others."""
        self.connections.keep({drafter.name: topology.link_address(drafter, self.spec) for drafter in drafters})

    def _reconfigure(self, drafters: Sequence[DrafterSpec]) -> None:
        """The engine must know of a drafter before its link comes up."""
        fresh, running = engine_config(self.spec, drafters), self.engine.config
        drafting = replace(fresh.drafting, verification=running.drafting.verification)  # it needs links with a key
        config = replace(running, prefill_chunk=fresh.prefill_chunk, drafting=drafting)
        self.engine.inbox.put(Reconfigure(config))


def engine_config(spec: TargetSpec, drafters: Sequence[DrafterSpec]) -> EngineConfig:
    drafting = DraftingConfig(
        drafters=tuple(drafter.name for drafter in drafters),
        draft_length=None if spec.draft_length == "auto" else spec.draft_length,
        deadline=spec.deadline,
        policy=spec.drafters.policy,
        verification=spec.verification,
        draft_ahead=spec.draft_ahead,
        verify_budget=spec.verify_budget,
        target=spec.name,
    )
    return EngineConfig(None if spec.lanes == "auto" else spec.lanes, spec.max_sessions, spec.prefill_chunk, drafting)


def _api_key(spec: TargetSpec) -> str | None:
    return read_api_key(spec.api.key_file) if spec.api.key_file is not None else None


def _snapshot(engine: Engine, connections: Connections) -> dict[str, Any]:
    """For the status file."""
    ahead = engine.drafting.ahead
    return {
        **engine.statistics.snapshot(),
        "verification": engine.config.drafting.verification,
        "live_sessions": engine.live_sessions,
        "queued": engine.queued,
        "drafters": {name: drafter.up for name, drafter in engine.drafting.drafters.items()},
        "lanes": engine.controller.plan.lanes,
        "draft_length": engine.controller.plan.draft_length if engine.drafting.drafters else 0,
        "draft_ahead": {"rounds": ahead.rounds, "hits": ahead.hits, "late": ahead.late, "hit_rate": ahead.hit_rate},
        "sessions_at": {name: len(engine.drafting.live(name)) for name in engine.drafting.drafters},
        "suspect": [name for name, drafter in engine.drafting.drafters.items() if drafter.suspect],
        "link_trouble": connections.trouble(),
        "rtt_ms": {c.peer.name: c.rtt * 1000.0 for c in connections if c.peer and c.rtt is not None},
    }


def _run_engine(engine: Engine, loop: asyncio.AbstractEventLoop, stop: anyio.Event) -> None:
    """The engine's thread; a model that fails takes the process down, so that it is started afresh."""
    engine.run()
    if engine.failure is not None:
        loop.call_soon_threadsafe(stop.set)


def load_target(spec: TargetSpec, clock: Clock | None = None) -> tuple[PackedModel, Vocabulary]:
    """The target's model and its tokenizer. clock: what an emulated model takes its time on; default the real one."""
    if spec.engine == "emulated":
        profile = spec.profile or Profile()
        language = ToyLanguage(profile.vocabulary_size, profile.seed)
        pace = Pace(tokens=profile.verify_ms)
        slots = spec.max_sessions * spec.max_context
        model = ToyModel(language, max_context=spec.max_context, kv_slots=slots, pace=pace, clock=clock)
        return model, toy_vocabulary(profile.vocabulary_size)
    from paceline.core.lm.loading import load, local_folder

    tokenizer = local_folder(spec.tokenizer or spec.model)
    vocabulary = Vocabulary.load(tokenizer)
    check_tokenizer(local_folder(spec.model), tokenizer, vocabulary.identity)
    return load(
        spec.model,
        device=spec.device,
        dtype=spec.dtype,
        threads=spec.threads,
        kv_memory=spec.kv_memory,
        kv_slots=None if spec.kv_memory else spec.max_sessions * spec.max_context,
        max_context=spec.max_context,
        role="target",
    ), vocabulary
