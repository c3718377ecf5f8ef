"""Starting and stopping processes, and what goes wrong on the way."""

from __future__ import annotations

import asyncio
import shutil
import signal
import sys
from pathlib import Path

import anyio
import pytest

from paceline.core.errors import PacelineError
from paceline.topology import supervisor as supervisor_module
from paceline.topology.supervisor import Node, Supervisor

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def test_a_process_that_cannot_be_started_is_a_failure(tmp_path: Path) -> None:
    """Nobody waits for it to become ready."""
    async with Supervisor(tmp_path) as supervisor:
        supervisor.start(Node("node", ("/no/such/program",)))
        with pytest.raises(PacelineError, match="node cannot be started"):
            await supervisor.wait_ready(["node"], timeout=10)


def python(program: str) -> tuple[str, ...]:
    """A node that says that it is ready and then does as it is told here."""
    notify = "from paceline.topology.process import notify; notify('READY=1'); "
    return (sys.executable, "-c", "import os, signal, sys, time; " + notify + program)


async def test_a_node_has_as_long_as_it_may_drain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that needs longer than the grace is not killed before its drain is over; one that hangs is, after both."""
    monkeypatch.setattr(supervisor_module, "STOP_SECONDS", 0.4)
    slow = "signal.signal(signal.SIGTERM, lambda *_: (time.sleep(1), sys.exit(0))); time.sleep(60)"
    hangs = "signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
    async with Supervisor(tmp_path) as supervisor:
        children = [
            supervisor.start(Node("slow", python(slow), drain=5.0)),
            supervisor.start(Node("hangs", python(hangs))),
        ]
        await supervisor.wait_ready(["slow", "hangs"])
        await supervisor.stop(["slow"])
        await supervisor.stop(["hangs"])
    assert [child.process.returncode for child in children if child.process] == [0, -signal.SIGKILL]


async def test_a_log_that_cannot_be_opened_costs_the_log_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A node that dies is started again even where there is no room for a log any more."""
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    async with Supervisor(run_dir) as supervisor:
        child = supervisor.start(Node("node", python("time.sleep(60)"), restart=True))
        await supervisor.wait_ready(["node"])
        shutil.rmtree(run_dir)
        assert child.process is not None
        child.process.kill()
        with anyio.fail_after(30):
            while not (child.restarts and child.ready.is_set()):
                await anyio.sleep(0.02)
        supervisor.check()
    assert "what node says is lost" in caplog.text


async def test_a_node_that_speaks_on_is_heard(tmp_path: Path) -> None:
    """Reloads and stops are told to the supervisor as well; its socket never fills up."""
    talk = "[notify('STATUS=%d' % n) for n in range(500)]; open('done', 'w').close(); time.sleep(60)"
    done = tmp_path / "done"
    async with Supervisor(tmp_path) as supervisor:
        supervisor.start(Node("node", python(talk.replace("'done'", repr(str(done))))))
        await supervisor.wait_ready(["node"])
        with anyio.fail_after(30):
            while not done.exists():
                await anyio.sleep(0.02)


async def test_who_ends_while_everything_stops_is_not_started_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The second Ctrl-C ends drafters before it is their turn: nobody misses them, or says so."""
    leaves = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); time.sleep(60)"
    async with Supervisor(tmp_path) as supervisor:
        child = supervisor.start(Node("node", python(leaves), restart=True))
        await supervisor.wait_ready(["node"])
        supervisor.leaving = True
        with anyio.fail_after(30):
            while not child.gone.is_set():  # its handler may not be there yet
                supervisor.pass_on(signal.SIGTERM)
                await anyio.sleep(0.05)
        supervisor.check()
    assert child.restarts == 0 and "started again" not in caplog.text


async def test_what_a_node_says_of_itself_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """STATUS=… is for the operator, who looks at the supervisor."""
    caplog.set_level("INFO")
    async with Supervisor(tmp_path) as supervisor:
        supervisor.start(Node("node", python("notify('STATUS=has read it'); time.sleep(60)")))
        with anyio.fail_after(30):
            while "node: has read it" not in caplog.text:
                await anyio.sleep(0.02)


async def test_a_node_whose_port_is_taken_when_it_is_started_again_is_tried_until_it_is_free(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It ran before, so its input was right: exit code 2 now passes, and its sentence is logged."""
    taken = tmp_path / "taken"
    program = (
        f"import pathlib; taken = pathlib.Path({str(taken)!r})\n"
        "if taken.exists(): taken.unlink(); print('port 7070 is in use'); sys.exit(2)\n"
        "from paceline.topology.process import notify; notify('READY=1'); time.sleep(60)"
    )
    node = Node("node", (sys.executable, "-c", f"import os, signal, sys, time\n{program}"), restart=True)
    async with Supervisor(tmp_path) as supervisor:
        child = supervisor.start(node)
        await supervisor.wait_ready(["node"])
        taken.touch()
        assert child.process is not None
        child.process.kill()
        with anyio.fail_after(30):
            while not (child.restarts == 2 and child.ready.is_set()):
                await anyio.sleep(0.02)
        supervisor.check()
    assert "node ended (port 7070 is in use) and is started again" in caplog.text


async def test_a_node_that_dies_while_others_still_start_is_not_late(tmp_path: Path) -> None:
    """It was ready once and is being started again when the last one becomes ready."""
    first = Node("first", python("time.sleep(60)"), restart=True)
    last = Node("last", (sys.executable, "-c", f"import time; time.sleep(1.5)\n{python('time.sleep(60)')[2]}"))
    async with Supervisor(tmp_path) as supervisor:
        child = supervisor.start(first)
        supervisor.start(last)
        await supervisor.wait_ready(["first"])
        assert child.process is not None
        waiting = asyncio.create_task(supervisor.wait_ready(["first", "last"], timeout=30))
        await asyncio.sleep(0)
        child.process.kill()
        await waiting
        supervisor.check()
