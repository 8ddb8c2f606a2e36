"""Takes the pictures of docs/view-*.png again, with Chromium.

    pip install playwright
    python scripts/screenshots.py

OCTAVO_CHROMIUM is Chromium's path if `chromium` is not on PATH.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

DOCS = Path(__file__).parents[1] / "docs"
OCTAVO = [sys.executable, "-m", "octavo"]
MODEL = "smollm2-135m-instruct"
PLAY = "64x16;new,60;fork,A,3;write,B;append,C,14;new,40;free,E;new,100"
SIZE = 1280, 800


@contextlib.contextmanager
def started(*command: str) -> Iterator[str]:
    """A server of the page; yields the page's address."""
    process = subprocess.Popen(
        [*OCTAVO, *command, "--port", "0"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    try:
        yield next(found[0] for line in process.stdout if (found := re.search(r"http://\S+/view/", line)))
    finally:
        process.terminate()
        process.communicate()


def ask(url: str, number: int) -> None:
    """One user of a server: a chat, with the instructions that all users share."""
    rules = "You are a careful assistant who answers in short sentences and never invents a fact. " * 3
    messages = [
        {"role": "system", "content": rules},
        {"role": "user", "content": f"Tell me about the number {number}."},
    ]
    body = {"messages": messages, "max_tokens": 240, "n": 1 + number % 2, "seed": number}
    request = urllib.request.Request(f"{url}v1/chat/completions", json.dumps(body).encode())
    request.add_header("content-type", "application/json")
    with contextlib.suppress(OSError), urllib.request.urlopen(request) as answer:
        answer.read()


def take(browser: Browser, name: str, url: str, *, colours: str = "state", wait_s: float = 1.0) -> None:
    page = browser.new_page(viewport={"width": SIZE[0], "height": SIZE[1]}, reduced_motion="reduce")
    page.goto(url)
    page.wait_for_timeout(500)
    page.get_by_text(colours, exact=True).click()
    page.wait_for_timeout(1000 * wait_s)
    page.screenshot(path=DOCS / f"view-{name}.png")
    page.close()


def main() -> None:
    chromium = os.environ.get("OCTAVO_CHROMIUM") or shutil.which("chromium")
    with sync_playwright() as driver, tempfile.TemporaryDirectory() as folder:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        with started("view") as url:
            take(browser, "playground", f"{url}#play={PLAY}", colours="owner")
        options = ["--num-gpu-blocks-override", "112", "--max-num-seqs", "14"]
        with started("serve", MODEL, *options) as url:
            users = [threading.Thread(target=ask, args=(url.removesuffix("view/"), i), daemon=True) for i in range(60)]
            for user in users:
                user.start()
                time.sleep(0.05)
            take(browser, "live", f"{url}#live", colours="owner", wait_s=30)
        trace, frames = Path(folder) / "busy.jsonl", str(Path(folder) / "busy.frames")
        lengths = [(100 + 37 * i % 500, 80 + 53 * i % 300) for i in range(60)]
        rows = [{"timestamp": 100 * i, "input_length": m, "output_length": n} for i, (m, n) in enumerate(lengths)]
        trace.write_text("".join(f"{json.dumps({**row, 'hash_ids': []})}\n" for row in rows))
        pool = ["--model", "opt-13b", "--gpu", "a100-40", "--num-gpu-blocks-override", "400"]
        subprocess.run([*OCTAVO, "view", str(trace), *pool, "--save", frames], check=True)
        with started("view", frames) as url:
            take(browser, "replay", f"{url}#replay=12")
        browser.close()


if __name__ == "__main__":
    main()
