"""Topology files: what is read, what is refused, and where each message points."""

from __future__ import annotations

import json

import pytest

from paceline.topology.spec import Address, schema

from .spec_helpers import STAR, problems, read, with_drafter, with_target


def test_defaults_are_what_a_user_expects() -> None:
    """What is left out gets a default; ports go by position."""
    topology = read(STAR)
    drafter, target = topology.drafter("d"), topology.target("t")
    assert drafter.listen == Address("127.0.0.1", 7070)
    assert target.api.listen == Address("127.0.0.1", 8001)
    assert (target.lanes, target.draft_length, target.weight, target.verification) == (1, 4, 1.0, "coupled")
    assert (drafter.kv_memory, target.kv_memory, target.deadline) == (None, None, None)
    assert topology.drafters_of(target) == (drafter,)
    assert topology.targets_of(drafter) == (target,)


def test_ports_count_up_and_a_written_one_stays() -> None:
    """The second drafter listens on 7071 and the third target on 8003, whatever the others say."""
    text = """\
        version: 1
        name: many
        drafters:
          - {name: a, model: org/small, listen: 127.0.0.1:9000}
          - {name: b, model: org/small}
        targets:
          - {name: x, model: org/large}
          - {name: y, model: org/large, api: {listen: "127.0.0.1:9001"}}
          - {name: z, model: org/large}
        """
    topology = read(text)
    assert [str(d.listen) for d in topology.drafters] == ["127.0.0.1:9000", "127.0.0.1:7071"]
    assert [str(t.api.listen) for t in topology.targets] == ["127.0.0.1:8001", "127.0.0.1:9001", "127.0.0.1:8003"]


def test_values_with_units_are_read() -> None:
    """Sizes become bytes, times become seconds."""
    topology = read(with_target("kv_memory: 1.5GiB\ndeadline: 200ms\nlanes: 2\ndraft_length: 0"))
    target = topology.target("t")
    assert (target.kv_memory, target.deadline, target.lanes, target.draft_length) == (3 * 2**29, 0.2, 2, 0)


