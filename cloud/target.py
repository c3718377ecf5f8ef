"""The target's process: one engine thread, and an asyncio loop for users, drafters and the status file."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import anyio

from paceline import __version__
from paceline.cloud.api.app import create_app
from paceline.cloud.api.dispatch import Dispatch
from paceline.cloud.api.service import CompletionService
from paceline.cloud.api.serving import bind, serve
from paceline.cloud.drafting import DraftingConfig
from paceline.cloud.engine import Engine, EngineConfig
from paceline.cloud.events import Arrived, LinkDown, LinkUp, Room, Stop
from paceline.core.emulated import Pace, ToyLanguage, ToyModel, toy_vocabulary
from paceline.core.errors import PacelineError
from paceline.core.model import PackedModel
from paceline.core.vocabulary import Vocabulary
from paceline.topology.connection import DrafterConnection
from paceline.topology.handshake import Identity
from paceline.topology.links.base import Transport
from paceline.topology.peer import Peer
from paceline.topology.process import StatusFile, load_or_stop, settle_runtime
from paceline.topology.spec import DrafterSpec, Profile, TargetSpec, Topology
from paceline.topology.tls import api_files
from paceline.topology.wire import Drafted, Error, Hello, Message, Pong, Welcome

log = logging.getLogger(__name__)

STOP_GRACE_SECONDS = 2.0
MAX_UNREAD = 256  # answers of one drafter that the engine has not looked at


class TargetLinks:
    """Turns what happens on the links into events of the engine.

    A drafter that answers faster than the engine can read, or of more sessions than there are, loses its link:
    a flood must cost the flooder and nobody else.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._put: dict[str, int] = {}

    def on_up(self, peer: Peer, greeting: Hello | Welcome) -> None:
        assert isinstance(greeting, Welcome)
        self._put[peer.name] = self._handled(peer)
        self._engine.inbox.put(LinkUp(peer.name, greeting, peer.send))

    def on_message(self, peer: Peer, message: Message) -> None:
        if isinstance(message, Pong):
            self._engine.inbox.put(Room(peer.name, message.free_sessions))
        if not isinstance(message, Drafted) or not peer.up:
            return
        self._put[peer.name] += 1
        unread = self._put[peer.name] - self._handled(peer)
        if unread > MAX_UNREAD or len(message.items) > self._engine.config.max_sessions:
            fields = {"event": "flood", "drafter": peer.name, "address": peer.address}
            log.warning("drafter %s floods this target with answers; its link is closed", peer.name, extra=fields)
            peer.close(Error("flood", "more answers than were asked for"))
            return
        self._engine.inbox.put(Arrived(peer.name, message))

    def on_down(self, peer: Peer, reason: str) -> None:
        self._engine.inbox.put(LinkDown(peer.name))

    def _handled(self, peer: Peer) -> int:
        """Answers of the drafter that the engine has looked at; it may not know a new drafter yet."""
        drafter = self._engine.drafting.drafters.get(peer.name)
        return drafter.handled if drafter is not None else 0


