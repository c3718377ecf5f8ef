"""The command line as people and machines meet it."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from paceline import cli
from paceline.commands.run import _read_prompts
from paceline.core.errors import PacelineError, UserError
from paceline.deployment import api_url_of, run_directory
from paceline.topology.spec import parse_topology
from paceline.topology.spec_models import Host
from paceline.topology.spec_values import Address

ROOT = Path(__file__).parents[2]
STAR = ROOT / "examples" / "star.yaml"
TOY = """\
version: 1
name: toy
drafters:
  - {name: d, model: toy, runtime: emulated, listen: "127.0.0.1:PORT"}
targets:
  - {name: t, model: toy, engine: emulated, drafters: {names: [d]}, api: {listen: "127.0.0.1:OTHER"}}
"""


class Result(NamedTuple):
    code: int
    out: str
    err: str


Run = Callable[..., Result]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs one command line in this process."""
    monkeypatch.setenv("COLUMNS", "120")

    def run(*arguments: object) -> Result:
        code = cli.main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Result(code, captured.out, captured.err)

    return run


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now."""
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    """An emulated topology on free ports."""
    port, other = free_ports(2)
    file = tmp_path / "toy.yaml"
    file.write_text(TOY.replace("PORT", str(port)).replace("OTHER", str(other)))
    return file


def test_help_loads_nothing_heavy() -> None:
    """`paceline --help` must start at once: no torch, no web framework, no numpy."""
    program = (
        "import sys, paceline.cli\n"
        "code = paceline.cli.main(['--help'])\n"
        "heavy = {'torch', 'transformers', 'fastapi', 'numpy', 'pydantic', 'uvicorn', 'httpx'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "sys.exit(code)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert all(name in done.stdout for name, (_, _, summary) in cli.COMMANDS.items() if summary)


def test_check_loads_no_torch() -> None:
    """Checking a file does not wait for torch either."""
    program = (
        "import sys, paceline.cli\n"
        f"code = paceline.cli.main(['check', {str(STAR)!r}])\n"
        "heavy = {'torch', 'transformers', 'fastapi'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "sys.exit(code)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_module_and_command_are_the_same() -> None:
    """`python -m paceline` is `paceline`."""
    done = subprocess.run([sys.executable, "-m", "paceline", "--version"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "paceline 0.1.0\n")


def test_an_unknown_command_suggests_the_near_one(run: Run) -> None:
    """Exit 2 and a hint."""
    result = run("chekc")
    assert result.code == 2
    assert "Did you mean 'check'" in result.err


def test_an_unknown_option_is_wrong_input(run: Run) -> None:
    """Exit 2, naming it."""
    result = run("check", STAR, "--jsn")
    assert result.code == 2
    assert "--jsn" in result.err


def test_check_shows_who_talks_to_whom(run: Run) -> None:
    """One row for each target and drafter."""
    result = run("check", STAR)
    assert result.code == 0
    for text in ("chat-a", "chat-b", "chat-c", "tcp 127.0.0.1:7070", "127.0.0.1:8003", "is valid."):
        assert text in result.out


def test_check_prints_json_for_machines(run: Run) -> None:
    """The same facts, and the whole topology with defaults filled in."""
    report = json.loads(run("check", STAR, "--json").out)
    assert report["ok"] is True
    assert [row["api"] for row in report["connections"]] == [f"127.0.0.1:800{i}" for i in (1, 2, 3)]
    assert report["topology"]["targets"][0]["draft_length"] == 4
    assert report["topology"]["drafters"][0]["listen"] == "127.0.0.1:7070"


def test_check_prints_every_problem_and_exits_2(run: Run, tmp_path: Path) -> None:
    """On stderr, a line each; as JSON on stdout."""
    file = tmp_path / "bad.yaml"
    file.write_text("version: 1\nname: x\ntargets:\n  - {name: t, model: m, lanes: 9, threads: 0}\n")
    result = run("check", file)
    assert result.code == 2
    assert result.err.splitlines() == [
        f"{file}:4:32: targets[0].lanes: must be 1..8 or auto, not 9",
        f"{file}:4:44: targets[0].threads: must be 1..1024, not 0",
    ]
    result = run("check", file, "--json")
    assert result.code == 2
    assert [problem["path"] for problem in json.loads(result.out)["problems"]] == [
        "targets[0].lanes",
        "targets[0].threads",
    ]


def test_a_missing_file_is_one_sentence(run: Run) -> None:
    """Exit 2 for every command that takes a topology."""
    for command in ("check", "doctor"):
        assert run(command, "/no/such.yaml") == Result(2, "", "/no/such.yaml: there is no such file\n")


def test_schema_is_json(run: Run) -> None:
    """Editors read it as it is printed."""
    result = run("schema")
    assert result.code == 0
    assert set(json.loads(result.out)["properties"]) >= {"version", "name", "drafters", "targets"}


def test_doctor_knows_this_machine(run: Run, toy: Path) -> None:
    """All is well with an emulated topology on free ports."""
    pytest.importorskip("fastapi")  # a target needs the cloud extra, and doctor says so
    result = run("doctor", toy, "--json")
    checks = {check["name"]: check for check in json.loads(result.out)["checks"]}
    assert result.code == 0, result.out
    assert checks["python"]["status"] == "ok"
    assert checks["d"]["detail"].endswith("is free")
    assert {"numpy", "msgspec", "cpu", "clock", "gpu", "onnxruntime", "tensorrt", "key file"} <= set(checks)


def test_doctor_finds_a_port_in_use(run: Run, toy: Path) -> None:
    """Exit 1, with the address and what to do."""
    pytest.importorskip("fastapi")  # a target needs the cloud extra, and doctor says so
    listen = json.loads(run("check", toy, "--json").out)["topology"]["drafters"][0]["listen"]
    with socket.create_server(("127.0.0.1", int(listen.split(":")[1]))):
        result = run("doctor", toy)
    assert result.code == 1
    (line,) = [line for line in result.out.splitlines() if line.startswith("fail")]
    assert f"{listen}: in use" in line
    assert "choose another listen" in line


def test_check_and_doctor_find_a_model_that_its_runtime_cannot_load(run: Run, tmp_path: Path) -> None:
    """The embedded drafter holds weights for torch; on a host that is not here, nobody can say."""
    model, file = ROOT / "models" / "tiny-drafter", tmp_path / "star.yaml"
    file.write_text(
        f"version: 1\nname: toy\ndrafters:\n  - {{name: d, model: {model}, runtime: onnxruntime}}\n"
        f"targets:\n  - {{name: t, model: {ROOT}/models/tiny-target, drafters: {{names: [d]}}}}\n"
    )
    why = f"{model} is no bundle: it has no manifest.json; make one with `paceline export`"
    assert run("check", file) == (2, "", f"{file}:4:22: drafters[0].model: {why}\n")
    result = run("doctor", file)
    assert result.code == 1
    assert re.search(rf"fail  model +d: {re.escape(why)}", result.out)
    assert re.search(r"ok    model +.*tiny-target\n", result.out) and "tiny-drafter\n" not in result.out


def test_doctor_finds_a_missing_model(run: Run, tmp_path: Path) -> None:
    """Exit 1, naming the folder."""
    file = tmp_path / "x.yaml"
    file.write_text("version: 1\nname: x\ntargets: [{name: t, model: ./none}]\n")
    result = run("doctor", file)
    assert result.code == 1
    assert f"{tmp_path}/none does not exist" in result.out


@pytest.mark.parametrize(("error", "code"), [(PacelineError("it broke"), 1), (KeyboardInterrupt(), 130)])
def test_failures_become_exit_codes(
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    code: int,
) -> None:
    """1 for what failed, 130 for Ctrl-C; no traceback for either."""

    def fail(name: str) -> None:
        raise error

    monkeypatch.setattr(cli, "load_command", fail)
    result = run("check", STAR)
    assert result.code == code
    assert result.err == ("it broke\n" if code == 1 else "")


def test_a_command_that_is_not_there_is_said_so(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing module breaks its own command only."""
    monkeypatch.setitem(cli.COMMANDS, "later", ("not_written_yet", "later", "Comes later."))
    assert run("later") == Result(2, "", "paceline later is not part of this version\n")
    assert run("--help").code == 0


