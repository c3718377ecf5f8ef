"""What `doctor` finds out about the links of this machine's targets: who answers, how fast, and what slows it."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import anyio

from paceline.commands.probes import Probe, version_of
from paceline.commands.topology_probes import here
from paceline.core.errors import HandshakeRefused, LinkClosed, PacelineError, UserError
from paceline.core.percentiles import percentile
from paceline.topology.handshake import Identity
from paceline.topology.link_meter import Measured, open_meter
from paceline.topology.spec import DrafterSpec, TargetSpec, Topology
from paceline.topology.tls import own_transport
from paceline.topology.transports import open_transport

CLOCKS_MAY_DIFFER = 0.5  # seconds
DELAYED_ACKS = (0.080, 0.040)  # Linux acknowledges what has no answer after 40 ms; on two legs it adds up
EARLY, LATE = 0.004, 0.010  # around such a step
NAGLE_SHARE = 0.2  # so many bursts must show it

NODELAY = {
    "tcp": "something between the two (a proxy, a tunnel) gathers small packets: switch TCP_NODELAY on there",
    "mqtt": "write `set_tcp_nodelay true` into mosquitto.conf and restart the broker",
}
REFUSED = {
    "unauthenticated": "both machines need the same key file",
    "name": "another drafter listens there: compare its topology with this one",
    "deployment": "compare the names of the two topologies",
    "protocol": "install the same release on both machines",
}
DISTRUSTED = {  # what a LinkClosed says when somebody is there and not believed
    "TLS failed": "both machines need certificates of one authority: run paceline keys init on one, copy the files",
    "certificate of": "another drafter listens there: compare its topology with this one",
    "not signed": "both machines need the same key file",
}


SILENT = ("did not answer", "was not answered")  # what a LinkClosed says when something accepts and that is all


class Link(NamedTuple):
    """One arrow of the star, from a target of this machine."""

    target: TargetSpec
    drafter: DrafterSpec

    @property
    def name(self) -> str:
        return f"link to {self.drafter.name}"

    @property
    def numbers(self) -> dict[str, Any]:
        """Which one it is, for machines."""
        return {"target": self.target.name, "drafter": self.drafter.name}


Outcome = Measured | PacelineError


def measure_links(topology: Topology, hosts: Collection[str] = ()) -> dict[Link, Outcome]:
    """Every link that a target of this machine dials: measured, or what stood in the way. hosts: this machine's.

    All are dialled at once; each that is up takes half a second more, so that none is measured by another.
    """
    if topology.link.transport == "memory":
        return {}
    targets = [node for node in here(topology, hosts) if isinstance(node, TargetSpec)]
    links = [Link(target, drafter) for target in targets for drafter in topology.drafters_of(target)]
    key = _key(topology)
    found: dict[Link, Outcome] = dict.fromkeys(links, LinkClosed("not tried"))

    async def measure(link: Link, turn: anyio.Lock) -> None:
        identity = Identity(topology.name, link.target.name, key)
        address = topology.link_address(link.drafter, link.target)
        try:
            async with (
                open_transport(topology, link.target.name, quiet=True) as transport,
                open_meter(transport, address, identity, link.drafter.name) as meter,
            ):
                found[link] = await meter.measure(turn)
        except PacelineError as error:
            found[link] = error

    async def measure_all() -> None:
        turn = anyio.Lock()
        async with anyio.create_task_group() as tasks:
            for link in links:
                tasks.start_soon(measure, link, turn)

    if links:
        anyio.run(measure_all, backend_options={"use_uvloop": version_of("uvloop") is not None})
    return found


def drafters_that_answer(topology: Topology, hosts: Collection[str], found: Mapping[Link, Outcome]) -> set[str]:
    """Names of those that were measured, and of this machine's that nobody here dials and that welcome a probe."""
    answered = {link.drafter.name for link, outcome in found.items() if isinstance(outcome, Measured)}
    dialled = {link.drafter.name for link in found}
    asked = [node for node in here(topology, hosts) if isinstance(node, DrafterSpec) and node.name not in dialled]
    key = _key(topology)

    async def ask(drafter: DrafterSpec) -> None:
        """With the drafter's own name and certificate: it is all that this machine has."""
        identity = Identity(topology.name, drafter.name, key)
        with contextlib.suppress(PacelineError):
            transport = own_transport(topology, drafter)
            async with open_meter(transport, str(drafter.listen.from_here), identity, drafter.name):
                answered.add(drafter.name)

    async def ask_all() -> None:
        async with anyio.create_task_group() as tasks:
            for drafter in asked:
                tasks.start_soon(ask, drafter)

    if asked and topology.link.transport == "tcp":
        anyio.run(ask_all, backend_options={"use_uvloop": version_of("uvloop") is not None})
    return answered


