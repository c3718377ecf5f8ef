"""`verification: rejection` in real processes: authenticated links, drawn drafts, and what is reported."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from .conftest import EmulatedStar

pytestmark = pytest.mark.integration

OPTIONS = ("--temperature", "0.9", "--seed", "4", "--max-tokens", "60", "--prompt", "abc", "--prompt", "def")


def rejecting(star: EmulatedStar) -> EmulatedStar:
    """The star with `verification: rejection` and the key that it needs."""

    def change(topology: dict[str, Any]) -> None:
        topology["security"] = {"key_file": "secrets/deployment.key"}
        for target in topology["targets"]:
            target["verification"] = "rejection"

    star.edit(change)
    process = star.start("keys", "init", str(star.path))
    _, err = process.communicate(timeout=30)
    assert process.returncode == 0, err
    return star


def test_a_star_with_rejection_speculates(emulated: Callable[..., EmulatedStar]) -> None:
    """The report names the mode; drafts are accepted; a round and session costs the drafter a few hundred bytes."""
    report = rejecting(emulated(targets=2, verify_ms=5.0)).run(*OPTIONS)
    assert [target["verification"] for target in report["targets"]] == ["rejection"] * 2
    assert all(target["acceptance_length"] > 1.3 for target in report["targets"])
    assert [len(output["token_ids"]) for output in report["outputs"]] == [60, 60]
    rounds = sum(target["rounds"] for target in report["targets"])
    assert 100 < report["drafters"][0]["bytes_out"] / rounds < 1000


def test_without_a_drafter_the_text_is_that_of_coupled_verification(emulated: Callable[..., EmulatedStar]) -> None:
    """Then nothing is drawn; and at temperature 0 the drafter changes nothing."""
    plain = emulated(targets=2, verify_ms=0.0).run("--no-drafter", *OPTIONS)
    star = rejecting(emulated(targets=2, verify_ms=2.0))
    alone = star.run("--no-drafter", *OPTIONS)
    assert [o["token_ids"] for o in alone["outputs"]] == [o["token_ids"] for o in plain["outputs"]]
    greedy = ("--max-tokens", "60", "--prompt", "abc")
    texts = [star.run(*drafter, *greedy)["outputs"][0]["token_ids"] for drafter in ((), ("--no-drafter",))]
    assert texts[0] == texts[1]
