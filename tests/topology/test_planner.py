"""A plan of a whole topology: figures, advice, JSON, and what is said when numbers are missing."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.core.errors import UserError
from paceline.topology.planner import Plan, plan, predicted_tokens_per_s
from paceline.topology.planner_ahead import ahead_estimate
from paceline.topology.planner_curves import curves
from paceline.topology.planner_inputs import Conditions, gather
from paceline.topology.planner_json import to_json
from paceline.topology.planner_profiles import read_profiles
from paceline.topology.planner_resources import memory, traffic
from paceline.topology.spec import Profile, Topology, load_topology, parse_topology

ROOT = Path(__file__).parents[2]


def topology(targets: int = 1, drafter: str = "", target: str = "", verify: str = "20", **profile: Any) -> Topology:
    """Emulated: targets on one serial drafter, S = 8 ms at k = 4, V = 20 ms."""
    values = {"step_ms": 2, "agreement": 0.8, **profile}
    text = "version: 1\nname: star\ndrafters:\n"
    text += f"  - {{name: d, model: toy, runtime: emulated, max_batch: 1, profile: {json.dumps(values)}{drafter}}}\n"
    text += "targets:\n"
    for index in range(targets):
        text += f"  - {{name: t{index}, model: toy, engine: emulated, profile: {{verify_ms: {verify}}}, "
        text += f"drafters: {{names: [d]}}{target}}}\n"
    return parse_topology(text, "star.yaml", Path())


REAL = """\
version: 1
name: real
hosts: {far: {address: 10.0.0.2}}
security: {key_file: deployment.key}
drafters:
  - {name: d, model: org/small, host: far, listen: 0.0.0.0:7070}
targets:
  - {name: t, model: org/large, drafters: {names: [d]}}
"""


def real(text: str = REAL) -> Topology:
    return parse_topology(text, "real.yaml", Path("/nowhere"), look_at_keys=False)


def short(topology: Topology, **conditions: Any) -> Plan:
    """With answers of 64 tokens."""
    return plan(topology, Conditions(32, 64, **conditions))


def test_one_session_is_planned_as_by_hand() -> None:
    """S = 8, V = 20, no link to speak of: 28.1 ms, 3.36 tokens, 6 targets ... no, ⌈1 + 20.1/8⌉ = 4 fill the drafter."""
    one = short(topology()).groups[0]
    assert one.configured.cycle.seconds == pytest.approx(0.0281)
    assert one.configured.acceptance == pytest.approx(3.3616)
    assert one.n_full == 4
    assert one.configured.tokens_per_s == pytest.approx(3.3616 / 0.0281)
    assert one.sees.ttft_ms.mean == pytest.approx(20.0)
    assert one.plain.token_ms.mean == pytest.approx(20.0)
    assert one.sees.token_ms.mean == pytest.approx(28.1 / 3.3616, rel=0.05)
    assert one.sees.bunch.mean == pytest.approx(3.3, abs=0.2)


def test_a_saturated_star_shares_its_drafter() -> None:
    """16 targets: 128 ms a round, the drafter busy all the time, and a shorter draft is better for all."""
    made = short(topology(16))
    one = made.groups[0]
    assert one.group.count == 16
    assert one.configured.cycle.seconds == pytest.approx(0.128)
    assert made.drafters[0].utilization == pytest.approx(1.0)
    assert one.n_break_even == 8
    assert one.best.draft_length == 1
    assert made.tokens_per_s < made.plain_tokens_per_s
    assert "as it is set, speculation is slower than plain decoding" in made.advice[0]
    assert "others keep busy" in made.advice[0]


def test_one_request_over_a_far_link_is_told_not_to_speculate() -> None:
    """80 ms away: the sentences name the link, and how near the drafter would have to be; a little nearer it pays."""
    made = short(topology(), rtt=0.08)
    assert not made.groups[0].speculate
    assert "do not speculate" in made.advice[0]
    assert "Most of it is the link." in made.advice[0]
    assert "It would pay with a round trip under 51.4 ms (k = 10)." in made.advice[0]
    assert short(topology(), rtt=0.040).groups[0].best.draft_length in range(6, 11)
    assert not short(topology(), rtt=0.056).groups[0].speculate


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"agreement": 0.05}, "right too seldom"),
        ({"step_ms": 30}, "Most of it is drafting"),
        ({"verify": "{1: 2, 101: 202}", "step_ms": 0.5}, "Verifying 5 tokens costs 5.0 × a plain pass"),
    ],
)
def test_the_reason_against_speculation_is_the_largest_one(change: dict[str, Any], words: str) -> None:
    """A drafter that is wrong, one that is slow, a target that pays for every token."""
    made = short(topology(**change), rtt=0.0)
    assert not made.groups[0].speculate
    assert words in made.advice[0]


def test_what_pays_is_said_with_its_gain() -> None:
    """2.3 times plain decoding, and that more is to be had with another k."""
    text = short(topology(), rtt=0.0).advice[0]
    assert text.startswith("t0: 2.")
    assert "× plain decoding" in text


def test_a_target_without_a_drafter_decodes_plainly() -> None:
    """It has rates and no drafter's figures."""
    text = "version: 1\nname: p\ntargets:\n  - {name: t, model: toy, engine: emulated, profile: {verify_ms: 10}}\n"
    made = short(parse_topology(text, "p.yaml", Path()))
    assert made.groups[0].sees.tokens_per_s == pytest.approx(100.0, rel=0.02)
    assert made.groups[0].traffic is None
    assert "has no drafter" in made.advice[0]
    assert curves(made.inputs, made.groups[0].configured.setting) == []


