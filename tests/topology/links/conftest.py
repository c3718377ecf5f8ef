"""Each test here runs on asyncio's own loop and on uvloop where it is installed; brokers of both kinds."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from .brokers import BROKERS, BrokerProcess, running_broker

LOOPS = [pytest.param(("asyncio", {}), id="asyncio")]
if importlib.util.find_spec("uvloop"):
    LOOPS.append(pytest.param(("asyncio", {"use_uvloop": True}), id="uvloop"))


@pytest.fixture(params=LOOPS)
def anyio_backend(request: pytest.FixtureRequest) -> object:
    return request.param


@pytest.fixture(params=BROKERS)
def broker(request: pytest.FixtureRequest) -> BrokerProcess:
    """One that other tests use, too."""
    return request.getfixturevalue(f"{request.param}_broker")  # type: ignore[no-any-return]


@pytest.fixture(params=BROKERS)
def own_broker(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[BrokerProcess]:
    """One that the test may stop and kill."""
    with running_broker(request.param, tmp_path) as process:
        yield process
