"""SIGHUP: what a running node can take over from its topology file changes, a wrong file changes nothing."""

from __future__ import annotations

import signal
import ssl
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from paceline.topology.keyring import Keyring

from .conftest import EmulatedStar, free_ports, wait_for

pytestmark = pytest.mark.integration

Star = Callable[..., EmulatedStar]


def log_of(star: EmulatedStar, name: str) -> str:
    return (star.run_dir / f"{name}.log").read_text()


def started(star: EmulatedStar) -> subprocess.Popen[str]:
    """`paceline up`, linked."""
    process = star.start("up", str(star.path), "--run-dir", str(star.run_dir))
    wait_for(lambda: star.status("target-0").get("drafters", {}).get("drafter"), "the star")
    assert process.stdout is not None
    assert any(line.startswith("ready") for line in process.stdout)
    return process


def reload(star: EmulatedStar, process: subprocess.Popen[str], name: str, words: str) -> None:
    """SIGHUP, until the node's log has the words."""
    process.send_signal(signal.SIGHUP)
    wait_for(lambda: words in log_of(star, name), f"{name} to log {words!r}", 10.0)


def complete(star: EmulatedStar, key: str | None = None) -> httpx.Response:
    body = {"prompt": "abc", "max_tokens": 60, "temperature": 0, "ignore_eos": True}
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return httpx.post(f"{star.api[0]}/v1/completions", json=body, headers=headers, timeout=30, trust_env=False)


def test_a_star_takes_over_what_it_can(emulated: Star, tmp_path: Path) -> None:
    """`up` passes SIGHUP on: draft length, weights and API key change, the text stays; the rest waits for a start."""
    key = tmp_path / "api.key"
    key.write_text("the first of two keys\n")
    key.chmod(0o600)
    star = emulated(targets=1, api={"key_file": str(key)})
    process = started(star)
    text = complete(star, "the first of two keys").json()["choices"][0]["text"]
    wait_for(lambda: star.status("target-0")["drafted_tokens"] > 0, "drafts")

    def change(topology: dict[str, Any]) -> None:
        topology["targets"][0].update(draft_length=0, weight=3, max_sessions=7)

    star.edit(change)
    key.write_text("the second of two keys\n")
    reload(star, process, "target-0", "draft_length, weight, the API key changed; at the next start: max_sessions")
    wait_for(lambda: "weights changed" in log_of(star, "drafter"), "the drafter's new weights")
    assert "draft_length" in line_of(process, "target-0: has read its topology again")  # on the console of `up` as well
    wait_for(lambda: complete(star, "the first of two keys").status_code == 401, "the old key to be worth nothing")
    before = star.status("target-0")["drafted_tokens"]
    answer = complete(star, "the second of two keys")
    assert answer.json()["choices"][0]["text"] == text
    total = star.status("target-0")["tokens"]
    wait_for(lambda: star.status("target-0")["tokens"] >= max(total, 120), "the counts")
    assert star.status("target-0")["drafted_tokens"] == before


def test_a_wrong_file_changes_nothing(emulated: Star) -> None:
    """One sentence with file and line, from a node on its own as from `up`; everything runs on as it was."""
    star = emulated(targets=1)
    target = star.node("target", "target-0")
    wait_for(lambda: star.status("target-0").get("state") == "running", "the target")
    text = complete(star).json()["choices"][0]["text"]
    star.path.write_text(star.path.read_text().replace("engine: emulated", "draft_length: 1, engine: emulated: 1"))
    target.send_signal(signal.SIGHUP)
    assert f"nothing is changed: {star.path}:" in line_of(target, "nothing is changed")
    assert complete(star).json()["choices"][0]["text"] == text
    target.terminate()
    target.communicate(timeout=30)
    assert target.returncode == 0


