"""Nodes that are told to leave: what runs may finish, nobody waits for who is gone, the second order ends at once."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from .conftest import EmulatedStar, alive, wait_for

pytestmark = pytest.mark.integration

Star = Callable[..., EmulatedStar]


class Stream:
    """A streamed completion, read on a thread of its own."""

    def __init__(self, url: str, max_tokens: int) -> None:
        self.text = ""
        self.error: dict[str, Any] | None = None
        self.times: list[float] = []  # of each event
        self._body = {"prompt": "abc", "max_tokens": max_tokens, "stream": True, "temperature": 0, "ignore_eos": True}
        self._thread = threading.Thread(target=self._read, args=(url,))
        self._thread.start()

    def _read(self, url: str) -> None:
        with httpx.stream("POST", f"{url}/v1/completions", json=self._body, timeout=60, trust_env=False) as response:
            assert response.status_code == 200, response.read()
            for line in response.iter_lines():
                self._take(line.removeprefix("data: "))

    def _take(self, data: str) -> None:
        if not data or data == "[DONE]":
            return
        event = json.loads(data)
        self.error = event.get("error")
        if self.error is None:
            self.times.append(time.monotonic())
            self.text += event["choices"][0]["text"]

    def end(self) -> Stream:
        self._thread.join(60)
        assert not self._thread.is_alive()
        return self


def serving(star: EmulatedStar) -> tuple[subprocess.Popen[str], subprocess.Popen[str]]:
    """(drafter, target), linked."""
    nodes = star.node("drafter", "drafter"), star.node("target", "target-0")
    wait_for(lambda: star.status("target-0").get("drafters") == {"drafter": True}, "the link")
    return nodes


def ended(process: subprocess.Popen[str], *words: str) -> float:
    """Waits for the end in good order, after it has said all of these words; seconds it took."""
    start = time.monotonic()
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert "Traceback" not in err and "started again" not in err
    assert [word for word in words if word not in out + err] == [], out + err
    return time.monotonic() - start


def target(**options: Any) -> Callable[[dict[str, Any]], None]:
    """An edit of the first target's section."""
    return lambda topology: topology["targets"][0].update(options)


def test_a_target_lets_what_runs_finish_and_refuses_the_rest(emulated: Star) -> None:
    """SIGTERM: the running text is complete and right; queued and new calls get 503; the drafter is left clean."""
    star = emulated(targets=1, verify_ms=20.0)
    star.edit(target(max_sessions=1, drain=20))
    plain = emulated(targets=1, verify_ms=0.0).run("--no-drafter", "--max-tokens", "400", "--prompt", "abc")
    _, process = serving(star)
    running = Stream(star.api[0], 400)
    wait_for(lambda: len(running.times) > 2, "tokens")
    queued: list[httpx.Response] = []
    call = {"prompt": "x", "max_tokens": 5}
    url = f"{star.api[0]}/v1/completions"
    waiting = threading.Thread(target=lambda: queued.append(httpx.post(url, json=call, timeout=60, trust_env=False)))
    waiting.start()
    wait_for(lambda: _health(star)[1]["queued"] == 1, "the queue")
    process.terminate()
    wait_for(lambda: _health(star)[0] == 503, "the health check to say that it closes")
    waiting.join(2)
    for response in (*queued, httpx.post(url, json=call, trust_env=False)):
        assert response.status_code == 503 and int(response.headers["Retry-After"]) >= 1
        assert response.json()["error"]["code"] == "shutting_down"
    assert len(queued) == 1 and _health(star)[1]["status"] == "closing"
    assert star.status("target-0")["state"] == "stopping"
    running.end()
    assert running.error is None and running.text == plain["outputs"][0]["text"]
    ended(process, "stopping: waits up to 20 s for 1 request and refuses 1 in the queue", "all requests have ended")
    wait_for(lambda: star.status("drafter")["live_sessions"] == 0, "the drafter to be left clean", 5.0)


def _health(star: EmulatedStar) -> tuple[int, dict[str, Any]]:
    response = httpx.get(f"{star.api[0]}/health", trust_env=False)
    return response.status_code, response.json()


