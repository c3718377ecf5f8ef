"""A small valid topology, pieces put into it, and what reading it gives or complains of."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import pytest

from paceline.topology.spec import SpecErrors, Topology, parse_topology

STAR = """\
version: 1
name: star
drafters:
  - name: d
    model: org/small
targets:
  - name: t
    model: org/large
    drafters: {names: [d]}
"""


def read(text: str, base: Path = Path("/nowhere")) -> Topology:
    return parse_topology(dedent(text), "star.yaml", base)


def problems(text: str, base: Path = Path("/nowhere")) -> list[str]:
    with pytest.raises(SpecErrors) as caught:
        read(text, base)
    return str(caught.value).splitlines()


def with_target(lines: str) -> str:
    return STAR + "".join(f"    {line}\n" for line in lines.splitlines())


def with_drafter(lines: str) -> str:
    extra = "".join(f"    {line}\n" for line in lines.splitlines())
    return STAR.replace("    model: org/small\n", "    model: org/small\n" + extra)