def test_output_that_nobody_reads_is_no_failure() -> None:
    """`paceline schema | head -1` ends quietly."""
    command = f"{sys.executable} -m paceline schema | head -1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("{\n", "")


def test_a_closed_output_is_no_failure(toy: Path) -> None:
    """With stdout closed from the start there is nothing to flush."""
    command = f"{sys.executable} -m paceline check {toy} >&-"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_full_disk_is_one_sentence(toy: Path) -> None:
    """Output that cannot be written is a failure without a traceback."""
    command = f"{sys.executable} -m paceline check {toy} > /dev/full"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (1, "cannot write the output: no space left on device\n")


@pytest.mark.parametrize("command", [("target", "t"), ("drafter", "d"), ("run",), ("up",)])
def test_a_run_directory_that_is_none(run: Run, toy: Path, command: tuple[str, ...]) -> None:
    """A file in its place is wrong input for every command."""
    name, *arguments = command
    result = run(name, toy, *arguments, "--run-dir", toy)
    assert result == Result(2, "", f"--run-dir {toy}: File exists\n")


def test_a_log_that_cannot_be_written(run: Run, toy: Path, tmp_path: Path) -> None:
    """A directory in its place is wrong input."""
    log = tmp_path / "run" / "d.log"
    log.mkdir(parents=True)
    assert run("run", toy, "--run-dir", tmp_path / "run") == Result(2, "", f"{log}: Is a directory\n")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "\\ud800"}', "the prompt '\\ud800' is not UTF-8 text\n"),
        ("[" * 100_000, 'prompts:1: each line is an object like {"prompt": "…"}\n'),
    ],
)
def test_prompts_that_are_no_text(
    run: Run, toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, message: str
) -> None:
    """Half a surrogate pair and endless nesting are wrong input."""
    monkeypatch.chdir(tmp_path)
    Path("prompts").write_text(line)
    assert run("run", toy, "--prompts", "prompts") == Result(2, "", message)


