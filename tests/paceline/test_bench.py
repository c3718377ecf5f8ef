"""`paceline bench` on virtual time, and its users over HTTP."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import httpx
import pytest

from paceline import cli
from paceline.bench import Job, Measured, Mode, Timed, modes, row, tokens_per_second
from paceline.bench_real import _Users
from paceline.client import Completion, Endpoint, _take
from paceline.cloud.requests import Delta
from paceline.commands.bench import _predicted
from paceline.star import Star
from paceline.topology.planner import predicted_tokens_per_s
from paceline.topology.planner_ahead import ahead_estimate
from paceline.topology.planner_inputs import Conditions, gather
from paceline.topology.spec import Topology, parse_topology
from paceline.virtual import VirtualTarget

Run = Callable[..., tuple[int, Any, str]]
SHORT = ("--virtual", "--max-tokens", "12", "--json")


def topology_text(target: str = "", verify: str = "20", step: str = "2", drafters: str = "[d]") -> str:
    text = "version: 1\nname: star\n"
    if drafters != "[]":
        text += f"drafters:\n  - {{name: d, model: toy, runtime: emulated, profile: {{step_ms: {step}}}}}\n"
    text += f"targets:\n  - {{name: t, model: toy, engine: emulated, max_context: 512, drafters: {{names: {drafters}}}"
    return text + f", profile: {{verify_ms: {verify}}}{target}}}\n"


def topology(**changes: str) -> Topology:
    return parse_topology(topology_text(**changes), "star.yaml", Path())


@pytest.fixture
def bench(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs the command in this process: code, what it printed as JSON, stderr."""

    def run(text: str, *options: object) -> tuple[int, Any, str]:
        file = tmp_path / "star.yaml"
        file.write_text(text)
        code = cli.main(["bench", str(file), *map(str, options)])
        printed = capsys.readouterr()
        return code, json.loads(printed.out) if printed.out else None, printed.err

    return run


def rows(found: Any) -> dict[str, Any]:
    return {one["mode"]: one for one in found["rows"]}


def test_modes_have_plain_texts(bench: Run) -> None:
    """Plain itself is compared with nothing."""
    code, found, _ = bench(topology_text(), *SHORT)
    assert code == 0
    assert {name: (one["identical_text"], one["text"]) for name, one in rows(found).items()} == {
        "plain": (None, "–"),
        "standard": (True, "same"),
        "lanes": (True, "same"),
        "auto": (True, "same"),
    }


