"""`octavo bench`: the named workloads of `octavo.bench` and their tables."""

from __future__ import annotations

import typer

bench = typer.Typer(help="Measure: the core's cost on the host, attention step by step.", no_args_is_help=True)
