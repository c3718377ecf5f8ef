"""`verification: rejection` is for links whose drafter is who it says it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.topology.keyring import Keyring

from .spec_helpers import STAR, problems, read, with_target

REJECTION = with_target("verification: rejection")
KEY = "security: {key_file: secrets/deployment.key}\n"
EXPOSED = REJECTION.replace("    model: org/small\n", "    model: org/small\n    listen: 0.0.0.0:7070\n")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With everything that the star needs."""
    secrets = tmp_path / "secrets"
    Keyring(secrets, secrets / "deployment.key").fill("star", {"d": [], "t": []}, api_keys=[])
    return tmp_path


def test_links_with_a_key_are_enough(folder: Path) -> None:
    """On loopback without TLS, beyond it inside TLS."""
    assert read(REJECTION + KEY, folder).target("t").verification == "rejection"
    assert read(EXPOSED + KEY, folder).target("t").verification == "rejection"


def test_without_a_key_it_is_refused_also_on_loopback(folder: Path) -> None:
    """Another user of the machine could listen at the port while the drafter is away."""
    message = "rejection needs authenticated links: write security.key_file, or use coupled"
    assert [line.split(": ", 2)[2] for line in problems(REJECTION, folder)] == [message]


def test_beyond_loopback_encryption_must_stay_on(folder: Path) -> None:
    """A key proves who is there, not that nobody on the way changes weights."""
    (line,) = problems(EXPOSED + KEY.replace("}", ", encrypt: false}"), folder)
    assert "rejection needs a link to d that nobody can change: remove encrypt: false" in line


def test_where_nobody_else_can_connect_no_key_is_needed(tmp_path: Path) -> None:
    """Threads of one process, and a target without a drafter."""
    assert read(REJECTION + "link: {transport: memory}\n", tmp_path).target("t").verification == "rejection"
    assert read(REJECTION.replace("[d]", "[]"), tmp_path).target("t").verification == "rejection"
    assert STAR in REJECTION