def test_lines_of_prompts_end_with_a_newline_only(tmp_path: Path) -> None:
    """U+2028 is a character of a text, and a byte-order mark is none."""
    file = tmp_path / "prompts"
    file.write_text('{"prompt": "a\u2028b"}\r\n\n{"prompt": "c"}', encoding="utf-8-sig", newline="")
    assert _read_prompts(file) == ["a\u2028b", "c"]


@pytest.mark.parametrize("option", [("--top-p", "nan"), ("--temperature", "inf"), ("--seed", str(2**64))])
def test_numbers_out_of_range(run: Run, toy: Path, option: tuple[str, str]) -> None:
    """They are refused before anything is started."""
    result = run("run", toy, *option)
    assert result.code == 2
    assert option[0] in result.err


def test_a_reader_that_leaves_early_is_no_failure(toy: Path) -> None:
    """`paceline schema | head -1` and `run … | head -1` end with 0 and say nothing."""
    for arguments in (["schema"], ["run", str(toy), "--max-tokens", "3", "--json"]):
        command = [sys.executable, "-m", "paceline", *arguments]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None and process.stderr is not None
            process.stdout.close()  # nobody reads a word
            err = process.stderr.read()
            assert (process.wait(60), err) == (0, ""), arguments


def test_ctrl_c_while_the_command_line_loads_is_no_traceback() -> None:
    """However early it comes once the program itself has begun: exit code 130 and not a word."""
    program = (
        "import sys, runpy\n"
        "class Interrupt:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'typer': raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupt())\n"
        "sys.argv = ['paceline', '--version']\n"
        "runpy.run_module('paceline', run_name='__main__')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_a_node_of_the_other_kind_is_told_its_command(run: Run, toy: Path) -> None:
    """`target … d` where d is a drafter names the command; a name that nobody has gets the list."""
    assert run("target", toy, "d") == Result(2, "", f"d is a drafter: paceline drafter {toy} d\n")
    assert run("drafter", toy, "t") == Result(2, "", f"t is a target: paceline target {toy} t\n")
    assert run("target", toy, "x") == Result(2, "", f"{toy} has no target 'x'; it has: t\n")


@pytest.mark.parametrize("command", ["up", "drafter", "target"])
def test_help_says_what_signals_do(run: Run, command: str) -> None:
    """An operator finds SIGHUP there."""
    assert "SIGHUP" in run(command, "--help").out


def test_bench_says_what_it_does_where_no_terminal_is(run: Run, toy: Path) -> None:
    """A line for each turn, on stderr; real models take minutes."""
    result = run("bench", toy, "--virtual", "--modes", "plain,standard", "--max-tokens", "8")
    assert (result.code, result.err) == (0, "plain, turn 1 of 1 …\nstandard, turn 1 of 1 …\n")


def test_the_address_of_an_api_is_one_that_users_can_use(toy: Path) -> None:
    """One that listens everywhere is told with its host's address, or else this machine's; another one as it is."""
    topology = parse_topology(toy.read_text(), "toy.yaml", toy.parent)
    (spec,) = topology.targets
    anywhere = spec.model_copy(update={"api": spec.api.model_copy(update={"listen": Address("0.0.0.0", 8001)})})
    topology = topology.model_copy(update={"hosts": {"big": Host(address="chat.example")}})
    assert api_url_of(topology, anywhere.model_copy(update={"host": "big"})) == "https://chat.example:8001/v1"
    assert re.fullmatch(r"https://(?!0\.0\.0\.0)\S+:8001/v1", api_url_of(topology, anywhere))
    assert api_url_of(topology, spec) == f"http://{spec.api.listen}/v1"


def test_a_temporary_run_directory_is_kept_where_logs_tell_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a failure the sentence says where they are; without logs, or after success, nothing stays."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for kind in (UserError, PacelineError):
        with pytest.raises(kind, match=r"it broke$"), run_directory(None):
            raise kind("it broke")
    with run_directory(None) as done:
        (done / "t.log").write_text("all is well")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(UserError) as failure, run_directory(None) as kept:
        (kept / "t.log").write_text("port in use")
        raise UserError("it broke")
    assert str(failure.value) == f"it broke (logs are kept in {kept})" and (kept / "t.log").exists()