def test_a_drafter_with_too_little_room_is_named() -> None:
    """Two sessions for four requests."""
    made = short(topology(drafter=", max_sessions: 2"), in_flight=4)
    assert any("room for 50% of the sessions" in sentence for sentence in made.advice)


def test_the_same_plan_twice_is_the_same() -> None:
    """Pure functions and a fixed seed."""
    assert to_json(short(topology(3), in_flight=2)) == to_json(short(topology(3), in_flight=2))


def test_a_prediction_alone_is_that_of_the_plan() -> None:
    """Also for a number of requests that all begin at once, as a measurement has it."""
    conditions = Conditions(32, 64, in_flight=2)
    assert predicted_tokens_per_s(topology(3), conditions) == plan(topology(3), conditions).tokens_per_s
    eight = predicted_tokens_per_s(topology(), Conditions(32, 64, in_flight=2, requests=8))
    assert eight == pytest.approx(2 * 64 / (0.02 + 20 * 0.0281), rel=0.15)


def test_no_more_requests_are_in_flight_than_there_are() -> None:
    """One request of 64 tokens and its prompt's pass, 20 ms each, whatever would be in flight otherwise."""
    one = Conditions(32, 64, in_flight=40, requests=1)
    assert predicted_tokens_per_s(topology(target=", draft_length: 0"), one) == pytest.approx(50.0, rel=0.02)


def test_a_prediction_with_draft_ahead_is_the_formulas_or_none() -> None:
    """It holds in one lane, which is what one request has anyway; not with several targets or a budget."""
    ahead = ", draft_length: 5, draft_ahead: 6"
    conditions = Conditions(32, 64, in_flight=2, rtt=0.008)
    inputs = gather(topology(target=ahead), conditions, {})
    formula = ahead_estimate(inputs.groups[0], inputs.drafters["d"], 6).tokens_per_s
    assert predicted_tokens_per_s(topology(target=ahead), conditions) == formula
    single = replace(conditions, in_flight=1)
    assert predicted_tokens_per_s(topology(target=ahead + ", lanes: 2"), single) < formula
    for refused in (topology(target=ahead + ", lanes: 2"), topology(2, target=ahead)):
        with pytest.raises(UserError, match="no prediction of draft_ahead but for a target alone"):
            predicted_tokens_per_s(refused, conditions)
    with pytest.raises(UserError, match="no prediction of draft_ahead"):
        predicted_tokens_per_s(topology(target=ahead + ", verify_budget: 8"), conditions)
    off = predicted_tokens_per_s(topology(target=", draft_length: 0, draft_ahead: 6"), conditions)
    assert off == predicted_tokens_per_s(topology(target=", draft_length: 0"), conditions)