ONE_ERROR = [
    (with_target("lanes: 12"), "star.yaml:10:12: targets[0].lanes: must be 1..8 or auto, not 12"),
    (with_target("lanes: two"), "star.yaml:10:12: targets[0].lanes: must be 1..8 or auto, not 'two'"),
    (with_target("draft_length: 17"), "star.yaml:10:19: targets[0].draft_length: must be 0..16 or auto, not 17"),
    (with_target("draft_length: true"), "star.yaml:10:19: targets[0].draft_length: must be 0..16 or auto, not true"),
    (with_target("max_context: 0"), "star.yaml:10:18: targets[0].max_context: must be 1..16777216, not 0"),
    (with_target('max_sessions: "8"'), "star.yaml:10:19: targets[0].max_sessions: must be 1..65536, not '8'"),
    (with_target("weight: 0"), "star.yaml:10:13: targets[0].weight: must be a number from 0.001 to 1000, not 0"),
    (with_target("kv_memory: big"), "star.yaml:10:16: targets[0].kv_memory: must be a size such as 2GiB or 512MiB"),
    (with_target("device: gpu"), "star.yaml:10:13: targets[0].device: must be cpu, cuda or cuda:0, not 'gpu'"),
    (
        with_target("dtype: bf16"),
        "star.yaml:10:12: targets[0].dtype: must be float64, float32, bfloat16 or float16, not 'bf16'",
    ),
    (with_target("api: 8001"), "star.yaml:10:10: targets[0].api: must be a mapping, not 8001"),
    (with_target("api: {listen: 8001}"), "star.yaml:10:19: targets[0].api.listen: must be host:port"),
    (with_target("lane: 2"), "star.yaml:10:5: targets[0].lane: is not a key here; did you mean lanes?"),
    (with_target("zzz: 2"), "star.yaml:10:5: targets[0].zzz: is not a key here; allowed are name, host, model"),
    (
        with_target("verification: rejection"),
        "star.yaml:10:19: targets[0].verification: rejection needs authenticated links: write security.key_file, or",
    ),
    (with_target("host: moon"), "star.yaml:10:11: targets[0].host: there is no host moon in hosts"),
    (with_target("name: u"), "star.yaml:10:5: targets[0].name: is given twice; the first is in line 7"),
    (with_target("profile: {}"), "star.yaml:10:5: targets[0].profile: is only for engine: emulated"),
    (
        with_drafter("listen: 0.0.0.0:7070") + "security: {encrypt: false}\n",
        "star.yaml:6:13: drafters[0].listen: 0.0.0.0:7070 is reachable from other machines: that needs",
    ),
    (
        with_drafter("listen: 127.0.0.1:8001"),
        "star.yaml:8:5: targets[0].api.listen: 127.0.0.1:8001 is already taken",
    ),
    (
        with_drafter("strategy: eagle"),
        "star.yaml:6:15: drafters[0].strategy: must be draft_model or ngram, not",
    ),
    (with_drafter("strategy: ngram"), "star.yaml:5:5: drafters[0].model: the ngram strategy drafts from the text"),
    (
        with_drafter("runtime: tensorrt").replace("org/small", "/absent"),
        "star.yaml:6:14: drafters[0].runtime: tensorrt runs on a GPU: write device: cuda",
    ),
    (with_drafter("runtime: emulated"), "star.yaml:10:24: targets[0].drafters.names[0]: d and t must both be emulated"),
    (STAR.replace("    model: org/small\n", ""), "star.yaml:4:5: drafters[0].model: is required with strategy: draft"),
    (STAR.replace("    model: org/large\n", ""), "star.yaml:7:5: targets[0].model: is required"),
    (
        STAR.replace("[d]", "[dd]"),
        "star.yaml:9:24: targets[0].drafters.names[0]: there is no drafter dd; did you",
    ),
    (STAR.replace("[d]", "[d, d]"), "star.yaml:9:27: targets[0].drafters.names[1]: d is given twice"),
    (STAR.replace("[d]", "d"), "star.yaml:9:23: targets[0].drafters.names: must be a list, not 'd'"),
    (STAR.replace("- name: t", "- name: d"), "star.yaml:7:11: targets[0].name: d is already the name of drafters[0]"),
    (STAR.replace("- name: t", "- name: a b"), "star.yaml:7:11: targets[0].name: must be a name of letters, digits"),
    (STAR.replace("version: 1", "version: 2"), "star.yaml:1:10: version: must be 1..1, not 2"),
    (STAR.replace("version: 1\n", ""), "star.yaml:1:1: version: is required"),
    (STAR.replace("name: star", "name:"), "star.yaml:2:6: name: must be a name of letters, digits, dots and dashes"),
    (STAR + "nodes: []\n", "star.yaml:10:1: nodes: is not a key here; allowed are version"),
    (STAR + "security: {key_file: no.key}\n", "star.yaml:10:22: security.key_file: /nowhere/no.key does not exist"),
    (STAR + "link: {transport: udp}\n", "star.yaml:10:19: link.transport: must be tcp, mqtt or memory, not 'udp'"),
    (STAR + "link: {broker: mqtt://b:1}\n", "star.yaml:10:8: link.broker: is only for transport: mqtt, not tcp"),
    (STAR + "hosts: {a b: {address: x}}\n", "star.yaml:10:9: hosts.a b: must be a name of letters"),
    (
        STAR + "hosts: {a: {adress: x, address: y}}\n",
        "star.yaml:10:13: hosts.a.adress: is not a key here; did you",
    ),
    ("version: 1\nname: x\ntargets: []\n", "star.yaml:3:10: targets: at least one target is needed"),
    ("[1, 2]\n", "star.yaml:1:1: must be a mapping, not a list"),
    ("", "star.yaml:1:1: the file is empty"),
    ("version: [1\n", "star.yaml:2:1: is not YAML: expected ',' or ']'"),
    ("a: 1\n b: 2\n", "star.yaml:2:3: is not YAML: mapping values are not allowed here"),
    ("a: \x07\n", "star.yaml:1:4: the character '\\x07' is not allowed in YAML"),
    ("a: !!python/object:os.system x\n", "star.yaml:1:4: a: the tag !!python/object:os.system is not allowed"),
    ("a: &a [*a]\n", "star.yaml:1:4: is nested too deeply"),
    ("--- 1\n--- 2\n", "star.yaml:2:1: is not YAML: but found another document"),
    ("? [1]\n: 2\n", "star.yaml:1:3: a key must be text"),
]


@pytest.mark.parametrize(("text", "line"), ONE_ERROR, ids=[line.split(": ", 1)[1][:50] for _, line in ONE_ERROR])
def test_each_error_names_line_column_path_and_remedy(text: str, line: str) -> None:
    """One mistake, one line, at the right place."""
    lines = problems(text)
    assert len(lines) == 1, lines
    assert lines[0].startswith(line), lines[0]


UNSUPPORTED = [
    (with_target("engine: vllm"), "targets[0].engine: vllm is not available in this version; use torch"),
    (with_target("draft_ahead: true"), "targets[0].draft_ahead: must be 0..16, not true"),
]


