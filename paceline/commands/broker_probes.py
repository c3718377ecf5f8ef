"""What `doctor` asks of an MQTT broker: whether it lets this machine in, how fast it answers, what it does not take."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

import anyio

from paceline.commands.probes import Probe, version_of
from paceline.commands.topology_probes import here
from paceline.core.errors import LinkClosed, UserError
from paceline.core.percentiles import percentile
from paceline.topology.spec import Topology
from paceline.topology.transports import mqtt_place

CONNECT_SECONDS = 2.5
ANSWERS = 20  # that are timed
ROOMY_PACKET = 64 << 10  # bytes; smaller than that, ordinary prompts travel in parts
ROOMY_WINDOW = 10  # acknowledgements on their way
NEEDED = {  # a term that a broker may refuse → what Paceline needs it for
    "MaximumQoS": "it takes no message of QoS 1, in which links are opened and closed",
    "RetainAvailable": "it retains no messages, by which nodes know who is there",
    "WildcardSubscriptionAvailable": "it has no wildcards, by which a drafter hears its targets",
}


class Greeting(NamedTuple):
    """terms: of CONNACK, by the names of MQTT 5; what is not there has no limit. answers: seconds until SUBACK came.
    user: who was admitted."""

    version: str
    terms: Mapping[str, Any]
    answers: list[float]
    user: str | None = None


def broker(topology: Topology, hosts: Collection[str] = ()) -> Iterator[Probe]:
    """Lines about the broker; none where links do not go over one. hosts: this machine's."""
    if topology.link.transport != "mqtt":
        return
    try:
        greeting = anyio.run(_greet, topology, hosts, backend_options={"use_uvloop": version_of("uvloop") is not None})
    except (UserError, LinkClosed) as error:
        if topology.link.local_broker:
            yield Probe("broker", "warn", str(error), "it starts with the topology: paceline up, then ask again")
        else:
            yield Probe("broker", "fail", str(error), "see that it runs, and what the topology's link section says")
        return
    yield _answers(topology, greeting)
    yield from limits(greeting)


async def _greet(topology: Topology, hosts: Collection[str]) -> Greeting:
    from paceline.topology.links.mqtt_client import client_name, connect
    from paceline.topology.links.mqtt_paho import MQTT_5

    node = next((node.name for node in here(topology, hosts)), topology.targets[0].name)
    place = mqtt_place(topology, node)
    with anyio.move_on_after(CONNECT_SECONDS):
        connection = await connect(place.broker, client_name(place.deployment, "doctor"), None, lambda *_: None)
        try:
            answers = []
            for _ in range(ANSWERS):
                asked = time.perf_counter()
                await connection.subscribe([place.presence("+")])
                answers.append(time.perf_counter() - asked)
            terms = connection.terms.json() if connection.terms is not None else {}  # type: ignore[no-untyped-call]
            version = "MQTT 5" if connection.version == MQTT_5 else "MQTT 3.1.1"
            return Greeting(version, terms, answers, place.broker.username)
        finally:
            await connection.close()
    raise LinkClosed(f"the broker {place.broker.url} did not answer within {CONNECT_SECONDS:g} s")


def _answers(topology: Topology, greeting: Greeting) -> Probe:
    url = topology.link.broker
    rtt = {f"p{percent}": round(1e3 * percentile(greeting.answers, percent), 3) for percent in (50, 99)}
    admitted = f"user {greeting.user} admitted" if greeting.user else "no user name asked for"
    detail = f"{url}: {greeting.version}, {admitted}, answers in {rtt['p50']:.2f} ms (p99 {rtt['p99']:.2f})"
    return Probe("broker", "ok", detail, numbers={"rtt_ms": rtt, "terms": dict(greeting.terms)})


def limits(greeting: Greeting) -> Iterator[Probe]:
    """What it takes at the most, and what of that hurts."""
    terms = greeting.terms
    refused = [name for name in NEEDED if terms.get(name) == 0]
    for name in refused:
        yield Probe("broker limits", "fail", NEEDED[name], "allow it in the broker's configuration")
    packet, window = terms.get("MaximumPacketSize"), terms.get("ReceiveMaximum", 65_535)
    told = f"packets of {packet} bytes" if packet else "packets of any size"
    detail = f"{told}, {window} unacknowledged messages, QoS {terms.get('MaximumQoS', 2)}"
    if greeting.version != "MQTT 5":
        yield Probe("broker limits", "ok", "not told: MQTT 3.1.1 has no words for them")
    elif packet is not None and packet < ROOMY_PACKET:
        advice = f"set max_packet_size to {4 * ROOMY_PACKET} or more: long prompts travel in parts now"
        yield Probe("broker limits", "warn", detail, advice)
    elif window < ROOMY_WINDOW:
        yield Probe("broker limits", "warn", detail, "set max_inflight_messages to 20: opening links waits for it now")
    elif not refused:
        yield Probe("broker limits", "ok", detail)
