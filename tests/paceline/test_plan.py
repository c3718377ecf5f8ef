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


def test_what_a_target_is_set_to_is_all_of_it(run, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """draft_ahead and verify_budget beside k and lanes, for machines, too."""
    file = tmp_path / "star.yaml"
    file.write_text(WAN.read_text().replace("lanes: 2", "lanes: 2\n    draft_ahead: 3\n    verify_budget: 12"))
    _, out, _ = run(file, *SHORT, "--rtt", "20ms")
    assert "draft_ahead 3, verify_budget 12" in out
    target = json.loads(run(file, *SHORT, "--rtt", "20ms", "--json")[1])["targets"][0]
    assert (target["draft_ahead"], target["verify_budget"]) == (3, 12)


def test_drafts_that_nobody_waits_for_are_told(run, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """A round by the formula takes 200 ms, and users see plain decoding's 4 ms: the page says why they differ."""
    text = "version: 1\nname: star\nlink: {transport: memory}\ndrafters:\n  - {name: d, model: toy, runtime: emulated, "
    text += "profile: {step_ms: 10, agreement: 0.6}, max_batch: 1}\ntargets:\n"
    for name in "rstuv":
        text += (
            f"  - {{name: {name}, model: toy, engine: emulated, profile: {{verify_ms: 4}}, drafters: {{names: [d]}}}}\n"
        )
    file = tmp_path / "late.yaml"
    file.write_text(text)
    code, out, _ = run(file, "--output-tokens", 64, "--json")
    made = json.loads(out)
    target = made["targets"][0]
    assert code == 0
    assert target["round_ms"] == pytest.approx(200, rel=0.01)
    assert target["bunch_gap_ms"]["p50"] == pytest.approx(4, rel=0.05)
    assert target["undrafted_rounds"] > 0.9
    assert any("a target gives up waiting for them" in sentence for sentence in made["advice"])
    _, out, _ = run(STAR, *SHORT, "--json")
    assert not any("gives up waiting" in sentence for sentence in json.loads(out)["advice"])


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
