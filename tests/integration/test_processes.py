"""The commands with real processes and sockets, on the toy language in float64, so that identity is exact."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from .conftest import EmulatedStar, alive, wait_for

pytestmark = pytest.mark.integration

Star = Callable[..., EmulatedStar]
PROMPTS = [option for text in ("one", "two", "three", "four", "five") for option in ("--prompt", text)]


def texts(report: dict) -> list[tuple[str, list[int]]]:
    return [(output["text"], output["token_ids"]) for output in report["outputs"]]


@pytest.mark.parametrize(
    "options", [(), ("--temperature", "0.8", "--seed", "5"), ("--top-p", "0.7", "--temperature", "1")]
)
def test_same_text_with_and_without_a_drafter(emulated: Star, options: tuple[str, ...]) -> None:
    """A drafter changes no token, is used, and leaves no session at either end."""
    star = emulated()
    plain = star.run("--no-drafter", "--max-tokens", "60", *PROMPTS, *options)
    drafted = star.run("--max-tokens", "60", *PROMPTS, *options)
    assert texts(plain) == texts(drafted)
    assert plain["drafters"] == []
    assert all(target["acceptance_length"] > 1.2 for target in drafted["targets"])
    assert [node["live_sessions_at_end"] for node in drafted["targets"] + drafted["drafters"]] == [0, 0, 0]


def test_the_report_has_every_promised_key(emulated: Star) -> None:
    """`run --json` prints one object with the documented shape."""
    report = emulated().run("--max-tokens", "20", *PROMPTS)
    output, target, drafter = report["outputs"][0], report["targets"][0], report["drafters"][0]
    assert set(output) == {"target", "prompt", "text", "token_ids", "finish_reason", "ttft_ms", "itl_ms"}
    assert set(output["itl_ms"]) == {"p50", "p99", "std"}
    assert len(output["token_ids"]) == 20 and output["finish_reason"] == "length"
    assert {"name", "tokens_per_s", "acceptance_length", "rounds", "fallback_rounds"} <= set(target)
    assert {"live_sessions_at_end", "verify_ms"} <= set(target) and target["verify_ms"]["p50"] >= 1.0
    counted = {"name", "utilization", "sessions_peak", "live_sessions_at_end", "queue_ms", "draft_ms"}
    assert counted | {"bytes_in", "bytes_out"} <= set(drafter)
    assert drafter["sessions_peak"] == 5 and drafter["bytes_in"] > 0
    assert [output["target"] for output in report["outputs"][:3]] == ["target-0", "target-1", "target-0"]


def test_all_nodes_in_one_process_over_the_memory_link(emulated: Star) -> None:
    """`transport: memory` runs the same star as threads of one process."""
    star = emulated(transport="memory")
    plain = star.run("--no-drafter", "--max-tokens", "40", *PROMPTS)
    drafted = star.run("--max-tokens", "40", *PROMPTS)
    assert texts(plain) == texts(drafted)
    assert drafted["targets"][0]["acceptance_length"] > 1.2
    assert len(set(star.pids())) == 1


def test_a_run_shows_the_key_that_its_targets_want(emulated: Star, tmp_path: Path) -> None:
    """With `api.key_file`, `run` works and a stranger is refused."""
    key = tmp_path / "api.key"
    key.write_text("open sesame, open wide\n")
    key.chmod(0o600)
    star = emulated(targets=1, api={"key_file": str(key)})
    assert len(star.run("--max-tokens", "5", "--prompt", "x")["outputs"][0]["token_ids"]) == 5
    star.start("up", str(star.path), "--run-dir", str(star.run_dir))
    wait_for(lambda: _up(star.api[0]), "the star")
    body = {"prompt": "abc", "max_tokens": 3}
    assert httpx.post(f"{star.api[0]}/v1/completions", json=body, trust_env=False).status_code == 401


def test_a_killed_drafter_costs_no_token_and_comes_back(emulated: Star) -> None:
    """SIGKILL in the middle of a run: same text, a new drafter process, speculation again."""
    tokens = ("--max-tokens", "2000")
    plain = emulated(verify_ms=0.0).run("--no-drafter", *tokens, *PROMPTS)  # the same language, only faster
    star = emulated(verify_ms=15.0)
    process = star.start("run", str(star.path), "--json", "--run-dir", str(star.run_dir), *tokens, *PROMPTS)
    first = wait_for(lambda: star.status("drafter").get("tokens_drafted", 0) > 40 and star.status("drafter"), "drafts")
    os.kill(first["pid"], signal.SIGKILL)
    again = wait_for(
        lambda: star.status("drafter").get("pid") != first["pid"] and star.status("drafter").get("tokens_drafted"),
        "drafts of a new process",
    )
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0 and again > 0, err
    report = json.loads(out)
    assert texts(report) == texts(plain)
    assert report["drafters"][0]["restarts"] == 1
    assert [node["live_sessions_at_end"] for node in report["targets"] + report["drafters"]] == [0, 0, 0]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_leaves_nothing_behind(emulated: Star, number: signal.Signals) -> None:
    """Ctrl-C and SIGTERM stop every node; the exit code says so."""
    star = emulated(verify_ms=50.0)
    process = star.start("run", str(star.path), "--run-dir", str(star.run_dir), "--max-tokens", "3000", *PROMPTS)
    wait_for(lambda: star.status("target-0").get("tokens", 0) > 5, "the first tokens")
    pids = star.pids()
    assert len(pids) == 3 and all(alive(pid) for pid in pids)
    process.send_signal(number)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert not any(alive(pid) for pid in pids)


def test_children_do_not_outlive_a_killed_parent(emulated: Star) -> None:
    """When `paceline run` itself is killed with SIGKILL, its nodes stop by themselves."""
    star = emulated(verify_ms=50.0)
    process = star.start("run", str(star.path), "--run-dir", str(star.run_dir), "--max-tokens", "3000", *PROMPTS)
    wait_for(lambda: star.status("target-0").get("tokens", 0) > 5, "the first tokens")
    pids = star.pids()
    process.kill()
    process.communicate()
    wait_for(lambda: not any(alive(pid) for pid in pids), "the nodes to end", 15.0)


def test_a_killed_target_frees_its_sessions_at_the_drafter(emulated: Star) -> None:
    """Within five seconds the drafter holds nothing of it; the run says who ended."""
    star = emulated(verify_ms=20.0)
    drafter = star.start("drafter", str(star.path), "drafter", "--run-dir", str(star.run_dir))
    names = ("target-0", "target-1")
    targets = [star.start("target", str(star.path), name, "--run-dir", str(star.run_dir)) for name in names]
    for url in star.api:
        wait_for(lambda url=url: _up(url), f"{url} and its drafter")
    with httpx.Client(trust_env=False) as client:
        body = {"prompt": "abc", "max_tokens": 3000, "stream": True, "temperature": 0}
        with client.stream("POST", f"{star.api[0]}/v1/completions", json=body) as response:
            lines = response.iter_lines()  # kept: a generator that is dropped closes the stream
            assert next(lines)
            wait_for(lambda: star.status("drafter").get("live_sessions") == 1, "the session at the drafter")
            targets[0].kill()
            wait_for(lambda: star.status("drafter").get("live_sessions") == 0, "the drafter to free it", 5.0)
        answer = client.post(f"{star.api[1]}/v1/completions", json={"prompt": "abc", "max_tokens": 5}).json()
    assert answer["usage"]["completion_tokens"] == 5
    for process in (drafter, targets[1]):
        process.terminate()
        process.communicate(timeout=20)
        assert process.returncode == 0


def _up(url: str) -> bool:
    try:
        health = httpx.get(f"{url}/health", trust_env=False).json()
    except httpx.HTTPError:
        return False
    return health["status"] == "ok" and health["drafters"] == {"drafter": "up"}


def test_up_serves_until_it_is_told_to_stop(emulated: Star) -> None:
    """`paceline up` keeps the star running for any HTTP client and starts a dead node again."""
    star = emulated()
    process = star.start("up", str(star.path), "--run-dir", str(star.run_dir))
    wait_for(lambda: _up(star.api[0]), "the star")
    body = {"prompt": "abc", "max_tokens": 30, "temperature": 0}
    first = httpx.post(f"{star.api[0]}/v1/completions", json=body, trust_env=False).json()
    pid = star.status("target-0")["pid"]
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: star.status("target-0").get("pid") != pid and _up(star.api[0]), "the target's return")
    second = httpx.post(f"{star.api[0]}/v1/completions", json=body, trust_env=False).json()
    assert first["choices"][0]["text"] == second["choices"][0]["text"]
    pids = star.pids()
    process.terminate()
    out, err = process.communicate(timeout=30)
    assert process.returncode == 0, err
    assert "ready; Ctrl-C stops everything" in out
    assert not any(alive(pid) for pid in pids)


def test_a_port_in_use_is_one_sentence_and_exit_2(emulated: Star) -> None:
    """The node that cannot listen ends the run, and says which port."""
    star = emulated()
    port = int(star.api[0].rpartition(":")[2])
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        process = star.start("run", str(star.path), "--run-dir", str(star.run_dir), "--prompt", "x")
        _, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert str(port) in err and "in use" in err and "Traceback" not in err
    assert len(err.strip().splitlines()) == 1
