"""What differs between the topology that a node runs and the one it has just read."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence

from paceline.topology.process import notify
from paceline.topology.spec_models import Section, Topology

log = logging.getLogger(__name__)

OF_ALL_NODES = frozenset({"name", "security", "link"})  # sections that concern every node, and are read once


def changed(old: Section, new: Section) -> list[str]:
    """Keys whose values differ, in the order of the file's format; those of a section within are dotted: api.listen."""
    keys: list[str] = []
    for name in type(old).model_fields:
        before, after = getattr(old, name), getattr(new, name)
        if isinstance(before, Section) and isinstance(after, Section):
            keys += [f"{name}.{key}" for key in changed(before, after)]
        elif before != after:
            keys.append(name)
    return keys


def pending(started: tuple[Topology, Section], new: tuple[Topology, Section], reloaded: Collection[str]) -> list[str]:
    """What a node takes over only at its next start. (topology, section) each; reloaded: keys that do not need one."""
    common = [key for key in changed(started[0], new[0]) if key.partition(".")[0] in OF_ALL_NODES]
    return common + [key for key in changed(started[1], new[1]) if key not in reloaded]


def with_sections_of(started: Topology, new: Topology) -> Topology:
    """The new topology with what is read only at a start as it was then."""
    return new.model_copy(update={name: getattr(started, name) for name in OF_ALL_NODES})


def log_reload(node: str, done: Sequence[str], later: Sequence[str], *, certificates: bool) -> None:
    """One line about both, which whoever started this process is told too. certificates: they were read again."""
    if done:
        words = f"{', '.join(done)} changed"
    else:
        words = "nothing that a running node can take over changed" if later else "nothing changed"
    if certificates:
        words += "; certificates were read again"
    if later:
        words += f"; at the next start: {', '.join(later)}"
    fields = {"event": "reloaded", "node": node, "changed": list(done), "later": list(later)}
    log.info("%s has read its topology again: %s", node, words, extra=fields)
    notify(f"STATUS={node} has read its topology again: {words}")