def test_free_passes_are_planned() -> None:
    """A microsecond each: a free drafter is never kept busy, a free target needs none. Both kinds at once are too much
    for a simulation: a slow request would last as long as millions of quick rounds."""
    drafter = short(topology(step_ms=0)).groups[0]
    assert drafter.n_full is None
    assert drafter.configured.cycle.seconds == pytest.approx(0.0201, rel=0.01)
    target = short(topology(verify="0"))
    assert target.plain_tokens_per_s == pytest.approx(1e6, rel=0.02)
    assert "do not speculate" in target.advice[0]
    both = short(topology(verify="0", step_ms=0, target=", draft_length: auto, lanes: auto"), in_flight=4)
    assert both.tokens_per_s > 0
    text = "version: 1\nname: mixed\ntargets:\n"
    for name, verify in (("quick", 0), ("slow", 30)):
        text += f"  - {{name: {name}, model: toy, engine: emulated, profile: {{verify_ms: {verify}}}}}\n"
    with pytest.raises(UserError, match="quick's passes are too short beside a request of the slowest target"):
        short(parse_topology(text, "mixed.yaml", Path()))


def test_json_keys_are_stable() -> None:
    """What scripts rely on; keys may be added here, never taken away."""
    made = to_json(short(topology(2)))
    assert json.loads(json.dumps(made)) == made
    assert set(made) >= {"format", "name", "emulated", "requests", "tokens_per_s", "plain_tokens_per_s", "targets"}
    assert set(made) >= {"drafters", "memory", "advice"}
    assert [target["name"] for target in made["targets"]] == ["t0", "t1"]
    assert set(made["targets"][0]) >= {
        "drafters", "lanes", "draft_length", "sessions_a_lane", "agreement", "rtt_ms", "draft_ms", "drafter_wait_ms",
        "verify_ms", "round_ms", "target_idle", "acceptance_length", "n_full", "n_break_even", "steady_tokens_per_s",
        "tokens_per_s", "plain_tokens_per_s", "ttft_ms", "inter_token_ms", "bunch_tokens", "bunch_gap_ms", "e2e_ms",
        "speculate", "best", "bytes_a_round", "bytes_per_s",
    }  # fmt: skip
    assert set(made["targets"][0]["ttft_ms"]) == {"mean", "p50", "p99", "std"}
    assert set(made["targets"][0]["best"]) == {"lanes", "draft_length", "tokens_per_s"}
    assert made["format"] == 1


def test_a_round_costs_less_than_a_hundred_bytes_each_way() -> None:
    """Alone in its frame, or with 15 others."""
    alone, together = traffic(3.36, 4, 1), traffic(3.36, 4, 16)
    assert together.up < alone.up < 100
    assert together.down < alone.down < 100
    assert traffic(3.36, 8, 1).down == pytest.approx(alone.down + 16)


def test_missing_numbers_are_named_with_how_to_measure_them() -> None:
    """One sentence for all nodes; nothing is guessed."""
    with pytest.raises(UserError) as caught:
        plan(real(), Conditions(rtt=0.01))
    text = str(caught.value)
    assert text.startswith("not known are t: verify_ms; d: step_ms and agreement: measure each with `paceline profile")
    assert "--profile NODE=FILE" in text
    assert "\n" not in text


