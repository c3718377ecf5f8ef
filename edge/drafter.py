"""The drafter's process: one service thread, and an asyncio loop for targets and the status file."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import anyio

from paceline import __version__
from paceline.core.clock import RealClock
from paceline.core.errors import PacelineError
from paceline.core.vocabulary import Vocabulary, VocabularyIdentity
from paceline.edge.events import Limits, PeerDown, PeerUp, Received, Stop
from paceline.edge.service import DrafterService
from paceline.edge.strategies.base import Strategy
from paceline.topology.handshake import Identity
from paceline.topology.links.base import Transport
from paceline.topology.peer import Peer
from paceline.topology.process import StatusFile, load_or_stop, settle_runtime
from paceline.topology.server import DrafterServer
from paceline.topology.spec import DrafterSpec, Topology
from paceline.topology.wire import MAX_DRAFT_LENGTH, Hello, Message, Welcome

log = logging.getLogger(__name__)

MANY = 1 << 16


class Loaded(NamedTuple):
    """A strategy and the vocabulary it speaks; None for one that proposes whatever ids it is shown."""

    strategy: Strategy
    vocabulary: VocabularyIdentity | None


async def run_drafter(
    topology: Topology,
    spec: DrafterSpec,
    transport: Transport,
    *,
    key: bytes = b"",
    run_dir: Path | None = None,
    ready: Callable[[], None],
    stop: anyio.Event,
) -> None:
    """Serves until `stop`. UserError when the model or the port is not to be had."""
    loaded: Loaded | None = await load_or_stop(stop, f"load {spec.name}", lambda: load_strategy(spec))
    if loaded is None:
        return
    settle_runtime()
    strategy = loaded.strategy
    identity = Identity(
        topology.name,
        spec.name,
        key,
        loaded.vocabulary,
        software=f"paceline {__version__}",
        model=spec.model or "",
        strategy=spec.strategy,
        max_sessions=spec.max_sessions,
        max_context=strategy.max_context,
        max_draft_length=MAX_DRAFT_LENGTH,
    )
    links = DrafterLinks()
    emulated = spec.runtime == "emulated"  # there, max_batch counts Draft messages, as the paper's drafter does
    limits = Limits(
        max_sessions=spec.max_sessions,
        max_batch=MANY if emulated else spec.max_batch,
        max_messages=spec.max_batch if emulated else 0,
        weights={target.name: target.weight for target in topology.targets_of(spec)},
    )
    service = links.service = DrafterService(strategy, RealClock(), limits, links.reply, identity.epoch)
    failures: list[Exception] = []
    loop = asyncio.get_running_loop()

    def work() -> None:
        try:
            service.run()
        except Exception as error:  # a runtime that fails takes the process down; targets decode plainly
            log.exception("the drafter's loop stopped")
            failures.append(error)
            loop.call_soon_threadsafe(stop.set)

    def snapshot() -> dict[str, Any]:
        return {**service.statistics.snapshot(), "live_sessions": len(service.sessions), **links.bytes()}

    status = StatusFile(run_dir, "drafter", spec.name)
    thread = threading.Thread(target=work, name=spec.name)
    thread.start()
    try:
        async with anyio.create_task_group() as tasks:
            server = DrafterServer(
                transport,
                topology.link_address(spec),
                identity,
                links,
                free_sessions=lambda: max(0, spec.max_sessions - len(service.sessions)),
            )
            address = await tasks.start(server.run)
            tasks.start_soon(status.keep, snapshot)
            log.info("drafter %s listens at %s", spec.name, address, extra={"event": "ready", "drafter": spec.name})
            ready()
            await stop.wait()
            status.write("stopped", snapshot())
            tasks.cancel_scope.cancel()
    finally:
        service.inbox.put(Stop())
        thread.join()
    if failures:
        raise PacelineError(f"drafter {spec.name}: {failures[0]}") from failures[0]


def load_strategy(spec: DrafterSpec) -> Loaded:
    """The strategy with its model, and the vocabulary to compare with each target's."""
    if spec.strategy == "ngram":
        from paceline.edge.strategies.ngram import NGram

        return Loaded(NGram(max_context=spec.max_context), None)
    from paceline.edge.strategies.draft_model import DraftModel

    slots = spec.max_sessions * spec.max_context
    if spec.runtime == "emulated":
        from paceline.core.emulated import Pace, ToyLanguage, ToyModel, toy_vocabulary
        from paceline.edge.runtimes.emulated import EmulatedRuntime
        from paceline.topology.spec import Profile

        profile = spec.profile or Profile()
        language = ToyLanguage(profile.vocabulary_size, profile.seed, profile.agreement, profile.second_choice)
        pace = Pace(profile.step_ms, profile.prompt_token_ms)
        model = ToyModel(language, max_context=spec.max_context, kv_slots=slots, pace=pace)
        return Loaded(DraftModel(EmulatedRuntime(model)), toy_vocabulary(profile.vocabulary_size).identity)
    from paceline.core.lm.loading import load, local_folder
    from paceline.edge.runtimes.torch import TorchRuntime

    assert spec.model is not None
    vocabulary = Vocabulary.load(local_folder(spec.tokenizer or spec.model))
    torch_model = load(
        spec.model,
        device=spec.device,
        threads=spec.threads,
        kv_memory=spec.kv_memory,
        kv_slots=None if spec.kv_memory else slots,
        max_context=spec.max_context,
    )
    return Loaded(DraftModel(TorchRuntime(torch_model, vocabulary.size)), vocabulary.identity)