@pytest.mark.parametrize("held", [b"\n", b"short\n", b"\xff\xfe" * 20])
def test_a_key_file_that_holds_no_key_changes_nothing(emulated: Star, tmp_path: Path, held: bytes) -> None:
    """Half-written, or binary: the key of before is wanted, and neither none nor an empty one will do."""
    key = tmp_path / "api.key"
    key.write_text("the first of two keys\n")
    key.chmod(0o600)
    star = emulated(targets=1, api={"key_file": str(key)})
    target = star.node("target", "target-0")
    wait_for(lambda: star.status("target-0").get("state") == "running", "the target")
    key.write_bytes(held)
    target.send_signal(signal.SIGHUP)
    assert f"{key} is no" in line_of(target, "nothing is changed")
    assert [complete(star, word).status_code for word in (None, "x", "the first of two keys")] == [401, 401, 200]
    target.terminate()
    target.communicate(timeout=30)
    assert target.returncode == 0


def test_up_does_not_pass_a_wrong_file_on(emulated: Star) -> None:
    """It says what is wrong itself; its nodes hear nothing."""
    star = emulated(targets=1)
    process = started(star)
    star.edit(lambda topology: topology["targets"][0].update(max_sessions=0))
    process.send_signal(signal.SIGHUP)
    assert "targets[0].max_sessions" in line_of(process, "nothing is changed")
    assert "nothing is changed" not in log_of(star, "target-0")
    assert complete(star).status_code == 200


def test_a_renewed_certificate_of_the_api_is_shown(emulated: Star, tmp_path: Path) -> None:
    """HTTPS: after SIGHUP new connections get the new one; a file that is no certificate is refused."""
    keys = Keyring(tmp_path, tmp_path / "deployment.key")
    keys.fill("emulated", {"api": ()})
    files = {"cert": str(tmp_path / "api.pem"), "key": str(tmp_path / "api.key")}
    star = emulated(targets=1, api=files)
    process = star.node("target", "target-0")
    wait_for(lambda: star.status("target-0").get("state") == "running", "the target")
    host, port = star.api[0].removeprefix("http://").split(":")
    first = ssl.get_server_certificate((host, int(port)))
    assert first.strip() in Path(files["cert"]).read_text()
    Path(files["cert"]).write_text("nonsense")
    process.send_signal(signal.SIGHUP)
    assert "nothing is changed" in line_of(process, "nothing is changed")
    assert ssl.get_server_certificate((host, int(port))) == first
    for file in tmp_path.glob("api.*"):
        file.unlink()
    keys.fill("emulated", {"api": ()})
    process.send_signal(signal.SIGHUP)
    assert "nothing changed; certificates were read again" in line_of(process, "has read its topology again")
    second = ssl.get_server_certificate((host, int(port)))
    assert second != first and second.strip() in Path(files["cert"]).read_text()


def line_of(process: subprocess.Popen[str], words: str) -> str:
    """The first line on stderr that has the words; a process that never says them is killed."""
    watchdog = threading.Timer(30, process.kill)
    watchdog.start()
    try:
        assert process.stderr is not None
        return next((line for line in process.stderr if words in line), "")
    finally:
        watchdog.cancel()


def test_drafters_come_and_go(emulated: Star) -> None:
    """A drafter that is added to the file is linked and used, one that is taken out is left, without a restart."""
    star = emulated(targets=1)
    process = started(star)
    text = complete(star).json()["choices"][0]["text"]
    port = free_ports(1)[0]

    def add(topology: dict[str, Any]) -> None:
        second = {**topology["drafters"][0], "name": "second", "listen": f"127.0.0.1:{port}"}
        topology["drafters"].append(second)
        topology["targets"][0]["drafters"]["names"] = ["second", "drafter"]

    star.edit(add)
    star.node("drafter", "second")
    reload(star, process, "target-0", "drafters.names changed")
    wait_for(lambda: star.status("target-0")["drafters"] == {"second": True, "drafter": True}, "both links")
    assert complete(star).json()["choices"][0]["text"] == text
    wait_for(lambda: star.status("second").get("tokens_drafted", 0) > 0, "the second drafter's drafts")

    def remove(topology: dict[str, Any]) -> None:
        topology["targets"][0]["drafters"]["names"] = ["second"]

    star.edit(remove)
    reload(star, process, "drafter", "the target says goodbye: target 'target-0' does not use this drafter any more")
    wait_for(lambda: star.status("target-0")["drafters"] == {"second": True}, "the first one to be left")
    assert complete(star).json()["choices"][0]["text"] == text
