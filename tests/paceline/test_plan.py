"""`paceline plan` as people, machines and browsers meet it."""

from __future__ import annotations

import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from paceline import cli

ROOT = Path(__file__).parents[2]
STAR = ROOT / "examples" / "emulated-star.yaml"
WAN = ROOT / "examples" / "emulated-wan.yaml"
SHORT = ("--prompt-tokens", "16", "--output-tokens", "16")


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> object:
    """Runs one command line in this process: (code, stdout, stderr)."""
    monkeypatch.setenv("COLUMNS", "120")

    def run(*arguments: object) -> tuple[int, str, str]:
        code = cli.main(["plan", *(str(argument) for argument in arguments)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_a_person_sees_a_table_and_sentences(run) -> None:  # type: ignore[no-untyped-def]
    """The group, its figures, and the verdict; labelled as emulated."""
    code, out, _ = run(STAR, *SHORT)
    assert code == 0
    assert "target-01 … target-16 (16 targets)" in out
    assert "(emulated models)" in out
    assert re.search(r"never idle from +│ 6 ", out)
    assert re.search(r"round ms +│ 128 ", out)
    assert "• drafter: never idle from 6 targets like target-01 on; up to 16" in out


def test_a_far_drafter_is_advised_against(run) -> None:  # type: ignore[no-untyped-def]
    """One request, 200 ms away."""
    _, out, _ = run(WAN, *SHORT, "--rtt", "200ms")
    assert "do not speculate" in out


@pytest.mark.parametrize(("text", "ms"), [("0", 0.0), ("0ms", 0.0), ("0s", 0.0), ("0.2", 200.0), ("10ms", 10.0)])
def test_round_trips_may_be_none_and_plain_numbers(run, text: str, ms: float) -> None:  # type: ignore[no-untyped-def]
    """Numbers are seconds, as the sentence about wrong ones says."""
    code, out, _ = run(WAN, *SHORT, "--rtt", text, "--json")
    assert (code, json.loads(out)["targets"][0]["rtt_ms"]) == (0, pytest.approx(ms))


def test_json_is_all_that_is_printed(run) -> None:  # type: ignore[no-untyped-def]
    """16 entries, one a target."""
    code, out, _ = run(STAR, *SHORT, "--json")
    made = json.loads(out)
    assert code == 0
    assert [target["name"] for target in made["targets"]] == [f"target-{index:02}" for index in range(1, 17)]
    assert made["targets"][0]["n_full"] == 6


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((ROOT / "examples" / "star.yaml",), "not known are chat-a: verify_ms"),
        ((WAN, "--rtt", "fast"), "--rtt must be"),
        ((WAN, "--rtt", "nan"), "--rtt must be"),
        ((STAR, "--profile", "drafter"), "--profile drafter: must be NODE=FILE"),
        ((STAR, "--html", "/nowhere/page.html"), "/nowhere/page.html: cannot be written: No such file or directory"),
    ],
)
def test_wrong_input_is_one_sentence(run, arguments: tuple[object, ...], sentence: str) -> None:  # type: ignore[no-untyped-def]
    """Exit 2, nothing on stdout."""
    code, out, err = run(*arguments, *SHORT)
    assert (code, out) == (2, "")
    assert err.startswith(sentence)
    assert err.count("\n") == 1


class Page(HTMLParser):
    """What a browser would fetch, and which elements there are."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.fetched += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href")]


def test_the_page_needs_nothing_from_elsewhere(run, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """Four curves in it, colours for light and dark, no script, and no address that a browser would fetch."""
    file = tmp_path / "plan.html"
    code, out, _ = run(STAR, *SHORT, "--html", file)
    assert code == 0
    assert f"curves: {file}" in out
    text = file.read_text(encoding="utf-8")
    page = Page()
    page.feed(text)
    assert page.tags.count("svg") == 4
    assert not {"script", "link", "img", "iframe"} & set(page.tags)
    assert all(address.startswith("#") for address in page.fetched)
    assert not re.search(r"url\((?!#)|@import", text)
    assert "prefers-color-scheme: dark" in text
    for svg in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        drawn = ElementTree.fromstring(svg)
        assert len(drawn.findall(".//{http://www.w3.org/2000/svg}path")) > 10
        assert "var(--line-0)" in svg
    assert "never idle from 6 targets" in text


def test_the_page_says_what_to_install(run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    """Curves are an extra of the package."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, _, err = run(STAR, *SHORT, "--html", tmp_path / "plan.html")
    assert code == 2
    assert "pip install -e '.[report]'" in err
