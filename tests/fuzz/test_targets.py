"""The fuzz targets without a fuzzer: every input that was ever worth keeping, and some of hypothesis's own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from . import corpus, engine, handshake, mqtt, service, wire

TARGETS: dict[str, Callable[[bytes], None]] = {
    "wire": wire.one,
    "handshake": handshake.one,
    "service": service.one,
    "engine": engine.one,
    "mqtt": mqtt.one,
}


@pytest.mark.parametrize("target", TARGETS)
def test_kept_inputs_find_nothing(target: str) -> None:
    """Whatever the fuzzer once reached, old findings among it, holds."""
    for data in corpus.kept(target):
        TARGETS[target](data)


@pytest.mark.parametrize("target", TARGETS)
@settings(deadline=None)
@given(data=st.binary(max_size=400))
def test_any_input_finds_nothing(target: str, data: bytes) -> None:
    """A short hunt where there is no fuzzer."""
    TARGETS[target](data)


def test_every_target_has_a_corpus() -> None:
    """A file for each target and no other."""
    assert {path.stem for path in corpus.FOLDER.glob("*.txt")} == set(TARGETS)
