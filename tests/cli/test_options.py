"""Every option of every command reaches the command's function, and every environment variable has its effect."""

from __future__ import annotations

import json
import re
import typing
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import typer

import octavo
from octavo import log_setup
from octavo.checkpoint import catalog
from octavo.cli.app import app
from octavo.cli.commands import serve as serve_command
from octavo.cli.environment import ADMIN_KEY, KNOWN_VARIABLES, SERVER_KEYS, TEST_VARIABLES
from octavo.cli.main import run
from octavo.cli.options import COMBINE
from octavo.serve import launcher
from octavo.serve.args import ServeArgs

ROOT = Path(octavo.__file__).parent
DOCS = ROOT.parents[1] / "docs"
TREE = typer.main.get_command(app)
TEXTS = {"TOKENS": "4k", "ID=BIAS": "198=-5", "JSON": '{"topic": "t"}', "URL": "http://localhost:1"}
"""A value by metavar."""
SPECIAL = {"log_format": "json", "host": "::1", "block_size": "8", "mamba_block_size": "512", "ssl_ca_certs": "-text"}
SPECIAL |= {"spec_method": "ngram", "speculative_config": '{"method": "ngram"}'}
"""A value by name, where the server's validation needs one."""
WITH = {"ssl_keyfile": ["--ssl-certfile", "x"], "ssl_certfile": ["--ssl-keyfile", "x"]}
WITH["ssl_ca_certs"] = [*WITH["ssl_keyfile"], *WITH["ssl_certfile"]]
"""Options that an option needs."""
FILES = {"api_key_file", "admin_key_file"}
"""Options whose file is read."""

Given = dict[str, Any]


