"""Who talks to whom, over what: the picture that `paceline check` shows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.topology.credentials import link_is_encrypted
from paceline.topology.spec import DrafterSpec, TargetSpec, Topology

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class Connection:
    """One arrow of the star, or a target (or drafter) that has none."""

    target: str | None
    target_host: str | None
    api: str | None
    drafter: str | None
    drafter_host: str | None
    over: str | None
    drafts_by: str
    draft_length: int | str | None
    lanes: int | str | None
    verification: str | None = None


def connections(topology: Topology) -> list[Connection]:
    """Each target with each of its drafters, then drafters that nobody uses; in the order of the file."""
    rows = [
        _connection(topology, target, drafter)
        for target in topology.targets
        for drafter in topology.drafters_of(target) or (None,)
    ]
    unused = [drafter for drafter in topology.drafters if not topology.targets_of(drafter)]
    return rows + [
        Connection(None, None, None, drafter.name, drafter.host, None, _drafts_by(drafter), None, None)
        for drafter in unused
    ]


def who_talks_to_whom(topology: Topology) -> Table:
    """The connections as a table for the terminal."""
    from rich.table import Table

    table = Table(title=f"{topology.name}: who talks to whom", title_justify="left")
    if topology.link.local_broker:
        table.caption = f"The broker at {topology.link.broker} is started on this machine with the nodes."
        table.caption_justify = "left"
    for heading in ("users reach", "target", "over", "drafter", "drafts by", "k", "lanes"):
        table.add_column(heading, overflow="fold", no_wrap=heading in ("users reach", "over"))
    for row in connections(topology):
        cells = (
            row.api or "–",
            _placed(row.target, row.target_host) or "no target uses it",
            row.over or "–",
            _placed(row.drafter, row.drafter_host) or "none: plain decoding",
            row.drafts_by,
            "–" if row.draft_length is None else str(row.draft_length),
            "–" if row.lanes is None else str(row.lanes),
        )
        table.add_row(*cells)
    rejecting = [target.name for target in topology.targets if target.verification == "rejection"]
    if rejecting:
        names = ", ".join(rejecting)
        table.caption = f"{names}: verification by rejection (a seed gives another text with other drafts)"
        table.caption_justify = "left"
    return table


def _connection(topology: Topology, target: TargetSpec, drafter: DrafterSpec | None) -> Connection:
    over = _over(topology, target, drafter) if drafter else None
    return Connection(
        target=target.name,
        target_host=target.host,
        api=str(target.api.listen),
        drafter=drafter.name if drafter else None,
        drafter_host=drafter.host if drafter else None,
        over=over,
        drafts_by=_drafts_by(drafter) if drafter else "–",
        draft_length=target.draft_length if drafter else None,
        lanes=target.lanes if drafter else None,
        verification=target.verification if drafter else None,
    )


def _over(topology: Topology, target: TargetSpec, drafter: DrafterSpec) -> str:
    if topology.link.transport == "memory":
        return "memory, one process"
    if topology.link.transport == "mqtt":
        return str(topology.link.broker)
    kind = "tls" if link_is_encrypted(topology.security, "tcp", drafter) else "tcp"
    return f"{kind} {topology.connect_address(drafter, target)}"


def _drafts_by(drafter: DrafterSpec) -> str:
    return "ngram" if drafter.strategy == "ngram" else f"{drafter.runtime}, {drafter.device}"


def _placed(name: str | None, host: str | None) -> str | None:
    return f"{name} on {host}" if name and host else name
