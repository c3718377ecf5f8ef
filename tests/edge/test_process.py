"""The service on a thread of its own, and what the drafter needs to have installed."""

from __future__ import annotations

import queue
import subprocess
import sys
import threading

from paceline.core.clock import RealClock
from paceline.core.emulated import ToyModel
from paceline.edge.events import Limits, PeerUp, Received, Stop
from paceline.edge.runtimes.emulated import EmulatedRuntime
from paceline.edge.service import DrafterService
from paceline.edge.strategies.draft_model import DraftModel
from paceline.topology.wire import Draft, Drafted

from .helpers import LANGUAGE, hello, item, proposals, toy_greedy


def test_a_service_on_its_own_thread_answers_what_other_threads_put_in() -> None:
    replies: queue.SimpleQueue[Drafted] = queue.SimpleQueue()
    strategy = DraftModel(EmulatedRuntime(ToyModel(LANGUAGE)))
    service = DrafterService(strategy, RealClock(), Limits(), lambda name, message: replies.put(message), epoch=7)  # type: ignore[arg-type]
    thread = threading.Thread(target=service.run)
    thread.start()
    try:
        service.inbox.put(PeerUp("a", hello("a")))
        tokens = [3, 4]
        for base in (0, 2, 4, 6):
            service.inbox.put(Received("a", Draft(7, [item(1, tokens, base=base)])))
            (answer,) = replies.get(timeout=10).items
            assert proposals(answer) == toy_greedy(tokens, 4)
            tokens = tokens + proposals(answer)[:2]
    finally:
        service.inbox.put(Stop())
        thread.join(timeout=10)
    assert not thread.is_alive()


def test_the_drafter_imports_neither_torch_nor_transformers() -> None:
    code = (
        "import sys; import paceline.edge.drafter, paceline.edge.service, paceline.edge.strategies.ngram,"
        " paceline.edge.strategies.draft_model, paceline.edge.runtimes.emulated;"
        " print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")