async def run_target(
    topology: Topology,
    spec: TargetSpec,
    transport: Transport,
    *,
    key: bytes = b"",
    run_dir: Path | None = None,
    with_drafters: bool = True,
    ready: Callable[[], None],
    stop: anyio.Event,
) -> None:
    """Serves until `stop`. UserError when the model, the port or the key is not to be had."""
    listen = str(spec.api.listen)
    bind(listen).close()  # before minutes are spent on a model
    certificate = api_files(topology.security, spec)
    loaded = await load_or_stop(stop, f"load {spec.name}", lambda: load_target(spec))
    if loaded is None:
        return
    settle_runtime()
    model, vocabulary = loaded
    drafters = topology.drafters_of(spec) if with_drafters else ()
    dispatch = Dispatch()
    token_bytes = [
        b"" if token in vocabulary.special_ids else data for token, data in enumerate(vocabulary.token_bytes)
    ]
    engine = Engine(model, token_bytes, _engine_config(spec, drafters), dispatch.publish)
    service = CompletionService(engine, vocabulary, dispatch, max_queued=4 * spec.max_sessions)
    app = create_app(service, spec.name, api_key=_api_key(spec))
    about = f"paceline {__version__}"
    identity = Identity(topology.name, spec.name, key, vocabulary.identity, software=about, model=spec.model)
    links = TargetLinks(engine)
    connections = [
        DrafterConnection(
            transport,
            topology.link_address(drafter, spec),
            identity,
            links,
            partial(engine.drafting.live, drafter.name),
            drafter=drafter.name,
        )
        for drafter in drafters
    ]
    thread = threading.Thread(target=_run_engine, args=(engine, asyncio.get_running_loop(), stop), name=spec.name)
    thread.start()
    try:
        async with anyio.create_task_group() as tasks:
            for connection in connections:
                tasks.start_soon(connection.run)
            status = StatusFile(run_dir, "target", spec.name)
            async with serve(app, listen, grace=STOP_GRACE_SECONDS, certificate=certificate) as url:
                tasks.start_soon(status.keep, lambda: _snapshot(engine, connections))
                log.info("target %s serves %s", spec.name, url, extra={"event": "ready", "target": spec.name})
                ready()
                await stop.wait()
                status.write("stopping", _snapshot(engine, connections))
                service.close()
            tasks.cancel_scope.cancel()
    finally:
        engine.inbox.put(Stop())
        thread.join()
    status.write("stopped", _snapshot(engine, connections))
    if engine.failure is not None:
        raise PacelineError(f"target {spec.name}: {engine.failure}") from engine.failure


def _engine_config(spec: TargetSpec, drafters: Sequence[DrafterSpec]) -> EngineConfig:
    drafting = DraftingConfig(
        drafters=tuple(drafter.name for drafter in drafters),
        draft_length=int(spec.draft_length),
        deadline=spec.deadline,
        policy=spec.drafters.policy,
    )
    return EngineConfig(int(spec.lanes), spec.max_sessions, spec.prefill_chunk, drafting)


def _api_key(spec: TargetSpec) -> str | None:
    return None if spec.api.key_file is None else Path(spec.api.key_file).read_text().strip()


def _snapshot(engine: Engine, connections: Sequence[DrafterConnection]) -> dict[str, Any]:
    """For the status file."""
    return {
        **engine.statistics.snapshot(),
        "live_sessions": engine.live_sessions,
        "queued": engine.queued,
        "drafters": {name: drafter.up for name, drafter in engine.drafting.drafters.items()},
        "sessions_at": {name: len(engine.drafting.live(name)) for name in engine.drafting.drafters},
        "suspect": [name for name, drafter in engine.drafting.drafters.items() if drafter.suspect],
        "link_trouble": {c.drafter: c.trouble for c in connections if c.trouble},
        "rtt_ms": {c.peer.name: c.rtt * 1000.0 for c in connections if c.peer and c.rtt is not None},
    }


def _run_engine(engine: Engine, loop: asyncio.AbstractEventLoop, stop: anyio.Event) -> None:
    """The engine's thread; a model that fails takes the process down, so that it is started afresh."""
    engine.run()
    if engine.failure is not None:
        loop.call_soon_threadsafe(stop.set)


def load_target(spec: TargetSpec) -> tuple[PackedModel, Vocabulary]:
    """The target's model and its tokenizer."""
    if spec.engine == "emulated":
        profile = spec.profile or Profile()
        language = ToyLanguage(profile.vocabulary_size, profile.seed)
        pace = Pace(tokens=profile.verify_ms)
        slots = spec.max_sessions * spec.max_context
        model = ToyModel(language, max_context=spec.max_context, kv_slots=slots, pace=pace)
        return model, toy_vocabulary(profile.vocabulary_size)
    from paceline.core.lm.loading import load, local_folder

    vocabulary = Vocabulary.load(local_folder(spec.tokenizer or spec.model))
    return load(
        spec.model,
        device=spec.device,
        dtype=spec.dtype,
        threads=spec.threads,
        kv_memory=spec.kv_memory,
        kv_slots=None if spec.kv_memory else spec.max_sessions * spec.max_context,
        max_context=spec.max_context,
    ), vocabulary
