"""The `octavo` application: registers the commands. Commands import torch only when they run."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

import octavo
from octavo.cli.commands.bench import bench
from octavo.cli.commands.blocks import blocks
from octavo.cli.commands.calibrate import calibrate
from octavo.cli.commands.chat import chat
from octavo.cli.commands.cluster import cluster
from octavo.cli.commands.demo import demo
from octavo.cli.commands.doctor import doctor
from octavo.cli.commands.generate import generate
from octavo.cli.commands.models import models
from octavo.cli.commands.plan import plan
from octavo.cli.commands.reproduce import reproduce
from octavo.cli.commands.serve import serve
from octavo.cli.commands.simulate import simulate
from octavo.cli.commands.top import top
from octavo.cli.commands.view import view
from octavo.cli.environment import check_environment
from octavo.cli.single_options import Command, Group
from octavo.params.vllm_arguments import flag_name

app = typer.Typer(
    cls=Group,
    help="Serve large language models from paged key/value memory, and see every block.",
    add_completion=False,
    rich_markup_mode=None,
    invoke_without_command=True,
    # --max_tokens is the same as --max-tokens.
    context_settings={
        "token_normalize_func": lambda name: name.replace("_", "-"),
        "help_option_names": ["-h", "--help"],
    },
)
app.command(cls=Command)(generate)
app.command(cls=Command)(chat)
app.command(cls=Command)(demo)
app.command(cls=Command)(blocks)
app.command(cls=Command)(serve)
app.command(cls=Command)(cluster)
app.command(cls=Command)(doctor)
app.command(cls=Command)(view)
app.command(cls=Command)(top)
app.command(cls=Command)(simulate)
app.command(cls=Command)(reproduce)
app.command(cls=Command)(plan)
app.command(cls=Command)(calibrate)
app.add_typer(models, name="models")
app.add_typer(bench, name="bench")


@app.callback()
def options(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Print a traceback on errors.")] = False,
) -> None:
    # `main.run` removes --debug from the arguments, so that it may appear anywhere; declared here for --help.
    del debug
    if version:
        print(f"octavo {octavo.__version__}")
    elif context.invoked_subcommand is None:
        print(context.get_help())


def warn_of_environment(args: Sequence[str]) -> None:
    """Print warnings about environment variables, not for --help and --version. `serve` raises `UsageError` instead."""
    if not args or {"-h", "--help", "--version"} & set(args):
        return
    command = next((arg for arg in args if not arg.startswith("-")), "")
    for warning in check_environment(os.environ, for_server=command == "serve"):
        print(f"warning: {warning}", file=sys.stderr)


def call(args: list[str]) -> int:
    """Run a command line and return its exit code. Exceptions of the command propagate."""
    code = typer.main.get_command(app).main(args, prog_name="octavo", standalone_mode=False)
    return code if isinstance(code, int) else 0


def usage_problem(error: Exception) -> str | None:
    """The message of an error in the command line; None for other errors."""
    if not isinstance(error, typer.TyperException):
        return None
    option = getattr(error, "option_name", "")
    if option.startswith("-") and type(error).__name__ == "NoSuchOption":
        context = getattr(error, "ctx", None)
        params = context.command.params if context else []
        options = [name for param in params for name in (*param.opts, *param.secondary_opts)]
        near = difflib.get_close_matches(option, options, n=1, cutoff=0.6)
        command = context.command_path if context else "octavo"
        if flag_name(option) is not None:
            return f"vLLM flag {option.partition('.')[0].replace('_', '-')} is not supported here; see {command} --help"
        return f"no option {option}; " + (f"did you mean {near[0]}?" if near else f"see {command} --help")
    message = error.format_message().rstrip(".").replace(": Value error, ", ": ")
    return message[:1].lower() + message[1:]
