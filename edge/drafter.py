"""The drafter's process: one service thread, and an asyncio loop for targets and the status file."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import anyio

from paceline import __version__
from paceline.core.clock import Clock, RealClock
from paceline.core.errors import PacelineError, UserError
from paceline.core.manifest import check_tokenizer
from paceline.core.vocabulary import Vocabulary, VocabularyIdentity
from paceline.edge.events import Limits, Reconfigure, Stop
from paceline.edge.links import DrafterLinks
from paceline.edge.recorder import Recorder, RecordingFile
from paceline.edge.sensors import Sensors
from paceline.edge.sensors_environment import environment
from paceline.edge.service import DrafterService
from paceline.edge.strategies.base import Strategy
from paceline.topology.changes import log_reload, pending
from paceline.topology.handshake import DRAFT_AHEAD, REJECTION, Identity
from paceline.topology.links.base import Transport
from paceline.topology.orders import Orders, any_of
from paceline.topology.process import StatusFile, load_or_stop, settle_runtime
from paceline.topology.server import DrafterServer
from paceline.topology.spec import DrafterSpec, Topology
from paceline.topology.transports import renew_transport
from paceline.topology.wire import MAX_BRANCHES, MAX_DRAFT_LENGTH

log = logging.getLogger(__name__)

MANY = 1 << 16
LAST_BATCH_SECONDS = 0.3  # a drafter that leaves answers what it is drafting, if that is soon done


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
    orders: Orders,
) -> None:
    """Serves until it is told to stop. UserError when the model or the port is not to be had.

    Then it answers what is in the batch and says goodbye, so that its targets go on without waiting for anything.
    """
    loaded: Loaded | None = await load_or_stop(orders.stop, f"load {spec.name}", lambda: load_strategy(spec))
    if loaded is None:
        return
    settle_runtime()
    strategy = loaded.strategy
    limits = limits_of(topology, spec)
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
        max_batch=limits.max_batch,
        max_messages=limits.max_messages,
        capabilities=capabilities_of(strategy),
    )
    links = DrafterLinks()
    clock = RealClock()
    recorder = Recorder(clock, links.reply) if run_dir is not None and spec.record else None
    reply = links.reply if recorder is None else recorder.reply
    service = links.service = DrafterService(strategy, clock, limits, reply, identity.epoch, recorder)
    failures: list[Exception] = []
    finished = anyio.Event()
    loop = asyncio.get_running_loop()

    def work() -> None:
        try:
            service.run()
        except Exception as error:  # a runtime that fails takes the process down; targets decode plainly
            log.exception("the drafter's loop stopped")
            failures.append(error)
            loop.call_soon_threadsafe(orders.stop.set)
        loop.call_soon_threadsafe(finished.set)

    def snapshot() -> dict[str, Any]:
        return {**service.statistics.snapshot(), "live_sessions": len(service.sessions), **links.bytes()}

    def renew(new: Topology) -> None:
        """Takes over what a running drafter can: certificates, and the shares of its targets."""
        nonlocal limits
        section = next((drafter for drafter in new.drafters if drafter.name == spec.name), None)
        if section is None:
            raise UserError(f"drafter {spec.name} is no longer in the topology")
        certificates = renew_transport(transport, topology, spec.name)
        weights = limits_of(new, section).weights
        done = ["weights"] if weights != limits.weights else []
        limits = replace(limits, weights=weights)
        service.inbox.put(Reconfigure(limits))
        later = pending((topology, spec), (new, section), reloaded=())
        log_reload(spec.name, done, later, certificates=certificates)

    status = StatusFile(run_dir, "drafter", spec.name)
    recording: RecordingFile | None = None
    if recorder is not None and run_dir is not None:
        links.encoded = recorder.encoded
        strategy.observe(recorder.lap)
        about = about_recording(topology, spec, strategy)
        recording = RecordingFile(run_dir, spec.name, recorder, clock, Sensors, about)
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
            if recording is not None:
                tasks.start_soon(recording.keep)
            log.info("drafter %s listens at %s", spec.name, address, extra={"event": "ready", "drafter": spec.name})
            orders.follow(renew)
            ready()
            await orders.stop.wait()
            log.info("stopping: its targets go on without it", extra={"event": "stopping"})
            service.inbox.put(Stop())
            await any_of(finished.wait, orders.end.wait, seconds=LAST_BATCH_SECONDS)
            service.abandon()
            status.write("stopped", snapshot())
            tasks.cancel_scope.cancel()
    finally:
        service.inbox.put(Stop())
        thread.join()
        if recording is not None:
            recording.write()
    if failures:
        raise PacelineError(f"drafter {spec.name}: {failures[0]}") from failures[0]


def limits_of(topology: Topology, spec: DrafterSpec) -> Limits:
    emulated = spec.runtime == "emulated"  # there, max_batch counts Draft messages, as the paper's drafter does
    return Limits(
        max_sessions=spec.max_sessions,
        max_batch=MANY if emulated else spec.max_batch,
        max_messages=spec.max_batch if emulated else 0,
        max_ahead=MAX_BRANCHES if emulated else spec.max_batch,
        weights={target.name: target.weight for target in topology.targets_of(spec)},
    )


def about_recording(topology: Topology, spec: DrafterSpec, strategy: Strategy) -> Callable[[], dict[str, Any]]:
    """What a recording says first, once it is asked for: it looks at the machine."""
    drafter = {"strategy": spec.strategy, "runtime": spec.runtime, "model": spec.model, "device": spec.device}
    limits = {"max_batch": spec.max_batch, "max_sessions": spec.max_sessions, "max_context": strategy.max_context}
    return lambda: {
        "drafter_spec": {**drafter, **limits},
        "topology": topology.model_dump(mode="json"),
        "environment": environment(),
    }


def capabilities_of(strategy: Strategy) -> tuple[str, ...]:
    """What a drafter with this strategy offers its targets."""
    return ("coupled", REJECTION, DRAFT_AHEAD) if strategy.forks else ("coupled", REJECTION)


def load_strategy(spec: DrafterSpec, clock: Clock | None = None) -> Loaded:
    """The strategy with its model, and the vocabulary to compare with each target's.

    clock: what an emulated model takes its time on; default the real one.
    """
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
        language = ToyLanguage(
            profile.vocabulary_size, profile.seed, profile.agreement, profile.second_choice, profile.agreement_spread
        )
        pace = Pace(profile.step_ms, profile.prompt_token_ms)
        model = ToyModel(language, max_context=spec.max_context, kv_slots=slots, pace=pace, clock=clock)
        return Loaded(DraftModel(EmulatedRuntime(model)), toy_vocabulary(profile.vocabulary_size).identity)
    assert spec.model is not None
    if spec.runtime in ("onnxruntime", "tensorrt"):
        return _load_bundle(spec, Path(spec.model))
    from paceline.core.lm.loading import load, local_folder
    from paceline.edge.runtimes.torch import TorchRuntime

    tokenizer = local_folder(spec.tokenizer or spec.model)
    vocabulary = Vocabulary.load(tokenizer)
    check_tokenizer(local_folder(spec.model), tokenizer, vocabulary.identity)
    torch_model = load(
        spec.model,
        device=spec.device,
        threads=spec.threads,
        kv_memory=spec.kv_memory,
        kv_slots=None if spec.kv_memory else slots,
        max_context=spec.max_context,
        role="drafter",
    )
    return Loaded(DraftModel(TorchRuntime(torch_model, vocabulary.size)), vocabulary.identity)


def _load_bundle(spec: DrafterSpec, folder: Path) -> Loaded:
    """A graph for this machine; it brings its tokenizer."""
    from paceline.edge.runtimes.bundle import load_runtime
    from paceline.edge.strategies.draft_model import DraftModel

    runtime = load_runtime(
        spec.runtime,
        folder,
        device=spec.device,
        provider=spec.provider,
        threads=spec.threads,
        max_context=spec.max_context if "max_context" in spec.model_fields_set else None,
        max_sessions=spec.max_sessions,
        kv_memory=spec.kv_memory,
    )
    tokenizer = Path(spec.tokenizer or folder)
    identity = Vocabulary.load(tokenizer).identity
    check_tokenizer(folder, tokenizer, identity)
    return Loaded(DraftModel(runtime), identity)