def commands(command: Any = TREE, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    yield path, command
    for name, child in getattr(command, "commands", {}).items():
        yield from commands(child, (*path, name))


def values_of(option: Any) -> Iterator[tuple[list[str], Any]]:
    """Command lines with the option, under each of its names, and the value of each."""
    kind = option.type_descriptor.annotation
    is_list = typing.get_origin(kind) is list
    kind = typing.get_args(kind)[0] if is_list else kind
    if kind is bool:
        yield from (([name], name in option.opts) for name in (*option.opts, *option.secondary_opts))
        return
    default = {int: "1", float: "0.5"}.get(kind, "-text")  # a generated key may begin with a dash
    text = "FILE" if option.name in FILES else SPECIAL.get(option.name, TEXTS.get(option.metavar, default))
    if typing.get_origin(kind) is typing.Literal:
        kind, text = str, typing.get_args(kind)[-1]
    value = (option.type_descriptor.parameter_info.parser or (json.loads if kind is dict else kind))(text)
    for name in option.opts:
        wanted = [value, value] if is_list else value
        yield [name, text] * (1 + is_list), COMBINE[option.name](wanted) if option.name in COMBINE else wanted


OPTIONS = [
    pytest.param(path, command, option, id=" ".join((*path, option.opts[0])))
    for path, command in commands()
    for option in command.params
    if option.param_type_name == "option" and path
]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Given:
    """The arguments of the last start of a server, which ends there."""
    start: Given = {}

    def launch(args: Any, settings: Any, keys: list[str], timer: Any, *, admin_keys: list[str]) -> None:
        lists = {name: list(value) for name, value in asdict(settings).items() if isinstance(value, tuple)}
        start.update(asdict(args) | asdict(settings) | lists | {"all_keys": keys, "all_admin_keys": admin_keys})

    def set_up(settings: log_setup.LogSettings) -> None:
        start["log_format"] = "json" if settings.as_json else "text"

    monkeypatch.setattr(launcher, "run", launch)
    monkeypatch.setattr(log_setup, "set_up", set_up)
    monkeypatch.setattr(serve_command, "check", lambda args: None)
    monkeypatch.setattr(serve_command, "is_named", lambda model: False)
    monkeypatch.setattr(ServeArgs, "check_tls", lambda self: None)
    for name in (ADMIN_KEY, *SERVER_KEYS):
        monkeypatch.delenv(name, raising=False)
    return start


@pytest.fixture
def called(path: tuple[str, ...], command: Any, launched: Given, monkeypatch: pytest.MonkeyPatch) -> Given:
    """The values with which the command's own function, below its decorators, is last called. A server starts."""
    monkeypatch.setattr(typer.main, "get_command", lambda app: TREE)
    if path == ("serve",):
        return launched
    values: Given = {}

    def call(**given: Any) -> None:
        values.clear()
        options = {param.name for param in command.params}
        for name, value in given.items():  # `options_of` passes some in a dict
            values.update(value if isinstance(value, dict) and name not in options else {name: value})

    function, cell = command.callback, None
    while (inner := getattr(function, "__wrapped__", None)) is not None:
        cell = next(cell for cell in function.__closure__ if cell.cell_contents is inner)
        function = inner
    monkeypatch.setattr(cell, "cell_contents", call)
    return values


def test_help_groups_options_and_shows_the_defaults_of_the_command(capfd: pytest.CaptureFixture[str]) -> None:
    texts = {}
    for path in ("generate", "chat", "serve", ""):
        assert run([*path.split(), "--help"]) == 0
        texts[path] = " ".join(capfd.readouterr().out.split())
    for name in ("Sampling: --n", "KV cache: --block-size", "Scheduling: --max-num-batched-tokens"):
        assert texts["generate"].count(name) == texts["chat"].count(name) == 1
    assert "Keys, TLS and access: --api-key" in texts["serve"] and "[default: 16]" in texts["generate"]
    assert "--max-tokens" in texts["chat"] and texts["chat"].count("[default: 16]") == 1  # block_size
    assert texts["generate"].count("[default: 16]") == 2 and "(16)" not in texts["generate"]
    assert "[default: 1024]" in texts["chat"] and "as many as fit. Of" not in texts["chat"] + texts["generate"]
    assert "..." not in texts[""].partition("Commands:")[2]


@pytest.mark.parametrize(("path", "command", "option"), OPTIONS)
def test_option_reaches_its_command(
    path: tuple[str, ...], command: Any, option: Any, called: Given, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """With its value and under each of its names. vLLM's obsolete ones are accepted."""
    line = [*path, *WITH.get(option.name, [])]
    for param in command.params:
        if param.required and param is not option:
            line += ["x"] if param.param_type_name == "argument" else [param.opts[0], "x"]
    if option.name in FILES:
        (tmp_path / "keys").write_text("-key\n")
    for words, value in values_of(option):
        words = [str(tmp_path / "keys") if word == "FILE" else word for word in words]
        assert run([*line, *words]) == 0, (words, capfd.readouterr().err)
        if not option.hidden:
            assert called[option.name] == (words[1] if option.name in FILES else value), words


def test_documented_variables_are_those_that_are_read() -> None:
    sources = [file.read_text() for file in ROOT.rglob("*.py")]
    read = {name for text in sources for name in re.findall(r'"((?:OCTAVO|VLLM)_[A-Z_]+)"', text)}
    rows = re.findall(r"^\| (`[A-Z_]+`.*?) \|", (DOCS / "reference" / "environment.md").read_text(), re.MULTILINE)
    documented = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert sorted(documented) == sorted(KNOWN_VARIABLES) == sorted(read)
    elsewhere = {n for file in DOCS.rglob("*.md") for n in re.findall(r"`(OCTAVO_[A-Z_]+)[`=]", file.read_text())}
    unread = {name for name in elsewhere - read if not TEST_VARIABLES.fullmatch(name)}
    assert unread == {"OCTAVO_API_KEYS"}  # an example of a misspelt name


def test_variables_have_effect(launched: Given, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    values = {name: f"-{name}" for name in (*SERVER_KEYS, ADMIN_KEY)}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    assert run(["serve", "x", "--host", "::", "--api-key", "one", "--admin-key", "two"]) == 0
    assert launched["all_keys"] == ["one", *(values[name] for name in SERVER_KEYS)]
    assert launched["all_admin_keys"] == ["two", values[ADMIN_KEY]]
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
    assert catalog.models_dir() == tmp_path / "models"