def test_what_does_not_finish_in_time_ends_with_a_reason(emulated: Star) -> None:
    """After `drain` seconds a stream gets an error event, and the process leaves."""
    star = emulated(targets=1, verify_ms=20.0)
    star.edit(target(drain=1))
    _, process = serving(star)
    running = Stream(star.api[0], 4000)
    wait_for(lambda: len(running.times) > 2, "tokens")
    process.terminate()
    assert 0.9 < ended(process, "cut 1 request after 1 s") < 6
    running.end()
    assert running.error is not None
    assert (running.error["code"], running.error["message"]) == ("shutting_down", "the target is shutting down")
    wait_for(lambda: star.status("drafter")["live_sessions"] == 0, "the drafter to be left clean", 5.0)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_second_order_ends_at_once(emulated: Star, number: signal.Signals) -> None:
    """With half a minute to drain, a second Ctrl-C or SIGTERM is what counts."""
    star = emulated(targets=1, verify_ms=20.0)
    star.edit(target(drain=30))
    _, process = serving(star)
    running = Stream(star.api[0], 4000)
    wait_for(lambda: len(running.times) > 2, "tokens")
    process.send_signal(number)
    wait_for(lambda: star.status("target-0")["state"] == "stopping", "the drain")
    more = len(running.times)
    wait_for(lambda: len(running.times) > more + 30, "tokens while it drains")  # more than half a second
    process.send_signal(number)
    assert ended(process) < 6
    assert running.end().error is not None


def test_a_drafter_that_leaves_is_not_waited_for(emulated: Star) -> None:
    """SIGTERM of the drafter in mid-stream: the text stays the same and comes on, though the deadline is long."""
    star = emulated(targets=1, verify_ms=5.0)
    star.edit(target(deadline=2.0))
    plain = emulated(targets=1, verify_ms=0.0).run("--no-drafter", "--max-tokens", "800", "--prompt", "abc")
    drafter, process = serving(star)
    running = Stream(star.api[0], 800)
    wait_for(lambda: star.status("drafter").get("tokens_drafted", 0) > 20, "drafts")
    left_at = time.monotonic()
    drafter.terminate()
    ended(drafter)
    running.end()
    after = [now for now in running.times if now > left_at]
    assert len(after) > 10, "the text was over too soon"
    assert max(b - a for a, b in zip(running.times, running.times[1:], strict=False)) < 1.0
    assert running.text == plain["outputs"][0]["text"]
    process.terminate()
    ended(process)


def test_up_passes_both_orders_on(emulated: Star) -> None:
    """The first Ctrl-C of `up` lets targets finish, the second ends all; no process is left."""
    star = emulated(targets=1, verify_ms=20.0)
    star.edit(target(drain=30))
    up = star.start("up", str(star.path), "--run-dir", str(star.run_dir))
    wait_for(lambda: star.status("target-0").get("drafters") == {"drafter": True}, "the star")
    running = Stream(star.api[0], 4000)
    wait_for(lambda: len(running.times) > 2, "tokens")
    pids = star.pids()
    up.send_signal(signal.SIGINT)
    wait_for(lambda: star.status("target-0")["state"] == "stopping", "the drain")
    more = len(running.times)
    wait_for(lambda: len(running.times) > more + 40, "tokens while it drains")
    assert star.status("drafter")["state"] == "running"
    up.send_signal(signal.SIGINT)
    assert ended(up, "stopping, waiting up to 30 s for requests; Ctrl-C again ends at once") < 8
    assert running.end().error is not None and not any(alive(pid) for pid in pids)


@pytest.mark.parametrize("nohup", [False, True])
def test_a_node_leaves_with_its_terminal(emulated: Star, nohup: bool) -> None:
    """Where the terminal is closed SIGHUP means to leave; under nohup, or without a terminal, to reload."""
    star = emulated(targets=1)
    command = [sys.executable, "-m", "paceline", "drafter", str(star.path), "drafter", "--run-dir", str(star.run_dir)]
    ignore = "signal.signal(signal.SIGHUP, signal.SIG_IGN); " if nohup else ""
    takes_terminal = "import fcntl, os, signal, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    program = f"{takes_terminal}{ignore}os.execv(sys.executable, {command!r})"
    outer, inner = pty.openpty()
    arguments = [sys.executable, "-c", program]
    with (star.folder / "err").open("w") as err:
        process = subprocess.Popen(arguments, stdin=inner, stdout=err, stderr=err, start_new_session=True)
    try:
        wait_for(lambda: star.status("drafter").get("state") == "running", "the drafter")
        os.close(inner)
        os.close(outer)
        if nohup:
            wait_for(lambda: "has read its topology again" in (star.folder / "err").read_text(), "the reload", 10)
            process.terminate()
        assert process.wait(20) == 0
    finally:
        process.kill()
