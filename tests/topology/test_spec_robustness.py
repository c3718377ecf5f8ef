"""Whatever a topology file holds, people get sentences, never a traceback."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.core.errors import UserError
from paceline.topology.spec import load_topology, parse_topology

from .spec_helpers import with_target

VALID = with_target("lanes: 2\napi: {listen: 127.0.0.1:8001}\nprofile: {step_ms: 1}")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "there is no such file"),
        (b"\xff\xfe\x00", "is not UTF-8 text"),
        (b"#" * 2**21, "is larger than 256 KiB"),
    ],
)
def test_files_that_cannot_be_read_give_one_sentence(tmp_path: Path, content: bytes | None, message: str) -> None:
    """Missing, binary and huge files."""
    file = tmp_path / "x.yaml"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(UserError, match=message):
        load_topology(file)


def test_a_folder_is_no_topology(tmp_path: Path) -> None:
    """One sentence as well."""
    with pytest.raises(UserError, match="cannot be read: Is a directory"):
        load_topology(tmp_path)


def never_a_traceback(text: str) -> None:
    try:
        parse_topology(text, "x.yaml", Path("/nowhere"))
    except UserError as error:
        assert all(line.startswith("x.yaml:") for line in str(error).splitlines() if line)


KEYS = ["version", "name", "targets", "drafters", "hosts", "security", "link", "model", "api", "listen", "names", "<<"]
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-5, 70000),
    st.floats(),
    st.sampled_from([*KEYS, "auto", "d", "127.0.0.1:7070"]),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=5),
    max_leaves=20,
)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.text(max_size=200))
def test_no_text_leads_to_a_traceback(text: str) -> None:
    """Whatever the file holds, the answer is a topology or sentences."""
    never_a_traceback(text)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.sampled_from([*"[]{}:-,&*!|>%@#?\n \"'ab01", "- ", ": ", "<<: ", "*a", "&a ", "!!int ", "\n  "])))
def test_no_punctuation_leads_to_a_traceback(parts: list[str]) -> None:
    """YAML's own characters in every order."""
    never_a_traceback("".join(parts))


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=7))
def test_no_structure_leads_to_a_traceback(data: dict[str, object]) -> None:
    """Right keys with values of every wrong shape."""
    never_a_traceback(json.dumps(data))


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_no_edit_of_a_valid_file_leads_to_a_traceback(data: st.DataObject) -> None:
    """A valid file with one piece replaced."""
    start = data.draw(st.integers(0, len(VALID)))
    end = data.draw(st.integers(start, min(len(VALID), start + 12)))
    never_a_traceback(VALID[:start] + data.draw(st.text(max_size=6)) + VALID[end:])


@pytest.mark.parametrize("depth", [200, 5000])
def test_deep_nesting_is_an_error_not_a_crash(depth: int) -> None:
    """Python's own recursion limit must not show."""
    never_a_traceback("[" * depth)
    never_a_traceback("- " * depth)
    never_a_traceback("? " * depth)
    never_a_traceback("a: " + "[" * depth + "]" * depth)
