"""Checks the Grafana dashboard with a real Prometheus: every query of every panel must return data.

    python scripts/grafana_check.py [--prometheus PROGRAM] [--seconds 40] [--out docs/dashboard.svg]

Starts a server with a tiny model and a pool too small for its load, and a Prometheus that scrapes it once a second.
Then runs the dashboard's queries and draws the results. The exit code is 77 if Prometheus is not installed
(`apt-get install prometheus`).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).parents[1]
DASHBOARD = ROOT / "deploy" / "grafana" / "dashboard.json"
SKIPPED = 77
RATE_INTERVAL = "5s"
"""Replaces $__rate_interval. Grafana uses at least four times the scrape interval."""
SERVER = (
    "--num-gpu-blocks-override",
    "160",
    "--max-num-seqs",
    "12",
    "--max-num-queued-reqs",
    "24",
    "--block-size",
    "8",
)
CONFIG = """
global: {{scrape_interval: 1s, scrape_timeout: 1s}}
scrape_configs:
  - job_name: octavo
    authorization: {{credentials: key}}
    static_configs: [{{targets: ["{target}"]}}]
"""


# -- load --------------------------------------------------------------------------------------------------------------


async def load(url: str, seconds: float) -> None:
    """Low load for a third of the time, high for a third, low again.

    Requests include shared prefixes, n=3, invalid parameters and clients that disconnect.
    """
    rng, begin = random.Random(0), time.monotonic()
    system = "You are a guide to the people of this town, and answer briefly. "

    async def request(client: httpx.AsyncClient) -> None:
        body: dict[str, Any] = {
            "prompt": (system if rng.random() < 0.7 else "") + rng.choice("abcdefgh") * rng.randint(1, 80),
            "max_tokens": rng.randint(20, 260),
            "n": rng.choice((1, 1, 1, 3)),
            "seed": rng.randrange(100),
            "stream": True,
        }
        if rng.random() < 0.05:
            body["temperature"] = 9
        disconnects = rng.random() < 0.1
        async with client.stream("POST", "/v1/completions", json=body) as response:
            async for _ in response.aiter_bytes():
                if disconnects:
                    return

    async def caller(client: httpx.AsyncClient, only_high_load: bool) -> None:
        while (elapsed := time.monotonic() - begin) < seconds:
            if only_high_load and not seconds / 3 < elapsed < 2 * seconds / 3:
                await asyncio.sleep(0.1)
                continue
            await request(client)
            await asyncio.sleep(rng.uniform(0, 0.2))

    headers = {"authorization": "Bearer key"}
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, headers=headers, limits=limits, timeout=60) as client:
        await asyncio.gather(*(caller(client, only_high_load=i >= 3) for i in range(40)))


# -- Prometheus --------------------------------------------------------------------------------------------------------


@contextmanager
def scraping(program: str, target: str, directory: Path) -> Iterator[str]:
    """Run a Prometheus that scrapes the server, and yield its URL."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    config = directory / "prometheus.yml"
    config.write_text(CONFIG.format(target=target))
    command = [program, f"--config.file={config}", f"--storage.tsdb.path={directory / 'tsdb'}", "--log.level=error"]
    process = subprocess.Popen([*command, f"--web.listen-address={address}"])
    try:
        for _ in range(200):
            try:
                urllib.request.urlopen(f"http://{address}/-/ready").close()
                break
            except OSError:
                time.sleep(0.1)
        yield f"http://{address}"
    finally:
        process.terminate()
        process.wait()


def run_query(prometheus: str, query: str, begin: float, end: float) -> list[dict[str, Any]]:
    params = urllib.parse.urlencode({"query": query, "start": begin, "end": end, "step": 1})
    with urllib.request.urlopen(f"{prometheus}/api/v1/query_range?{params}") as response:
        reply = json.load(response)
    assert reply["status"] == "success", reply
    found: list[dict[str, Any]] = reply["data"]["result"]
    return found


# -- the dashboard -----------------------------------------------------------------------------------------------------


def panels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(DASHBOARD.read_text())["panels"]
    return found


def expand_variables(query: str) -> str:
    """The query with Grafana's variables replaced, for all models."""
    return query.replace("$__rate_interval", RATE_INTERVAL).replace("$model_name", ".*")


Series = dict[str, list[tuple[float, float]]]
"""Legend -> points of (seconds since the start, value)."""


def series_of(panel: dict[str, Any], prometheus: str, begin: float, end: float) -> tuple[Series, list[str]]:
    """The panel's series, and those of its queries that returned no data."""
    shown: Series = {}
    empty = []
    for target in panel["targets"]:
        num_points = 0
        for result in run_query(prometheus, expand_variables(target["expr"]), begin, end):
            label = re.sub(r"\{\{(\w+)\}\}", lambda m, r=result: r["metric"].get(m[1], ""), target["legendFormat"])
            points = [(at - begin, float(value)) for at, value in result["values"] if math.isfinite(float(value))]
            num_points += len(points)
            shown[label] = points
        if not num_points:
            empty.append(target["expr"])
    return shown, empty


def drawing(shown: list[tuple[dict[str, Any], Series]]) -> str:
    """The panels as one SVG, two in a row."""
    from octavo.simulate.plot import HEIGHT, WIDTH, Chart, Line, svg

    height = HEIGHT * math.ceil(len(shown) / 2)
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * WIDTH} {height}">']
    for i, (panel, series) in enumerate(shown):
        unit = {"s": "seconds", "percentunit": "share"}.get(panel["fieldConfig"]["defaults"]["unit"], "")
        lines = [Line(name, [x for x, _ in points], [y for _, y in points]) for name, points in series.items()]
        chart = svg([Chart(panel["title"], "seconds", unit, lines=lines)])
        parts.append(f'<g transform="translate({i % 2 * WIDTH} {i // 2 * HEIGHT})">{chart}</g>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--prometheus", default="prometheus")
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "dashboard.svg")
    args = parser.parse_args()
    if (program := shutil.which(args.prometheus)) is None:
        print(f"skipped: {args.prometheus} is not installed; apt-get install prometheus", file=sys.stderr)
        return SKIPPED
    sys.path.insert(0, str(ROOT))
    from tests.clients.tiny_server import serving

    with (
        tempfile.TemporaryDirectory() as name,
        serving(Path(name), *SERVER) as url,
        scraping(program, url.removeprefix("http://"), Path(name)) as prometheus,
    ):
        begin = time.time()
        asyncio.run(load(url, args.seconds))
        time.sleep(2)
        end = time.time()
        found = [(panel, *series_of(panel, prometheus, begin, end)) for panel in panels()]
    num_queries = sum(len(panel["targets"]) for panel, _, _ in found)
    failed = [(panel["title"], query) for panel, _, empty in found for query in empty]
    for title, query in failed:
        print(f"no data: {title}: {query}")
    args.out.write_text(drawing([(panel, series) for panel, series, _ in found if panel["type"] == "timeseries"]))
    print(f"{num_queries - len(failed)} of {num_queries} queries in {len(found)} panels return data; {args.out}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
