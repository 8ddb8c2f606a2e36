"""Properties of all commands: exit codes, one-line errors, and options."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from octavo import errors
from octavo.cli import app
from octavo.cli.main import run
from tests.cli.conftest import BUFFERED, OCTAVO, Call, started
from tests.cli.fake_llm import FakeLLM


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (errors.ParameterError("temperature is 3"), 2, "temperature is 3"),
        (errors.UnknownOptionError.of("LLM", "blok_size", ["block_size"]), 2, "did you mean 'block_size'"),
        (errors.CapacityError("needs 9 blocks,\n  8 exist"), 2, "needs 9 blocks, 8 exist"),
        (errors.ModelNotFoundError("no such model"), 1, "no such model"),
        (errors.MemoryBudgetError("8 GiB short"), 1, "8 GiB short"),
        (errors.StepError("it broke"), 1, "it broke"),
        (errors.DeviceLostError("it does not answer: CUDA error: x"), 1, "error: it does not answer: CUDA error: x\n"),
        (FileNotFoundError(2, "No such file or directory", "x.gguf"), 1, "No such file or directory: x.gguf"),
        (ZeroDivisionError("division by zero"), 1, "ZeroDivisionError: division by zero"),
    ],
)
def test_error_is_one_line_with_an_exit_code(
    monkeypatch: pytest.MonkeyPatch, call: Call, error: Exception, code: int, message: str
) -> None:
    def fail(args: list[str]) -> int:
        raise error

    monkeypatch.setattr(app, "call", fail)
    done = call("generate")
    assert done.code == code
    assert done.err.startswith("error: ")
    assert message in done.err
    assert done.err.count("\n") == 1
    assert done.out == ""


@pytest.mark.parametrize("args", [("--debug", "generate", "-p", "x"), ("generate", "-p", "x", "--debug")])
def test_debug_option_prints_the_traceback_at_any_position(
    call: Call, fake: type[FakeLLM], args: tuple[str, ...]
) -> None:
    done = call(*args, "--model", "absent")
    assert done.code == 1
    assert "Traceback" in done.err
    assert done.err.endswith("error: no model 'absent'\n")


@pytest.mark.parametrize(("value", "shown"), [("1", True), ("0", False), ("", False)])
def test_octavo_debug_variable(
    monkeypatch: pytest.MonkeyPatch, call: Call, fake: type[FakeLLM], value: str, shown: bool
) -> None:
    monkeypatch.setenv("OCTAVO_DEBUG", value)
    assert ("Traceback" in call("generate", "-p", "x", "--model", "absent").err) == shown


def test_interrupt_is_quiet(monkeypatch: pytest.MonkeyPatch, call: Call) -> None:
    def interrupt(args: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(app, "call", interrupt)
    done = call("generate")
    assert (done.code, done.out, done.err) == (130, "", "")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--versoin",), "no option --versoin; did you mean --version?"),
        (("generate", "--max-tokns", "3"), "no option --max-tokns; did you mean --max-tokens?"),
        (("generate", "--max_tokns", "3"), "did you mean --max-tokens?"),
        (("generate", "--xyzzy"), "no option --xyzzy; see octavo generate --help"),
        (("generat",), "no such command 'generat'. Did you mean 'generate'"),
        (("models", "fetsh", "x"), "Did you mean 'fetch'"),
        (("models", "fetch"), "missing argument"),
        (("generate", "--max-tokens"), "--max-tokens"),
        (("generate", "--max-tokens", "many"), "--max-tokens"),
        (("generate", "--preemption-mode", "drop"), "--preemption-mode"),
        (("blocks", "--num-blocks", "0"), "--num-blocks"),
        (("serve", "--port", "1", "--port", "2"), "--port is given 2 times; give it once"),
        (("serve", "--max_num_seqs=3", "--max-num-seqs", "4"), "--max-num-seqs is given 2 times"),
        (("generate", "-m", "a", "--model", "b", "-m", "c"), "--model is given 3 times"),
        (("generate", "--ignore-eos", "--no-ignore-eos"), "--ignore-eos is given 2 times"),
        (("bench", "serve", "--port", "1", "--port", "1"), "--port is given 2 times"),
        (("simulate", "--seed", "1", "--seed", "2"), "--seed is given 2 times"),
        (("--version", "--version"), "--version is given 2 times"),
    ],
)
def test_usage_error_is_one_line_with_exit_code_2(call: Call, args: tuple[str, ...], message: str) -> None:
    done = call(*args)
    assert done.code == 2
    assert done.err.startswith("error: ")
    assert message in done.err
    assert done.err.count("\n") == 1


LONG = "x" * 120_000


@pytest.mark.parametrize(
    "args",
    [
        (LONG,),
        ("generate", f"--{LONG}"),
        ("generate", "-p", "x", "-m", LONG),
        ("generate", "--prompts-file", LONG),
        ("generate", "-p", "x", "--logit-bias", LONG),
        ("generate", "-p", "x", "--structured-outputs", LONG),
        ("generate", "-p", "x", "--device", LONG),
        ("simulate", LONG),
        ("simulate", "--model", LONG),
        ("simulate", "--gpu", LONG),
        ("simulate", "--slo", LONG),
        ("reproduce", LONG),
        ("view", LONG),
        ("top", LONG),
        ("doctor", LONG),
        ("serve", LONG),
        ("blocks", "--script", LONG),
        ("models", "fetch", LONG),
        ("bench", "serve", "--base-url", LONG),
    ],
    ids=lambda args: " ".join(args).replace(LONG, "LONG"),
)
def test_message_for_a_huge_argument_is_short(call: Call, args: tuple[str, ...]) -> None:
    done = call(*args)
    assert done.code in (1, 2)
    assert done.err.startswith("error: ") and done.err.count("\n") == 1
    assert len(done.err) < 1500


def test_control_characters_of_arguments_are_removed_from_errors(call: Call) -> None:
    done = call("blocks", "--script", "\x1b[2J\x07nowhere")
    assert done.code == 2
    assert "nowhere" in done.err and "\x1b" not in done.err and "\x07" not in done.err


def test_underscores_in_options_equal_dashes(call: Call, fake: type[FakeLLM]) -> None:
    assert call("generate", "--prompt", "a b c", "--max_tokens", "1").out == "c\n"


def test_no_arguments_print_help(call: Call) -> None:
    done = call()
    assert done.code == 0
    assert "generate" in done.out and "--debug" in done.out
    assert call("--help").out == done.out


def test_version(call: Call) -> None:
    from octavo import __version__

    assert call("--version").out == f"octavo {__version__}\n"


def test_run_never_exits(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", "--help"]) == 0  # typer itself would exit
    assert "--temperature" in capsys.readouterr().out


def test_list_options_may_be_repeated(call: Call, fake: type[FakeLLM]) -> None:
    assert call("generate", "-p", "a b", "-p", "c d", "--stop", "x", "--stop", "y").code == 0


def test_python_m_octavo_is_the_octavo_command(tmp_path: Path) -> None:
    for args in (["generate", "--max-tokns", "3"], []):
        module, command = (
            subprocess.run(
                [sys.executable, "-m", name, *args], capture_output=True, text=True, cwd=tmp_path, check=False
            )
            for name in ("octavo", "octavo.cli.main")
        )
        assert (module.returncode, module.stdout, module.stderr) == (command.returncode, command.stdout, command.stderr)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("stderr", [">/dev/full", ">&-"])
def test_full_or_closed_stderr_does_not_end_a_command(tmp_path: Path, stderr: str) -> None:
    script = tmp_path / "script"
    script.write_text("nonsense\nstats\n")
    command = f"'{sys.executable}' -m octavo blocks --script {script} 2{stderr}"
    environment = BUFFERED | {"OCTAVO_FLAVOUR": "x"}  # a warning
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 1  # the script has an invalid line
    assert "Hits: 0" in done.stdout


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("args", ["--version", "--help", "models", "simulate alpaca --requests 5"])
def test_full_stdout_is_a_one_line_error_with_exit_code_1(args: str) -> None:
    command = f"'{sys.executable}' -m octavo {args} >/dev/full"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False, env=BUFFERED)
    assert (done.returncode, done.stderr) == (1, "error: No space left on device\n")


def test_a_closed_pipe_is_quiet(tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text("help\n" * 20_000)
    with started("blocks", "--script", str(script), text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "blocks> help\n"
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(10) == 1


def test_a_pipe_closed_before_the_first_line_is_quiet() -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [*OCTAVO, "--version"], stdout=write, stderr=subprocess.PIPE, text=True, check=False, env=BUFFERED
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (1, "")


def test_ctrl_c_while_waiting_for_input() -> None:
    with started("blocks", text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write("stats\n")
        process.stdin.flush()
        assert process.stdout.readline() == "Hits: 0\n"  # the process is running
        time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
        assert (process.returncode, err) == (130, "")
        assert "Traceback" not in out
