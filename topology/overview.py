"""Who talks to whom, over what: the picture that `paceline check` shows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

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
    drafting: str
    rounds: str


def connections(topology: Topology) -> list[Connection]:
    """Each target with each of its drafters, then drafters that nobody uses; in the order of the file."""
    rows = [
        _connection(topology, target, drafter)
        for target in topology.targets
        for drafter in topology.drafters_of(target) or (None,)
    ]
    unused = [drafter for drafter in topology.drafters if not topology.targets_of(drafter)]
    return rows + [
        Connection(None, None, None, drafter.name, drafter.host, None, _drafting(drafter), "used by no target")
        for drafter in unused
    ]


def who_talks_to_whom(topology: Topology) -> Table:
    """The connections as a table for the terminal."""
    from rich.table import Table

    table = Table(title=f"{topology.name}: who talks to whom", title_justify="left")
    for heading in ("users reach", "target", "over", "drafter", "drafts by", "rounds"):
        table.add_column(heading, overflow="fold", no_wrap=heading in ("users reach", "over"))
    for row in connections(topology):
        cells = (
            row.api or "–",
            _placed(row.target, row.target_host),
            row.over or "–",
            _placed(row.drafter, row.drafter_host),
            row.drafting,
            row.rounds,
        )
        table.add_row(*cells)
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
        drafting=_drafting(drafter) if drafter else "decodes plainly",
        rounds=_rounds(target) if drafter else "–",
    )


def _over(topology: Topology, target: TargetSpec, drafter: DrafterSpec) -> str:
    if topology.link.transport == "memory":
        return "memory, one process"
    if topology.link.transport == "mqtt":
        return f"mqtt, {topology.link.broker}"
    return f"tcp {topology.connect_address(drafter, target)}"


def _drafting(drafter: DrafterSpec) -> str:
    return "ngram" if drafter.strategy == "ngram" else f"draft model, {drafter.runtime} on {drafter.device}"


def _rounds(target: TargetSpec) -> str:
    lanes = "1 lane" if target.lanes == 1 else f"{target.lanes} lanes"
    return f"k = {target.draft_length}, {lanes}"


def _placed(name: str | None, host: str | None) -> str:
    return "–" if name is None else f"{name} on {host}" if host else name