def _key(topology: Topology) -> bytes:
    file = topology.security.key_file
    return b"" if file is None else file.read_bytes().strip()


def probes(topology: Topology, found: Mapping[Link, Outcome], hosts: Collection[str] = ()) -> Iterator[Probe]:
    """A line a link; drafters that are not there get one line for all their targets. hosts: this machine's."""
    clocks: dict[str, float] = {}
    absent: dict[tuple[str, str], list[Link]] = {}
    for link, outcome in found.items():
        if isinstance(outcome, Measured):
            yield _speed(topology, link, outcome)
            offset = outcome.clock_offset or 0.0
            if abs(offset) - min(outcome.rtts) / 2 > CLOCKS_MAY_DIFFER:
                clocks[link.drafter.name] = offset
        elif isinstance(outcome, HandshakeRefused):
            advice = REFUSED.get(outcome.code, "")
            yield Probe(link.name, "fail", f"from {link.target.name}: {outcome.code}: {outcome}", advice, link.numbers)
        elif isinstance(outcome, UserError) or any(sign in str(outcome) for sign in DISTRUSTED):
            advice = next((advice for sign, advice in DISTRUSTED.items() if sign in str(outcome)), "")
            yield Probe(link.name, "fail", f"from {link.target.name}: {outcome}", advice, link.numbers)
        else:
            absent.setdefault((link.drafter.name, str(outcome)), []).append(link)
    for (_, why), links in absent.items():
        yield _absent(topology, links, why, hosts)
    for drafter, offset in clocks.items():
        ahead = "ahead of" if offset > 0 else "behind"
        detail = f"the clock there is {abs(offset):.1f} s {ahead} this machine's; logs and traces will not line up"
        yield Probe(f"clock of {drafter}", "warn", detail, "run chrony or systemd-timesyncd on both machines")


def _absent(topology: Topology, links: Sequence[Link], why: str, hosts: Collection[str]) -> Probe:
    detail = f"from {', '.join(link.target.name for link in links)}: {why}"
    local = links[0].drafter.host is None or links[0].drafter.host in hosts
    advice = "start it (paceline up), then ask again" if local else "start it there, or check the firewall"
    if topology.link.transport == "mqtt":
        advice = "start it; if it runs, see whether the broker's access list lets both nodes' users hear who is there"
    elif any(sign in why for sign in SILENT) and (local or "handshake" in why):
        advice = "something listens there and does not answer: is the drafter hung, or of another deployment?"
    return Probe(links[0].name, "warn", detail, advice)


def _speed(topology: Topology, link: Link, measured: Measured) -> Probe:
    rtt, burst = _milliseconds(measured.rtts), _milliseconds(measured.bursts)
    offset = measured.clock_offset
    numbers = {
        **link.numbers,
        "rtt_ms": rtt,
        "burst_rtt_ms": burst,
        "clock_offset_ms": None if offset is None else round(1e3 * offset, 3),
    }
    transport = topology.link.transport
    over = topology.link.broker if transport == "mqtt" else f"tcp {topology.link_address(link.drafter, link.target)}"
    detail = f"from {link.target.name} over {over}: round trip {rtt['p50']:.2f} ms (p99 {rtt['p99']:.2f})"
    if offset is not None and link.drafter.host is not None:
        detail += f", clocks {abs(1e3 * offset):.1f} ms apart"
    step = nagle_step(measured.rtts, measured.bursts)
    if step is None:
        return Probe(link.name, "ok", detail, numbers=numbers)
    detail += f"; frames right behind others wait {1e3 * step:.0f} ms longer: Nagle's algorithm and delayed ACKs"
    return Probe(link.name, "warn", detail, NODELAY[transport], numbers)


def _milliseconds(seconds: list[float]) -> dict[str, float]:
    return {f"p{percent}": round(1e3 * percentile(seconds, percent), 3) for percent in (50, 99)}


def nagle_step(rtts: Sequence[float], bursts: Sequence[float]) -> float | None:
    """0.04 or 0.08 where round trips gather so much above the shortest, mostly those of bursts; else None. Seconds."""
    shortest = min([*rtts, *bursts])

    def share(samples: Sequence[float], step: float) -> float:
        return sum(step - EARLY <= one - shortest <= step + LATE for one in samples) / max(1, len(samples))

    for step in DELAYED_ACKS:
        plain = share(rtts, step)
        if share(bursts, step) - plain >= NAGLE_SHARE or plain >= 0.5:
            return step
    return None
