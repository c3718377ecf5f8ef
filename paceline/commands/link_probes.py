"""What `doctor` finds out about the links of this machine's targets: who answers, how fast, and what slows it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import anyio

from paceline.commands.probes import Probe, version_of
from paceline.core.errors import HandshakeRefused, LinkClosed, PacelineError, UserError
from paceline.core.percentiles import percentile
from paceline.topology.handshake import Identity
from paceline.topology.link_meter import Measured, open_meter
from paceline.topology.spec import DrafterSpec, TargetSpec, Topology
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
    "TLS failed": "both machines need certificates of one authority: paceline keys init",
    "certificate of": "another drafter listens there: compare its topology with this one",
    "not signed": "both machines need the same key file",
}


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


def measure_links(topology: Topology) -> dict[Link, Outcome]:
    """Every link that a target of this machine dials: measured, or what stood in the way.

    All are dialled at once; each that is up takes half a second more, so that none is measured by another.
    """
    here = [target for target in topology.targets if target.host is None and topology.link.transport != "memory"]
    links = [Link(target, drafter) for target in here for drafter in topology.drafters_of(target)]
    key_file = topology.security.key_file
    key = b"" if key_file is None else key_file.read_bytes().strip()
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


def probes(topology: Topology, found: Mapping[Link, Outcome]) -> Iterator[Probe]:
    """A line a link; drafters that are not there get one line for all their targets."""
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
        yield _absent(links, why)
    for drafter, offset in clocks.items():
        ahead = "ahead of" if offset > 0 else "behind"
        detail = f"the clock there is {abs(offset):.1f} s {ahead} this machine's; logs and traces will not line up"
        yield Probe(f"clock of {drafter}", "warn", detail, "run chrony or systemd-timesyncd on both machines")


def _absent(links: Sequence[Link], why: str) -> Probe:
    detail = f"from {', '.join(link.target.name for link in links)}: {why}"
    local = links[0].drafter.host is None
    advice = "start it (paceline up), then ask again" if local else "start it there, or check the firewall"
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
