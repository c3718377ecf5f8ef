"""A disk that is full costs what was to be written there, not the service."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable

import httpx
import pytest

from .conftest import EmulatedStar, wait_for

pytestmark = pytest.mark.integration


def test_a_target_whose_log_cannot_be_written_serves_on(emulated: Callable[..., EmulatedStar]) -> None:
    """Every line it logs fails; texts, reload and a stop in good order do not."""
    star = emulated(targets=1)
    command = [sys.executable, "-m", "paceline", "target", str(star.path), "target-0", "--run-dir", str(star.run_dir)]
    body = {"prompt": "abc", "max_tokens": 5, "ignore_eos": True}
    with open("/dev/full", "w") as full, subprocess.Popen(command, stdout=full, stderr=full) as process:
        wait_for(lambda: star.status("target-0").get("state") == "running", "the target")
        for _ in range(2):
            answer = httpx.post(f"{star.api[0]}/v1/completions", json=body, trust_env=False).json()
            assert answer["usage"]["completion_tokens"] == 5
            process.send_signal(signal.SIGHUP)
        process.terminate()
        assert process.wait(20) == 0