@pytest.mark.parametrize(("text", "message"), UNSUPPORTED)
def test_what_this_version_cannot_do_is_refused_not_ignored(text: str, message: str) -> None:
    """The format knows more than this version does."""
    lines = problems(text)
    assert len(lines) == 1, lines
    assert lines[0].split(": ", 1)[1].startswith(message)


def test_all_errors_come_at_once_in_the_order_of_lines() -> None:
    """Wrong values hide neither references nor addresses nor unsupported features elsewhere."""
    text = """\
        version: 1
        name: star
        drafters:
          - name: d
            model: org/small
            thread: 2
        targets:
          - name: t
            model: org/large
            lanes: 12
            engine: vllm
            drafters: {names: [d, e]}
          - name: d
            dtype: float33
            api: {listen: "0.0.0.0:8001"}
        """
    lines = problems(text)
    places = [tuple(map(int, line.split(":")[1:3])) for line in lines]
    assert places == sorted(places)
    assert [line.split(": ")[1] for line in lines] == [
        "drafters[0].thread",
        "targets[0].lanes",
        "targets[0].engine",
        "targets[0].drafters.names[1]",
        "targets[1].model",
        "targets[1].name",
        "targets[1].dtype",
        "targets[1].api.listen",
        "targets[1].api.listen",
    ]


def test_the_documented_example_is_understood() -> None:
    """The contract's own example has only what this version lacks against it."""
    text = """\
        version: 1
        name: orin-star
        security: {encrypt: true}
        link: {transport: tcp}
        hosts:
          orin: {address: 192.168.1.20, user: nvidia}
        drafters:
          - name: orin-1
            host: orin
            model: bundles/qwen3-0.6b
            strategy: draft_model
            runtime: tensorrt
            device: cuda:0
            listen: 0.0.0.0:7070
            max_sessions: 16
            max_context: 2048
            kv_memory: 2GiB
            max_batch: 8
            threads: 4
        targets:
          - name: chat-a
            model: Qwen/Qwen3-8B
            engine: torch
            device: cuda:0
            dtype: bfloat16
            drafters: {names: [orin-1], policy: failover}
            lanes: 2
            draft_length: auto
            verification: coupled
            max_sessions: 32
            max_context: 4096
            kv_memory: 8GiB
            prefill_chunk: 256
            weight: 1
            api: {listen: 127.0.0.1:8001}
        """
    assert [line.split(": ")[1] for line in problems(text)] == ["drafters[0].listen"]


def test_an_api_beyond_loopback_needs_its_own_key() -> None:
    """The deployment key authenticates drafters, not users."""
    (line,) = problems(with_target('api: {listen: "0.0.0.0:8001"}'))
    assert line.startswith("star.yaml:10:19: targets[0].api.listen: 0.0.0.0:8001 is reachable from other machines")


def test_anchors_and_merge_keys_save_writing() -> None:
    """Targets that differ in little can share the rest; errors point to where the value stands."""
    text = """\
        version: 1
        name: star
        targets:
          - &base
            name: a
            model: org/large
            threads: 1
          - <<: *base
            name: b
        """
    topology = read(text)
    assert [(t.name, t.model, t.threads) for t in topology.targets] == [("a", "org/large", 1), ("b", "org/large", 1)]
    lines = problems(text.replace("threads: 1", "threads: 0"))
    assert [line[:15] for line in lines] == ["star.yaml:7:14:", "star.yaml:7:14:"]


def test_a_small_file_cannot_unfold_to_a_huge_one() -> None:
    """Anchors of anchors are counted."""
    levels = ["a0: &a0 [x, x, x, x, x, x, x, x]"]
    levels += [f"a{i}: &a{i} [" + ", ".join([f"*a{i - 1}"] * 8) + "]" for i in range(1, 9)]
    (line,) = problems("\n".join(levels))
    assert line.endswith("unfolds to too many values; use fewer anchors")


def test_plain_words_stay_what_they_look_like() -> None:
    """No dates, no sexagesimal numbers: a name may be 2024-01-01, and 10:30 is no number."""
    assert read(STAR.replace("name: star", "name: 2024-01-01")).name == "2024-01-01"
    (line,) = problems(with_drafter("listen: 10:30"))
    assert "'10' is not an IP address" in line


def test_the_schema_describes_every_key() -> None:
    """Editors show a description for each, and defaults that need not be written are not required."""
    document = json.loads(json.dumps(schema()))
    for name, model in {**document["$defs"], "Topology": document}.items():
        for key, value in model["properties"].items():
            assert value.get("description"), f"{name}.{key}"
    assert document["$defs"]["TargetSpec"]["required"] == ["name", "model"]
    assert document["$defs"]["DrafterSpec"]["required"] == ["name"]
    assert document["additionalProperties"] is False