def test_a_far_drafter_needs_a_round_trip_time() -> None:
    """On one machine it is 0.1 ms; between machines it is asked for."""
    profiles = {"t": Profile(verify_ms=20), "d": Profile(step_ms=2, agreement=0.7)}  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"t and d are on different machines: .*--rtt 10ms"):
        plan(real(), Conditions(16, 16), profiles)
    made = plan(real(), Conditions(16, 16, rtt=0.01), profiles)
    assert made.groups[0].group.rtt == 0.01
    assert made.groups[0].group.agreement == 0.7
    assert not made.inputs.emulated


def test_ngram_needs_only_an_agreement() -> None:
    """Its drafts cost next to nothing."""
    text = REAL.replace("model: org/small", "strategy: ngram")
    made = plan(real(text), Conditions(16, 16, rtt=0.0, agreement=0.4), {"t": Profile(verify_ms=20)})  # type: ignore[arg-type]
    assert made.groups[0].configured.cycle.draft < 0.001


def test_a_profile_for_nobody_is_refused() -> None:
    """A slip of the pen in NODE=FILE."""
    with pytest.raises(UserError, match="has no node x; it has d, t0"):
        plan(topology(), Conditions(), {"x": Profile()})


def test_profile_files_are_read_and_explained(tmp_path: Path) -> None:
    """YAML with the keys of `profile`; a wrong one is one sentence with the file's name."""
    good, bad = tmp_path / "good.yaml", tmp_path / "bad.yaml"
    good.write_text("step_ms: {1: 2.0, 8: 3.0}\nagreement: 0.7\n")
    bad.write_text("step_ms: fast\ncolour: red\n")
    assert read_profiles([f"d={good}"])["d"].step_ms.ms(8) == 3.0
    with pytest.raises(UserError, match="colour: is not a key of a profile"):
        read_profiles([f"d={bad}"])
    with pytest.raises(UserError, match="must be NODE=FILE"):
        read_profiles([str(good)])
    with pytest.raises(UserError, match="there is no such file"):
        read_profiles([f"d={tmp_path / 'none.yaml'}"])


def test_memory_is_the_arena_and_the_weights_of_a_local_model() -> None:
    """The embedded pair: layers × 2 × heads × dimension × 4 bytes × tokens, and the checkpoint's size."""
    star = load_topology(ROOT / "examples" / "star.yaml")
    found = memory(star.target("chat-a"))
    assert found is not None
    config = json.loads((ROOT / "models/tiny-target/config.json").read_text())
    dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    slot = config["num_hidden_layers"] * 2 * config["num_key_value_heads"] * dim * 4
    assert found.kv_tokens == 8 * 1024
    assert found.kv_bytes == 8 * 1024 * slot
    assert found.weight_bytes is not None
    assert found.weight_bytes > 1_000_000
    unknown = memory(real().target("t"))
    assert unknown is not None
    assert (unknown.kv_bytes, unknown.weight_bytes, unknown.kv_tokens) == (None, None, 32 * 4096)
    assert memory(topology().target("t0")) is None


def test_curves_show_where_the_drafter_is_full() -> None:
    """Four charts; in all, N targets make no more tokens from N_full on."""
    made = short(topology(16, drafter=", max_sessions: 64"))
    by_targets, by_k, by_rtt, by_flight = curves(made.inputs, made.groups[0].configured.setting)
    own = dict(zip(by_targets.xs, by_targets.lines[0].ys, strict=True))
    assert own[4.0] == pytest.approx(own[by_targets.xs[-1]])
    marks, plain = dict(by_targets.marks), by_targets.lines[1].ys
    assert marks["never idle from"] == made.groups[0].n_full
    assert marks["pays up to"] == made.groups[0].n_break_even
    assert by_targets.lines[0].ys[0] > plain[0]
    assert by_targets.lines[0].ys[-1] < plain[-1] < 2 * by_targets.lines[0].ys[-1]  # they cross, and both can be seen
    assert own[2.0] == pytest.approx(own[4.0] / 2, rel=0.15)
    assert by_k.xs == tuple(map(float, range(1, 17)))
    best, plain = by_rtt.lines[2].ys, by_rtt.lines[1].ys
    assert all(a >= b * (1 - 1e-9) for a, b in zip(best, plain, strict=True))
    assert list(best) == sorted(best, reverse=True)
    assert by_flight.here == 1


