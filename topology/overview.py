"""Who talks to whom, over what: the picture that `paceline check` shows."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
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
    """The connections as a table for the terminal; as wide as it needs to be, so that no address is cut."""
    from rich.markup import escape
    from rich.table import Table
    from rich.text import Text

    table = Table(title=f"{topology.name}: who talks to whom", title_justify="left", box=None, pad_edge=False)
    table.padding = (0, 1, 0, 0)
    table.caption = escape("\n".join(_captions(topology))) or None
    table.caption_justify = "left"
    rows = [
        (
            row.api or "–",
            _short_lines(_placed(row.target, row.target_host) or "no target uses it"),
            row.over or "–",
            _short_lines(_placed(row.drafter, row.drafter_host) or "none: plain decoding"),
            _short_lines(row.drafts_by),
            "–" if row.draft_length is None else str(row.draft_length),
            "–" if row.lanes is None else str(row.lanes),
        )
        for row in connections(topology)
    ]
    for index, heading in enumerate(("users reach", "target", "over", "drafter", "drafts by", "k", "lanes")):
        lines = [heading, *(line for row in rows for line in row[index].splitlines())]
        table.add_column(heading, no_wrap=True, width=max(map(len, lines)))
    for row in rows:
        table.add_row(*map(Text, row))  # [fe80::1] is an address, no markup
    table.width = sum((column.width or 0) + 1 for column in table.columns) - 1
    return table


def _short_lines(text: str) -> str:
    """Words in lines of 13, longer words whole: with that most tables fit a terminal of 80 columns."""
    return textwrap.fill(text, 13, break_long_words=False, break_on_hyphens=False)


def _captions(topology: Topology) -> Iterator[str]:
    """What the columns have no room for, where it is set."""
    if topology.link.local_broker:
        yield f"The broker at {topology.link.broker} is started on this machine with the nodes."
    for key in ("draft_ahead", "verify_budget"):
        values: dict[int, list[str]] = {}
        for target in topology.targets:
            if value := getattr(target, key):
                values.setdefault(value, []).append(target.name)
        yield from (f"{', '.join(names)}: {key} {value}" for value, names in values.items())
    if rejecting := [target.name for target in topology.targets if target.verification == "rejection"]:
        names = ", ".join(rejecting)
        yield f"{names}: verification by rejection (a seed gives another text with other drafts)"


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