def test_other_texts_with_a_drafter_are_found(bench: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A target that writes something else as soon as it has a drafter: exit 1."""
    publish = VirtualTarget._publish

    def changed(self: VirtualTarget, deltas: list[Delta]) -> None:
        if self.engine.drafting.drafters:
            deltas = [replace(one, token_ids=[token ^ 1 for token in one.token_ids]) for one in deltas]
        publish(self, deltas)

    monkeypatch.setattr(VirtualTarget, "_publish", changed)
    code, found, _ = bench(topology_text(), *SHORT, "--modes", "standard,plain")
    assert (code, [one["identical_text"] for one in found["rows"]]) == (1, [False, None])


def test_requests_that_fail_are_told(bench: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """One in each mode: a sentence, exit 1, and figures of the others only."""
    publish = VirtualTarget._publish

    def failing(self: VirtualTarget, deltas: list[Delta]) -> None:
        good = [one for one in deltas if one.request_id != "t-request-1"]
        if len(good) < len(deltas) and self.answers["t-request-1"].ended is None:
            good.append(Delta("t-request-1", finish_reason="error", error="no room"))
        publish(self, good)

    monkeypatch.setattr(VirtualTarget, "_publish", failing)
    code, found, err = bench(topology_text(), *SHORT, "--modes", "plain,standard", "--requests", 4, "--in-flight", 2)
    assert code == 1
    assert "standard: 1 requests failed, such as no room\n" in err
    standard = rows(found)["standard"]
    assert (standard["failed"], standard["identical_text"], standard["text"]) == (1, None, "failed")
    assert 0 < standard["e2e_ms"]["p99"] < 1000


def test_a_row_of_nothing_has_no_times() -> None:
    """All requests failed: there is nothing to take a median of."""
    measured = Measured({"t": [Timed(1.0, ended=1.5, error="gone")]}, None, None, 1, 0)
    found = row(Mode("plain", topology(), ("t",)), Job([[1]], 1, 1, 8), measured, None)
    assert found["e2e_ms"] == {"p50": None, "p99": None}
    assert found["tokens_per_s"] == tokens_per_second([]) == 0.0


def test_the_round_trip_is_said_as_plan_has_it(bench: Run) -> None:
    """`--rtt 20ms`, and the older `--rtt-ms 20`: the same figures; real links have their own."""
    told = [
        bench(topology_text(), *SHORT, "--modes", "standard", *rtt) for rtt in (("--rtt", "20ms"), ("--rtt-ms", 20))
    ]
    assert told[0] == told[1]
    assert rows(told[0][1])["standard"]["itl_ms"]["p50"] == pytest.approx(48, abs=0.5)
    code, _, err = bench(topology_text(), "--rtt", "20ms")
    assert (code, err) == (2, "--rtt is for --virtual; real links have the round trip that they have\n")


def test_a_mode_that_is_another_one_is_told(bench: Run) -> None:
    """The star of one target, asked for beside standard."""
    code, found, err = bench(topology_text(), *SHORT, "--modes", "standard,star")
    assert (code, list(rows(found))) == (0, ["standard"])
    assert err == "star: with one target it is the same as standard, so it is not measured.\n"


def test_warnings_of_many_targets_are_one_line(bench: Run) -> None:
    """Eight targets on a drafter that is far too slow find it suspect."""
    head, targets = topology_text(target="", verify="4", step="10").split("targets:\n")
    text = head.replace("model: toy", "model: toy, max_batch: 1") + "targets:\n"
    for index in range(8):
        text += targets.replace("name: t,", f"name: t{index},")
    code, _, err = bench(text, "--virtual", "--json", "--modes", "star", "--max-tokens", 128, "--in-flight", 2)
    assert code == 0
    assert re.fullmatch(
        r"star: t\d: drafter d is suspect: .+; nobody waits for them until one is in time \(\d more like it\)\n", err
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--max-tokens", 500), "--max-tokens 500 leaves no room for the prompts in t's context of 512 tokens\n"),
        (("--rtt-ms", "inf"), "--rtt-ms must be a finite number, not inf\n"),
        (("--rtt-ms", "nan"), "--rtt-ms"),
        (("--rtt", "fast"), "--rtt must be"),
        (("--temperature", "nan"), "--temperature"),
    ],
)
@pytest.mark.parametrize("kind", [("--virtual",), ()])
def test_what_cannot_be_measured_is_refused(bench: Run, options: tuple[object, ...], words: str, kind: Any) -> None:
    """Before anything is started."""
    code, found, err = bench(topology_text(), *kind, *options)
    assert (code, found) == (2, None)
    assert words in err


def test_passes_that_take_no_time_are_measured_and_planned(bench: Run) -> None:
    """A microsecond each: a million of them a second, of 4 tokens each."""
    code, found, _ = bench(topology_text(verify="0", step="0"), *SHORT)
    assert code == 0
    plain = rows(found)["plain"]
    assert plain["tokens_per_s"] == pytest.approx(4e6)
    assert all(one["predicted_tokens_per_s"] > 0 for one in found["rows"])
    assert plain["e2e_ms"]["p50"] == pytest.approx(12e-3)


def test_a_prediction_that_fails_costs_no_measurement(bench: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no figure in its column then."""

    def fails(*arguments: object) -> float:
        raise ZeroDivisionError

    monkeypatch.setattr("paceline.topology.planner.predicted_tokens_per_s", fails)
    code, found, _ = bench(topology_text(), *SHORT, "--modes", "plain")
    assert (code, found["rows"][0]["predicted_tokens_per_s"]) == (0, None)
    assert found["rows"][0]["tokens_per_s"] == pytest.approx(200.0)


def test_lanes_are_those_in_use(bench: Run) -> None:
    """Without drafters, or with one request, there is one."""
    _, found, _ = bench(topology_text(drafters="[]"), *SHORT, "--modes", "plain,lanes")
    assert [(one["lanes"], one["draft_length"]) for one in found["rows"]] == [(1, 0), (1, 0)]
    _, found, _ = bench(topology_text(), *SHORT, "--modes", "lanes", "--in-flight", 1)
    assert found["rows"][0]["lanes"] == 1
    _, found, _ = bench(topology_text(), *SHORT, "--modes", "lanes")
    assert found["rows"][0]["lanes"] == 2


def test_no_more_requests_are_in_flight_than_there_are(bench: Run) -> None:
    """One request, 20 ms a token: 50 tokens a second, measured and planned."""
    code, found, _ = bench(topology_text(), *SHORT, "--modes", "plain", "--requests", 1, "--in-flight", 40)
    one = found["rows"][0]
    assert (code, one["in_flight"]) == (0, 1)
    assert one["tokens_per_s"] == pytest.approx(50.0)
    assert one["predicted_tokens_per_s"] == pytest.approx(50.0)


def test_drafting_ahead_is_predicted_where_a_formula_says_what_it_brings(bench: Run) -> None:
    """One lane of one target: within a tenth of the formula. Nothing for two lanes; plain drafts nothing."""
    text = topology_text(", draft_length: 4, draft_ahead: 5, max_sessions: 8")
    link = ("--virtual", "--json", "--max-tokens", 128, "--rtt-ms", 20)
    code, found, _ = bench(text, *link, "--modes", "plain,standard,lanes", "--in-flight", 2, "--requests", 12)
    assert code == 0
    by_mode = rows(found)
    standard = by_mode["standard"]
    inputs = gather(parse_topology(text, "", Path()), Conditions(in_flight=2, rtt=0.02), {})
    formula = ahead_estimate(inputs.groups[0], inputs.drafters["d"], 5).tokens_per_s
    assert standard["predicted_tokens_per_s"] == pytest.approx(formula)
    assert standard["tokens_per_s"] == pytest.approx(formula, rel=0.1)
    assert by_mode["lanes"]["predicted_tokens_per_s"] is None
    assert by_mode["plain"]["predicted_tokens_per_s"] == pytest.approx(100.0, rel=0.05)


def test_a_prediction_takes_the_tokens_that_prompts_had() -> None:
    """Not the characters of a text: the server says how many tokens it read. Without an answer there is no figure."""
    mode = modes(topology(target=", prefill_chunk: 16"), ["plain"])[0]
    job = Job(["x" * 900], 4, 1, 12)
    answers = [Timed(0.0, [1], [(1.0, 1)], 1.0, prompt_tokens=count) for count in (30, 34)]
    found = _predicted(mode, job, Measured({"t": answers}, None, None, 1, 0), 0.0)
    assert found == predicted_tokens_per_s(mode.topology, Conditions(32, 12, 1, 0.0, requests=4))
    assert _predicted(mode, job, Measured({"t": []}, None, None, 1, 0), 0.0) is None


def test_a_users_client_reads_the_usage() -> None:
    """The last event of a stream, where it is asked for; the others hold none."""
    done = Completion("t", "abc")
    _take(done, {"choices": [{"text": "a", "token_ids": [97]}], "usage": None}, lambda tokens: None)
    assert done.prompt_tokens is None
    _take(done, {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 1}}, lambda tokens: None)
    assert (done.prompt_tokens, done.token_ids) == (3, [97])


class FakeStar:
    """Not a running star: its target's port is one that nobody listens on."""

    def endpoint(self, name: str) -> Endpoint:
        return Endpoint(name, "http://127.0.0.1:9/v1/completions", None)


def test_a_target_that_is_gone_fails_requests_and_not_the_bench() -> None:
    """Each is told with its reason."""

    async def ask() -> list[Timed]:
        async with httpx.AsyncClient(trust_env=False) as client:
            users = _Users(cast(Star, FakeStar()), client, "t", Job([[1]], 3, 2, 8), 0, lambda tokens: None)
            await users.run()
            return users.answers

    answers = asyncio.run(ask())
    assert len(answers) == 3
    assert all(one.error is not None and one.error.startswith("t broke off: ConnectError") for one in answers)
    assert all(one.ended >= one.sent > 0 for one in answers)