@pytest.mark.parametrize("name", ["emulated-star", "emulated-two-lane", "emulated-wan"])
def test_the_emulated_examples_have_a_plan(name: str) -> None:
    """As their first lines say, with short answers."""
    made = plan(
        load_topology(ROOT / "examples" / f"{name}.yaml"), Conditions(16, 32, rtt=0.02 if "wan" in name else None)
    )
    assert made.inputs.emulated
    assert made.tokens_per_s > made.plain_tokens_per_s


@pytest.mark.parametrize("name", ["starsd", "minedraft"])
def test_the_papers_settings_are_valid_and_say_what_to_measure(name: str) -> None:
    """Real models on real GPUs: nothing is known of them here."""
    paper = load_topology(ROOT / "examples" / "papers" / f"{name}.yaml", look_at_keys=False)
    with pytest.raises(UserError, match="not known are"):
        plan(paper, Conditions(rtt=0.001))


def test_a_deadline_between_two_ticks_of_the_simulation_ends() -> None:
    """Event times are rounded to the nanosecond, deadlines are not: a busy star of 16 is planned all the same."""
    topology = load_topology(Path(__file__).parents[2] / "examples" / "emulated-star.yaml")
    assert plan(topology, Conditions(in_flight=4)).tokens_per_s > 1000


def test_draft_ahead_is_reckoned_for_a_target_alone() -> None:
    """One request, V = 16 ms, four tokens in half of it, a link of half of it: 1.36 × the best without, as measured."""
    near = topology(target=", draft_length: 5, draft_ahead: 6", verify="16", step_ms=2, agreement=0.8)
    (words,) = [one for one in short(near, rtt=0.008).advice if "draft_ahead" in one]
    assert "53% of the rounds" in words and "k = 5" in words
    inputs = gather(near, Conditions(rtt=0.008), {})
    found = ahead_estimate(inputs.groups[0], inputs.drafters["d"], 6)
    assert found.tokens_per_s == pytest.approx(146, rel=0.03)
    alone = topology(target=", draft_length: 5", verify="16", step_ms=2, agreement=0.8)
    assert any("draft_ahead: 7 with k = 6 would make about 150" in one for one in short(alone, rtt=0.008).advice)
    many = topology(4, target=", draft_length: 5, draft_ahead: 6", verify="16", step_ms=2, agreement=0.8)
    assert any("it adds to them where the drafter is idle" in one for one in short(many, rtt=0.008).advice)
    crowd = topology(target=", draft_length: 5", verify="16", step_ms=2, agreement=0.8)
    assert not any("draft_ahead" in one for one in short(crowd, rtt=0.008, in_flight=16).advice)


def test_a_plan_promises_no_draft_ahead_where_the_drafter_cannot() -> None:
    """It is not proposed; where another drafter's sake has it set, it brings nothing here; it is shown where set."""
    text = """\
version: 1
name: x
drafters:
  - {name: n, strategy: ngram}
  - {name: d, model: /absent}
targets:
  - {name: t, model: /absent, draft_length: 5, drafters: {names: NAMES}}
"""
    drafter = Profile(step_ms=2, agreement=0.8)
    profiles = {"t": Profile(verify_ms=16), "d": drafter, "n": drafter}
    conditions = Conditions(32, 64, rtt=0.008)

    def advice(names: str, more: str = "") -> list[str]:
        spec = parse_topology(
            text.replace("NAMES", names).replace("draft_length: 5", f"draft_length: 5{more}"), "x", Path()
        )
        return [one for one in plan(spec, conditions, profiles).advice if "draft_ahead" in one]

    assert advice("[n]") == []
    assert "draft_ahead: 7 with k = 6" in advice("[d]")[0]
    assert advice("[n, d]", ", draft_ahead: 6") == ["t: draft_ahead brings nothing at n, which cannot draft ahead."]
