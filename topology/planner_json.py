"""A plan as JSON: one entry a target, times in milliseconds. Keys are only ever added within one `format`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from paceline.topology.planner import FORMAT, GroupPlan, Plan
from paceline.topology.planner_inputs import Inputs
from paceline.topology.planner_steady import Setting
from paceline.topology.simulation_world import Spread


def to_json(plan: Plan) -> dict[str, Any]:
    """What `paceline plan --json` prints."""
    conditions = plan.inputs.conditions
    return {
        "format": FORMAT,
        "name": plan.name,
        "emulated": plan.inputs.emulated,
        "requests": {
            "prompt_tokens": conditions.prompt_tokens,
            "output_tokens": conditions.output_tokens,
            "in_flight": conditions.in_flight,
        },
        "tokens_per_s": plan.tokens_per_s,
        "plain_tokens_per_s": plan.plain_tokens_per_s,
        "targets": [_target(name, one, plan.inputs) for one in plan.groups for name in one.group.names],
        "drafters": [asdict(drafter) for drafter in plan.drafters],
        "memory": [asdict(node) for node in plan.memory],
        "advice": list(plan.advice),
    }


def _target(name: str, one: GroupPlan, inputs: Inputs) -> dict[str, Any]:
    group, rates, sees = one.group, one.configured, one.sees
    cycle, load = rates.cycle, rates.load
    return {
        "name": name,
        "drafters": list(group.drafters),
        **_setting(rates.setting),
        "draft_ahead": group.draft_ahead,
        "verify_budget": group.verify_budget,
        "sessions_a_lane": load.sessions / load.filled,
        "agreement": group.agreement if group.drafters else None,
        "rtt_ms": group.rtt * 1e3,
        "draft_ms": cycle.draft * 1e3,
        "drafter_wait_ms": cycle.wait * 1e3,
        "verify_ms": cycle.verify * 1e3,
        "round_ms": cycle.seconds * 1e3,
        "target_idle": max(0.0, 1.0 - load.filled * cycle.verify / cycle.seconds),
        "acceptance_length": rates.acceptance,
        "n_full": one.n_full,
        "n_break_even": one.n_break_even,
        "steady_tokens_per_s": rates.tokens_per_s,
        "tokens_per_s": sees.tokens_per_s,
        "plain_tokens_per_s": one.plain.tokens_per_s,
        "ttft_ms": _spread(sees.ttft_ms),
        "inter_token_ms": _spread(sees.token_ms),
        "bunch_tokens": sees.bunch.mean,
        "bunch_gap_ms": _spread(sees.gap_ms),
        "e2e_ms": _spread(sees.e2e_ms),
        "undrafted_rounds": sees.undrafted,
        "speculate": one.speculate,
        "best": {**_setting(one.best), "tokens_per_s": one.best_sees.tokens_per_s},
        "bytes_a_round": asdict(one.traffic) if one.traffic else None,
        "bytes_per_s": _bytes_per_s(one),
    }


def _setting(setting: Setting) -> dict[str, int]:
    return {"lanes": setting.lanes, "draft_length": setting.draft_length}


def _spread(spread: Spread) -> dict[str, float]:
    return {"mean": spread.mean, "p50": spread.p50, "p99": spread.p99, "std": spread.std}


def _bytes_per_s(one: GroupPlan) -> dict[str, float] | None:
    if one.traffic is None:
        return None
    rounds = one.configured.load.drafted / one.configured.cycle.seconds
    return {"up": one.traffic.up * rounds, "down": one.traffic.down * rounds}
