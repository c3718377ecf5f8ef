"""Each test here runs on asyncio's own loop and on uvloop where it is installed."""

from __future__ import annotations

import importlib.util

import pytest

LOOPS = [pytest.param(("asyncio", {}), id="asyncio")]
if importlib.util.find_spec("uvloop"):
    LOOPS.append(pytest.param(("asyncio", {"use_uvloop": True}), id="uvloop"))


@pytest.fixture(params=LOOPS)
def anyio_backend(request: pytest.FixtureRequest) -> object:
    return request.param
