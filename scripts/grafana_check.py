"""The Grafana dashboard against a real Prometheus: every query of every panel must return data.

    python scripts/grafana_check.py [--prometheus PROGRAM] [--seconds 40] [--out docs/dashboard.svg]

Starts a server with a tiny model and a pool that is too small for its load, lets Prometheus scrape it once a second,
asks what the dashboard asks, and draws the answers. Exits with 77 where there is no Prometheus
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
"""What Grafana puts in the place of $__rate_interval: four times the scrape interval at least."""
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
    """A quiet third, a crowd, and a quiet third: prompts with common beginnings, samples, mistakes, and who leaves."""
    chance, begin = random.Random(0), time.monotonic()
    system = "You are a guide to the people of this town, and answer briefly. "

    async def one(client: httpx.AsyncClient) -> None:
        body: dict[str, Any] = {
            "prompt": (system if chance.random() < 0.7 else "") + chance.choice("abcdefgh") * chance.randint(1, 80),
            "max_tokens": chance.randint(20, 260),
            "n": chance.choice((1, 1, 1, 3)),
            "seed": chance.randrange(100),
            "stream": True,
        }
        if chance.random() < 0.05:
            body["temperature"] = 9
        leaves = chance.random() < 0.1
        async with client.stream("POST", "/v1/completions", json=body) as response:
            async for _ in response.aiter_bytes():
                if leaves:
                    return

    async def caller(client: httpx.AsyncClient, only_in_the_crowd: bool) -> None:
        while (elapsed := time.monotonic() - begin) < seconds:
            if only_in_the_crowd and not seconds / 3 < elapsed < 2 * seconds / 3:
                await asyncio.sleep(0.1)
                continue
            await one(client)
            await asyncio.sleep(chance.uniform(0, 0.2))

    headers = {"authorization": "Bearer key"}
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, headers=headers, limits=limits, timeout=60) as client:
        await asyncio.gather(*(caller(client, only_in_the_crowd=i >= 3) for i in range(40)))


# -- Prometheus --------------------------------------------------------------------------------------------------------


@contextmanager
def scraping(program: str, target: str, directory: Path) -> Iterator[str]:
    """A Prometheus that scrapes the server; its address."""
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


def ask(prometheus: str, query: str, begin: float, end: float) -> list[dict[str, Any]]:
    asked = urllib.parse.urlencode({"query": query, "start": begin, "end": end, "step": 1})
    with urllib.request.urlopen(f"{prometheus}/api/v1/query_range?{asked}") as response:
        answer = json.load(response)
    assert answer["status"] == "success", answer
    found: list[dict[str, Any]] = answer["data"]["result"]
    return found


# -- the dashboard -----------------------------------------------------------------------------------------------------


def panels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(DASHBOARD.read_text())["panels"]
    return found


def as_asked(query: str) -> str:
    """As Grafana sends it, with all models chosen."""
    return query.replace("$__rate_interval", RATE_INTERVAL).replace("$model_name", ".*")


Series = dict[str, list[tuple[float, float]]]
"""Name in the legend -> (seconds since the beginning, value)."""


def series_of(panel: dict[str, Any], prometheus: str, begin: float, end: float) -> tuple[Series, list[str]]:
    """What a panel shows, and which of its queries nothing came of."""
    shown: Series = {}
    empty = []
    for target in panel["targets"]:
        num_points = 0
        for result in ask(prometheus, as_asked(target["expr"]), begin, end):
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
        print(f"skipped: there is no {args.prometheus}; apt-get install prometheus", file=sys.stderr)
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
