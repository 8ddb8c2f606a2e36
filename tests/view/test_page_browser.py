"""The page in a browser: every control of the playground, all lessons, a running server, a recording.

The tests need Chromium and Playwright, which the project does not depend on. `OCTAVO_CHROMIUM` is the path to Chromium,
else it is searched for. `OCTAVO_AXE` is the path to axe.min.js (npm's axe-core), for accessibility.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn

import octavo.view
from octavo.serve.http.server import bind, socket_url
from octavo.view.playground.core_lines import LINES
from octavo.view.playground.history import Playgrounds
from octavo.view.playground.lessons import LESSONS
from tests.serve.in_process_server import Server, run, serving

pytestmark = pytest.mark.slow
WAIT_MS = 60_000
SIZES = [(1440, 900), (1024, 768), (390, 844)]
STATIC = Path(octavo.view.__file__).parent / "static"


def chromium() -> str:
    for name in (os.environ.get("OCTAVO_CHROMIUM"), "chromium", "chromium-browser", "google-chrome"):
        if name and (path := shutil.which(name)):
            return path
    pytest.skip("Chromium is not installed; set OCTAVO_CHROMIUM to its path")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    reason = "Playwright is not installed; pip install playwright"
    playwright = pytest.importorskip("playwright.sync_api", reason=reason)
    path = chromium()
    with playwright.sync_playwright() as driver:
        running = driver.chromium.launch(
            executable_path=path, args=["--no-sandbox", "--enable-precise-memory-info", "--js-flags=--expose-gc"]
        )
        yield running
        running.close()


class Window:
    """An open page. When it closes, it must have had no errors and no requests to other hosts."""

    def __init__(
        self, browser: Any, url: str, *, size: tuple[int, int] = SIZES[0], dark: bool = False, key: str | None = None
    ) -> None:
        self.page = browser.new_page(
            http_credentials=None if key is None else {"username": "any", "password": key},
            viewport={"width": size[0], "height": size[1]},
            color_scheme="dark" if dark else "light",
            reduced_motion="reduce",
        )
        self.page.set_default_timeout(WAIT_MS)
        self.errors: list[str] = []
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("console", lambda line: self.errors.append(line.text) if line.type == "error" else None)
        self.page.on("request", lambda request: self._on_request(request.url, url))
        self.page.goto(url)
        self.until("globalThis.octavoView?.stage.pool")

    def _on_request(self, address: str, ours: str) -> None:
        if address.split("/")[:3] != ours.split("/")[:3]:
            self.errors.append(f"requested {address}")

    def until(self, condition: str) -> None:
        """Wait for a condition. It is polled from here: Playwright's wait needs `eval`, which the policy forbids."""
        deadline = time.monotonic() + WAIT_MS / 1000
        while not self.js(f"Boolean({condition})"):
            assert time.monotonic() < deadline, f"never: {condition}"
            self.page.wait_for_timeout(20)

    def js(self, expression: str) -> Any:
        return self.page.evaluate(expression)

    def settle(self) -> None:
        """Wait until clicks are handled and painted."""
        self.js("(octavoView.uses.playground?.queue ?? Promise.resolve()).then(() => octavoView.stage.paint())")

    def click(self, name: str) -> None:
        if self.js(f"Boolean(document.querySelector('#more:not(:popover-open) #{name}'))"):
            self.page.click("#more-button")
        self.page.click(f"#{name}")
        self.settle()

    @property
    def history(self) -> str:
        return str(self.js("octavoView.uses.playground.history"))

    @property
    def text(self) -> str:
        return str(self.page.inner_text("body"))


@contextlib.contextmanager
def window(browser: Any, url: str, **options: Any) -> Iterator[Window]:
    shown = Window(browser, url, **options)
    try:
        yield shown
        assert shown.errors == []
    finally:
        shown.page.close()


# -- servers -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def viewing(*arguments: str) -> Iterator[str]:
    command = [sys.executable, "-c", "from octavo.cli.main import main; main()", "view", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip()
        finally:
            process.terminate()


@pytest.fixture(scope="module")
def playground() -> Iterator[str]:
    with viewing() as url:
        yield url


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A pool that is far too small for its load: it preempts, swaps and evicts."""
    coin, time_ms, lines = random.Random(5), 0.0, []
    for i in range(60):
        time_ms += coin.expovariate(1 / 20)
        names = [100 * coin.randrange(4) + k for k in range(4)] + [
            10_000 + 50 * i + k for k in range(coin.randrange(1, 8))
        ]
        row = {"timestamp": time_ms, "input_length": 16 * len(names) - 3, "output_length": coin.randrange(60, 300)}
        lines.append(json.dumps(row | {"hash_ids": names, "hash_tokens": 16}))
    path = tmp_path_factory.mktemp("trace") / "busy.jsonl"
    path.write_text("\n".join(lines) + "\n")
    with viewing(str(path), "--num-gpu-blocks-override=160", "--swap-space=1", "--max-model-len=1024") as url:
        yield url


class Busy(threading.Thread):
    """A server with a tiny model in its own event loop, which the tests can load."""

    def __init__(self, model: str, keys: tuple[str, ...] = (), admin_keys: tuple[str, ...] = ()) -> None:
        super().__init__(daemon=True)
        self.model, self.url = model, ""
        self.keys, self.admin_keys = keys, admin_keys
        self.ready = threading.Event()
        self.leave = threading.Event()

    def run(self) -> None:
        run(self._serve(), limit_s=None)

    async def _serve(self) -> None:
        self.loop = asyncio.get_running_loop()
        options = {"num_gpu_blocks_override": 96, "max_num_seqs": 8}
        keys, admin_keys = self.keys, self.admin_keys
        async with serving(self.model, engine_options=options, keys=keys, admin_keys=admin_keys) as server:
            self.server: Server = server
            listening = uvicorn.Server(uvicorn.Config(server.app.asgi, lifespan="off", log_config=None))
            with contextlib.closing(bind("127.0.0.1", 0)) as sock:
                self.url = f"{socket_url(sock)}/view/"
                running = asyncio.create_task(listening.serve(sockets=[sock]))
                self.ready.set()
                while not self.leave.is_set():
                    await asyncio.sleep(0.05)
                listening.should_exit = listening.force_exit = True
                await running

    def give(self, num_requests: int) -> Any:
        """Start requests, without waiting for their end."""

        async def work() -> None:
            coin = random.Random(num_requests)
            shared = "Four score and seven years ago our fathers"
            requests = [
                self.server.complete(
                    f"{shared} {coin.random()}", max_tokens=coin.randrange(8, 48), n=coin.choice([1, 1, 2])
                )
                for _ in range(num_requests)
            ]
            await asyncio.gather(*requests)

        return asyncio.run_coroutine_threadsafe(work(), self.loop)

    @contextlib.contextmanager
    def kept_busy(self, *keys: str) -> Iterator[None]:
        """Keep one long request of each key running."""
        body = {"prompt": "Once upon a time", "max_tokens": 100, "ignore_eos": True, "n": 2}
        enough = threading.Event()

        async def work(key: str) -> None:
            headers = {"authorization": f"Bearer {key}"}
            while not enough.is_set():
                answer = await self.server.client.post("/v1/completions", json=body, headers=headers)
                assert answer.status_code == 200

        running = [asyncio.run_coroutine_threadsafe(work(key), self.loop) for key in keys]
        try:
            yield
        finally:
            enough.set()
            for each in running:
                each.result(WAIT_MS / 1000)

    def stats(self) -> dict[str, Any]:
        async def read() -> dict[str, Any]:
            await self.server.at_rest()
            return (await self.server.engine.kv_stats()).as_dict()

        return asyncio.run_coroutine_threadsafe(read(), self.loop).result(WAIT_MS / 1000)


@pytest.fixture(scope="module")
def busy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Busy]:
    from tests.engine.models import make_talking_checkpoint

    server = Busy(str(make_talking_checkpoint(tmp_path_factory.mktemp("talking"))))
    server.start()
    assert server.ready.wait(WAIT_MS / 1000)
    yield server
    server.leave.set()
    server.join(WAIT_MS / 1000)


# -- the playground ----------------------------------------------------------------------------------------------------


def same_as_server(shown: Window, answer: dict[str, Any] | None = None) -> None:
    """The page shows what the server's core has after the same history."""
    answer = answer or Playgrounds().answer(shown.history)
    picture = answer["picture"]
    summary = shown.js("octavoView.summary()")
    words = [int.from_bytes(picture.words[i : i + 2], "little") for i in range(0, len(picture.words), 2)]
    assert summary["refs"] == [word & 0x7FFF for word in words]
    assert summary["states"] == ["used" if w & 0x7FFF else "cached" if w & 0x8000 else "free" for w in words]
    assert summary["stats"] == picture.stats
    assert summary["numTables"] == len(answer["names"])
    names = shown.js("[...document.querySelectorAll('#tables .owner')].map((owner) => owner.textContent)")
    assert names == list(answer["names"].values())


def test_every_control_of_the_playground(browser: Any, playground: str) -> None:
    with window(browser, playground) as shown:
        page = shown.page
        clicks = [
            ("new", "new,64"),
            ("fork", "fork,A,1"),
            ("write", "write,A"),
            ("append", "append,A,16"),
            ("text", "text,Four%20score%20and%20seven%20years%20ago%20our"),
            ("type", "type,C,Four%20score%20and%20seven%20years%20ago%20our"),
            ("share", "share,64,8"),
            ("swap", "preempt,D,swap"),
            ("resume", "resume,D"),
            ("recompute", "preempt,D,recompute"),
            ("resume", "resume,D"),
            ("beam", "beam,D,4"),
            ("free", "free,"),
            ("forget", "forget"),
            ("fill", "fill"),
        ]
        for button, action in clicks:
            before = shown.history
            shown.click(button)
            assert shown.history.removeprefix(before + ";").startswith(action), (button, shown.text)
            assert page.inner_text("#sentence")
            same_as_server(shown)
        at_the_end = shown.history
        shown.click("new")  # no block is left
        assert shown.history == at_the_end and page.get_attribute("#story", "data-done") == "false"
        shown.click("undo")
        assert shown.history == at_the_end.rpartition(";")[0]
        same_as_server(shown)
        shown.click("reset")
        assert shown.history == "64x16"
        page.fill("#num-blocks", "12")
        page.fill("#block-size", "4")
        page.fill("#max-len", "20")
        page.click("#pool-form button")
        shown.settle()
        assert shown.history == "12x4x20"
        same_as_server(shown)
        page.fill("#num-blocks", "999999")
        page.eval_on_selector("#pool-form", "form => (form.noValidate = true)")
        page.click("#pool-form button")
        shown.settle()
        assert "999999" in page.inner_text("#error") and shown.history == "12x4x20"
        shown.errors.clear()  # the browser logs the status 400


def test_link_restores_the_history(browser: Any, playground: str) -> None:
    history = "16x4;new,7;fork,A,2;write,B;text,it%27s%20a%20word"
    with window(browser, f"{playground}#play={history}") as shown:
        shown.settle()
        assert shown.history == history
        same_as_server(shown)
        link = shown.page.url
        assert link.endswith(history)
        shown.page.keyboard.press("u")
        shown.settle()
        assert shown.history == history.rpartition(";")[0]
        shown.js(f"location.hash = 'play={history}'")
        shown.until(f"octavoView.uses.playground.history === {json.dumps(history)}")


def test_copy_on_write_is_shown_step_by_step(browser: Any, playground: str) -> None:
    with window(browser, f"{playground}#play=8x4;new,7;fork,A") as shown:
        shown.settle()
        shown.click("write")
        page = shown.page
        kinds = [button.inner_text().split()[1] for button in page.query_selector_all("#phases button")]
        assert kinds == ["allocate", "copy", "decrement", "repoint"]
        page.click("#phases button:nth-child(2)")
        assert shown.js("octavoView.stage.grid.arrow") == [2, 3]
        assert "2" in page.inner_text("#phase-text") and "3" in page.inner_text("#phase-text")
        page.click("#phases button:nth-child(4)")
        assert shown.js("octavoView.stage.grid.arrow") is None


def lit_lines(shown: Window) -> list[str]:
    found = shown.js("[...document.querySelectorAll('#lesson-code [aria-current]')].map((line) => line.textContent)")
    return [str(line) for line in found]


def steps_through_the_lines_that_ran(shown: Window) -> None:
    """From an action's first phase to its last one, and back."""
    phases = [phase for phase in shown.js("octavoView.uses.playground.reply.phases") if phase["lines"]]
    assert phases and shown.page.locator("#phases button").count() == len(phases)
    for button, order in (("next", phases), ("back", phases[::-1]), ("next", phases)):
        for i, phase in enumerate(order):
            if i:
                shown.click(f"lesson-{button}")
            assert lit_lines(shown) == [LINES[line] for line in sorted(phase["lines"])]
            assert shown.js("[...octavoView.stage.grid.marked]") == [phase["block_id"]]


@pytest.mark.parametrize("lesson", LESSONS, ids=[lesson.id for lesson in LESSONS])
def test_every_step_of_every_lesson(browser: Any, playground: str, lesson: Any) -> None:
    with window(browser, playground) as shown:
        page = shown.page
        page.click(f"#lesson-list button:text-is({json.dumps(lesson.title)})")
        for i, step in enumerate(lesson.steps):
            shown.settle()
            assert page.inner_text("#lesson-step") == step.text
            if step.choices:
                assert shown.history == step.history.rpartition(";")[0] and page.inner_text("#lesson-look") == ""
                choices = page.locator("#lesson-choices button")
                assert choices.all_inner_texts() == list(step.choices)
                choices.nth(step.answer - 1 if step.answer else 1).click()
                shown.settle()
                assert "Not this one" in page.inner_text("#lesson-look")
                assert shown.history == step.history.rpartition(";")[0]
                choices.nth(step.answer).click()
                shown.settle()
                assert choices.nth(step.answer).inner_text().startswith("✓")
            assert page.inner_text("#lesson-look") == step.look
            cells = [row.locator("th, td").all_inner_texts() for row in page.locator("#lesson-rows tr").all()]
            assert cells == [list(row) for row in step.rows]
            if lesson.id == "block-manager":
                steps_through_the_lines_that_ran(shown)
            else:
                assert lit_lines(shown) == [lesson.code[line] for line in step.lines]
            assert shown.js("octavoView.stage.grid.picked") == step.block
            assert shown.js("octavoView.stage.grid.mode") == lesson.colour
            assert shown.history == step.history
            answer = shown.js("octavoView.uses.playground.reply")
            assert answer["done"] is (step.action is None)
            stats = shown.js("octavoView.summary().stats")
            sequences = "[...octavoView.stage.pool.sequences.values()]"
            stats["tables"] = shown.js(f"Object.fromEntries({sequences}.map(s => [s.name, s.blocks]))")
            stats["num_tokens"] = shown.js(f"Object.fromEntries({sequences}.map(s => [s.name, s.num_tokens]))")
            for name, wanted in step.expect.items():
                found = (answer["compare"] | stats)[name]
                got = {each: found.get(each) for each in wanted} if isinstance(wanted, dict) else found
                assert got == wanted, (lesson.id, i, name)
            assert page.url.endswith(f"#lesson={lesson.id}.{i + 1}")
            if i + 1 < len(lesson.steps):
                page.click("#lesson-next")
        page.click("#lesson-leave")
        assert page.is_visible("#lesson-list")


def test_slider_of_the_block_size(browser: Any, playground: str) -> None:
    lesson = next(lesson for lesson in LESSONS if lesson.id == "block-size")
    (step, *_) = lesson.steps
    with window(browser, f"{playground}#lesson=block-size.1") as shown:
        page = shown.page
        shown.settle()
        page.focus("#stop")
        page.keyboard.press("Home")
        for stop, row in zip(step.stops, step.rows[1:], strict=True):
            shown.settle()
            assert shown.history == stop
            assert page.locator("#lesson-rows .chosen td").all_inner_texts() == list(row)
            assert page.get_attribute("#stop", "aria-valuetext") == f"{row[0]} tokens"
            assert f"{row[1]} (" in page.inner_text("#numbers [data-key='unfilled slots']")
            page.keyboard.press("ArrowRight")
        shares = shown.js(
            "[...document.querySelectorAll('#lesson-rows td')].map(e => e.style.getPropertyValue('--share'))"
        )
        assert shares[:4:2] == ["", "100%"] and shares[-3:-1] == ["100%", f"{100 * 15 / 2870}%"]
        shown.click("lesson-leave")
        assert not page.is_visible("#stop")


def test_first_visit_begins_with_lesson_1(browser: Any, playground: str) -> None:
    with window(browser, playground) as shown:
        page = shown.page
        assert page.inner_text("#begin-lesson") == "Lesson 1, two minutes"
        page.click("#begin-lesson")
        shown.settle()
        assert page.url.endswith(f"#lesson={LESSONS[0].id}.1")
        page.goto(playground)
        page.reload()
        shown.until("globalThis.octavoView?.stage.pool")
        assert page.is_visible("#lesson-list") and not page.is_visible("#begin-lesson")


def test_steps_are_in_the_history_of_the_browser(browser: Any, playground: str) -> None:
    with window(browser, f"{playground}#lesson=copy-on-write") as shown:
        page, (first, second, *_) = shown.page, LESSONS[[lesson.id for lesson in LESSONS].index("copy-on-write")].steps
        page.click("#lesson-next")
        shown.settle()
        page.go_back()
        shown.until(f"octavoView.uses.playground.history === {json.dumps(first.history)}")
        assert page.inner_text("#lesson-step") == first.text and page.url.endswith(".1")
        page.go_forward()
        shown.until(f"octavoView.uses.playground.history === {json.dumps(second.history)}")
        assert page.inner_text("#lesson-step") == second.text
    with window(browser, playground) as shown:
        page = shown.page
        page.click("#begin-lesson")
        shown.settle()
        page.go_back()
        shown.until("octavoView.uses.playground.history === '64x16'")
        assert page.is_visible("#lesson-list") and not page.is_visible("#notice")


@pytest.mark.parametrize(
    ("link", "message"),
    [
        ("lesson=nothing.2", "There is no lesson “nothing”"),
        ("lesson=copy-on-write.99", "“Copy-on-write” has no step 99"),
        ("play=0x4", "This link cannot be shown: a pool of 0 blocks"),
        ("blocks", "This page has nothing at #blocks"),
        ("live", "This page has nothing at #live"),
    ],
)
def test_wrong_link_says_so_and_offers_the_playground(browser: Any, playground: str, link: str, message: str) -> None:
    with window(browser, f"{playground}#{link}", size=SIZES[-1]) as shown:
        page = shown.page
        shown.settle()
        assert message in page.inner_text("#notice span")
        assert page.locator("#notice").bounding_box()["y"] < 300
        assert shown.js("octavoView.stage.pool.numBlocks") == 64
        page.click("#notice a")
        shown.until("document.querySelector('#notice').hidden && location.hash === '#play'")
        assert shown.history == "64x16"
        if link.startswith("play"):
            shown.errors.clear()  # the browser logs the status 400


def test_wrong_moment_says_so_and_offers_the_playground(browser: Any, playground: str, recording: str) -> None:
    with window(browser, f"{recording}#replay=abc", size=SIZES[-1]) as shown:
        shown.until("!document.querySelector('#notice').hidden && location.hash === '#replay=0.000'")
        assert "“abc” is not a moment in seconds" in shown.page.inner_text("#notice span")
        shown.page.click("#notice a")
        shown.until("document.querySelector('#notice').hidden && document.body.dataset.use === 'playground'")
    with window(browser, f"{playground}#replay=abc") as shown:
        assert "This page has nothing at #replay=abc" in shown.page.inner_text("#notice span")
    with window(browser, f"{recording}#replay=1.5") as shown:
        shown.until("octavoView.uses.replay.now_s === 1.5 && !octavoView.uses.replay.seeking")
        assert not shown.page.is_visible("#notice")


def test_grid_has_its_height_again_after_a_lesson_on_a_phone(browser: Any, playground: str) -> None:
    with window(browser, f"{playground}#lesson=parallel-samples.1", size=SIZES[-1]) as shown:
        shown.settle()
        low = shown.page.locator("#grid").bounding_box()["height"]
        shown.click("lesson-leave")
        high = shown.page.locator("#grid").bounding_box()["height"]
        shown.page.goto(f"{playground}#play=64x16;new,60;fork,A,3")
        shown.page.reload()
        shown.until("globalThis.octavoView?.stage.pool")
        assert low <= 150 < high == shown.page.locator("#grid").bounding_box()["height"]


def test_empty_room_is_below_the_requests_and_not_on_a_phone(browser: Any, recording: str) -> None:
    """Lists keep their heights so that nothing moves; that of swapped requests is mostly empty."""
    with window(browser, f"{recording}#replay=1.5", size=SIZES[-1]) as shown:
        shown.settle()
        tops = [shown.page.locator(f"#{name}").bounding_box()["y"] for name in ("running", "waiting", "swapped")]
        assert tops == sorted(tops)
        assert shown.page.locator("#facts").bounding_box()["height"] < 80


@pytest.mark.parametrize("num_blocks", [12, 13, 25, 64, 100])
@pytest.mark.parametrize("size", [SIZES[0], SIZES[-1]], ids=["desk", "phone"])
def test_rows_of_the_grid_are_even(browser: Any, playground: str, num_blocks: int, size: tuple[int, int]) -> None:
    with window(browser, f"{playground}#play={num_blocks}x4", size=size) as shown:
        columns, rows, cell, width = shown.js(
            "(({ columns, rows, cell, canvas }) => [columns, rows, cell, canvas.clientWidth])(octavoView.stage.grid)"
        )
        assert (rows - 1) * columns < num_blocks <= rows * columns
        assert rows * columns - num_blocks < rows, "the last row lacks less than one block of each row"
        assert columns * cell <= width + 1


def test_numbers_of_four_digits_stay_on_a_line(browser: Any, playground: str) -> None:
    with window(browser, f"{playground}#play=1028x16" + ";share,4096,16" * 4) as shown:
        shown.page.select_option("#unit", "524288")
        assert "6,144 of 8,224 MiB" in shown.page.inner_text("#numbers")
        rows = "[...document.querySelectorAll('#numbers > div')]"
        assert {
            tuple(row) for row in shown.js(f"{rows}.map((e) => [e.scrollWidth - e.clientWidth, e.clientHeight])")
        } == {(0, 21)}


def test_counters_show_bytes_of_a_model(browser: Any, playground: str) -> None:
    """A block of 16 tokens has 2 MiB in Llama 3.1 8B, and 8 MiB in Llama 2 7B."""
    with window(browser, f"{playground}#play=64x16;new,60;fork,A,3") as shown:
        shown.settle()
        assert "4 of 64" in shown.page.inner_text("#numbers")
        for model, used, total, empty in (("131072", "8", "128", "0.5"), ("524288", "32", "512", "2")):
            shown.page.select_option("#unit", model)
            assert f"{used} of {total} MiB" in shown.page.inner_text("#numbers")
            assert f"{empty} MiB (6.3 %)" in shown.page.inner_text("#numbers")
            assert f"{used} MiB, {empty} MiB empty" in shown.page.inner_text("#contrast")
        shown.page.select_option("#unit", "0")
        assert "4 of 64" in shown.page.inner_text("#numbers")


def test_skip_link_moves_the_focus_only(browser: Any, playground: str) -> None:
    with window(browser, f"{playground}#play=8x4;new,7") as shown:
        shown.settle()
        shown.page.keyboard.press("Tab")
        shown.page.keyboard.press("Enter")
        assert shown.js("document.activeElement.id") == "grid" and shown.history == "8x4;new,7"
        assert "#play=8x4;new,7" in shown.page.url


def test_grid_tables_and_details_highlight_each_other(browser: Any, playground: str) -> None:
    with window(browser, f"{playground}#play=64x16;new,60;fork,A,1;write,B") as shown:
        shown.settle()
        page = shown.page
        page.hover("#tables .row:first-child .chip:nth-child(3)")
        assert shown.js("octavoView.stage.grid.pointed") == 3
        assert page.inner_text("#facts dd").strip() == "3" and "A B" in page.inner_text("#facts")
        assert shown.js("[...octavoView.stage.grid.marked]") == [1, 2, 3, 4]
        assert len(page.query_selector_all("#tables .chip.on")) == 2
        place = shown.js("octavoView.stage.grid.placeOf(5)")
        page.hover("#grid", position={"x": place["x"] + 10, "y": place["y"] + 10})
        assert page.inner_text("#tables .chip.on") == "5"
        page.focus("#grid")
        page.keyboard.press("ArrowRight")
        page.keyboard.press("ArrowRight")
        assert page.inner_text("#picked").startswith("Block 2: used, 2 references")
        page.keyboard.press("Escape")
        assert page.inner_text("#picked") == ""
        for mode, key in (("owner", "2"), ("references", "3"), ("age", "4"), ("state", "1")):
            page.focus("#tables > ul")
            page.keyboard.press(key)
            assert shown.js("octavoView.stage.grid.mode") == mode
            assert page.is_checked(f"#modes input[value={mode}]")


@pytest.mark.parametrize("size", [SIZES[0], SIZES[-1]], ids=["desk", "phone"])
def test_more_by_keyboard(browser: Any, playground: str, size: tuple[int, int]) -> None:
    with window(browser, f"{playground}#play=8x4;new,7", size=size) as shown:
        page, keys = shown.page, Keyboard(shown)
        keys.go_to("more-button")
        keys.press("Enter")
        assert page.is_visible("#more") and keys.press("Tab") == "link"
        box = page.locator("#more").bounding_box()
        assert box["x"] > 0 and box["x"] + box["width"] <= size[0]
        keys.press("Escape")
        assert not page.is_visible("#more") and shown.js("document.activeElement.id") == "more-button"
        keys.press("Enter")
        keys.go_to("keys")
        keys.press("Enter")
        assert page.is_visible("#help") and not page.is_visible("#more")
        keys.press("Escape")
        assert not page.is_visible("#help") and shown.js("document.activeElement.id") == "more-button"
        assert shown.history == "8x4;new,7"


def test_cards_without_content_are_folded(browser: Any, playground: str) -> None:
    with window(browser, playground) as shown:
        page = shown.page
        cards = {"tables": "#tables > ul", "contiguous": "#pieces", "details": "#facts", "prefixes": "#tree"}
        for card, content in cards.items():
            assert page.is_visible(f"#{card} h2") and not page.is_visible(content), card
            assert page.locator(f"#{card}").bounding_box()["height"] < 70, card
        shown.click("new")
        page.focus("#grid")
        page.keyboard.press("ArrowRight")
        assert all(page.is_visible(content) for content in cards.values())
        height = page.locator("#details").bounding_box()["height"]
        page.keyboard.press("Escape")
        assert page.locator("#details").bounding_box()["height"] == height, "the cards below do not jump"


def test_legends_are_drawn_as_the_blocks_are(browser: Any, playground: str) -> None:
    sample = "document.querySelector('#legend li:nth-child({}) canvas').getContext('2d')"
    colour = f"[...{sample}.getImageData({{}}, {{}}, 1, 1).data]"
    with window(browser, f"{playground}#play=8x4;new,7;fork,A") as shown:
        shown.settle()
        left, right = (shown.js(colour.format(2, x, 14)) for x in (8, 20))
        assert left[3] == 255 and left != right, "partly filled"
        shown.page.click("#modes input[value=owner] + span")
        first, second = (shown.js(colour.format(2, 14, y)) for y in (8, 20))
        own = [shown.js(colour.format(1, 14, y)) for y in (8, 20)]
        assert first != second and own == [first, first], "shared blocks have a band for each owner"


# -- a running server --------------------------------------------------------------------------------------------------

MOMENT = """(() => {
  const { refs, states, owners, stats } = octavoView.summary();
  const count = (state) => states.filter((each) => each === state).length;
  const expected = [stats.num_used, stats.num_cached, stats.num_free];
  const sharing = refs.reduce((sum, n) => sum + Math.max(0, n - 1), 0);
  return { seen: [count("used"), count("cached"), count("free")], expected, sharing, saved: stats.num_saved_by_sharing,
           owned: refs.every((n, i) => n === owners[i]), frame: octavoView.stage.pool.frame };
})()"""


def test_live_state_equals_the_pool(browser: Any, busy: Busy) -> None:
    with window(browser, f"{busy.url}#live") as shown:
        work = busy.give(120)
        frames: set[int] = set()
        while len(frames) <= 5 or not work.done():
            if work.done():
                work.result()
                work = busy.give(120)
            moment = shown.js(MOMENT)
            assert moment["seen"] == moment["expected"] and moment["owned"], moment
            assert moment["sharing"] == moment["saved"]
            frames.add(moment["frame"])
            if len(frames) == 3:  # a delta is lost: the page reconnects
                shown.js("octavoView.stage.pool.frame += 5")
        work.result()
        wanted = busy.stats()
        shown.until(f"octavoView.stage.pool.stats.num_hits === {wanted['num_hits']}")
        shown.until("octavoView.stage.pool.requests.size === 0")
        assert shown.js("octavoView.summary().stats") == wanted
        assert shown.js("octavoView.summary().states.filter(s => s === 'cached').length") == wanted["num_cached"]
        assert shown.js("octavoView.uses.live.numDeltas") > 5
        shown.js("octavoView.stage.paint()")
        assert str(wanted["num_cached"]) in shown.page.inner_text("#numbers")
        assert "finished" in shown.page.inner_text("#events")


def test_live_state_equals_the_pool_after_reconnects(browser: Any, busy: Busy) -> None:
    """`OCTAVO_SOAK_S` seconds of load and rest, during which the stream is lost many times."""
    coin = random.Random(9)
    end = time.monotonic() + float(os.environ.get("OCTAVO_SOAK_S", "20"))
    num_moments = num_lost = num_rests = 0
    with window(browser, f"{busy.url}#live") as shown:
        while time.monotonic() < end or not num_rests:
            work = busy.give(coin.randrange(20, 60))
            while not work.done():
                moment = shown.js(MOMENT)
                assert moment["seen"] == moment["expected"] and moment["owned"] and moment["sharing"] == moment["saved"]
                num_moments += 1
                if coin.random() < 0.05:
                    num_lost += 1
                    shown.js(coin.choice(["octavoView.stage.pool.frame += 5", "octavoView.uses.live._retry('a test')"]))
            work.result()
            wanted = busy.stats()
            shown.until(f"octavoView.stage.pool.stats.num_misses === {wanted['num_misses']}")
            shown.until("octavoView.stage.pool.requests.size === 0")
            assert shown.js("octavoView.summary().stats") == wanted
            num_rests += 1
        print(f"{num_moments} moments, {num_lost} lost streams, {num_rests} times at rest")


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Busy]:
    """A model with recurrent layers."""
    from tests.engine.models import write_tokenizer
    from tests.models.tiny import make_tiny_checkpoint

    directory = make_tiny_checkpoint("qwen3_5", tmp_path_factory.mktemp("model") / "hybrid")
    write_tokenizer(directory)
    server = Busy(str(directory))
    server.start()
    assert server.ready.wait(WAIT_MS / 1000)
    yield server
    server.leave.set()
    server.join(WAIT_MS / 1000)


@pytest.mark.parametrize("size", [(1280, 800), (390, 844)])
def test_states_are_round_and_lit_with_their_sequence(browser: Any, hybrid: Busy, size: tuple[int, int]) -> None:
    """In a running server. The corner of a cell is drawn for K and V, and not for a state."""
    corner = """([block]) => {
      const { grid } = octavoView.stage;
      const { x, y } = grid.placeOf(block);
      const scale = grid.canvas.width / grid.canvas.clientWidth;
      const [left, top] = [x, y].map((edge) => Math.round((edge + 0.14 * grid.cell) * scale));
      return grid.base.getContext("2d").getImageData(left, top, 1, 1).data[3] > 100;
    }"""
    with window(browser, f"{hybrid.url}#live", size=size) as shown, hybrid.kept_busy(""):
        shown.until("[...octavoView.stage.pool.sequences.values()].some(s => s.group === 1 && s.blocks.length)")
        shown.js("octavoView.uses.live.source.close()")  # the last moment stays
        shown.js("octavoView.stage.paint(); octavoView.stage.grid._draw()")
        main, state = shown.js(
            "(([state]) => [state.main, state].map(({ uid, blocks }) => ({ uid, blocks })))"
            "([...octavoView.stage.pool.sequences.values()].filter(s => s.group === 1 && s.blocks.length))"
        )
        shown.page.locator(f'.row[data-uid="{main["uid"]}"] .name').hover()
        lit = shown.js("[...octavoView.stage.grid.marked.keys()]")
        assert lit == main["blocks"] + state["blocks"]
        for table, is_square in ((main, True), (state, False)):
            assert shown.page.evaluate(corner, table["blocks"][:1]) == is_square
            num_round = shown.page.locator(f'.row[data-uid="{table["uid"]}"] .chip.round').count()
            assert num_round == (0 if is_square else len(table["blocks"]))
        assert "two rings, c: a checkpoint of a state" in shown.page.inner_text("#legend")


@pytest.fixture(scope="module")
def tenants(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Busy]:
    from tests.engine.models import make_talking_checkpoint

    server = Busy(str(make_talking_checkpoint(tmp_path_factory.mktemp("talking"))), ("sk-1", "sk-2"), ("sk-admin",))
    server.start()
    assert server.ready.wait(WAIT_MS / 1000)
    yield server
    server.leave.set()
    server.join(WAIT_MS / 1000)


@pytest.mark.parametrize("size", [SIZES[0], SIZES[-1]], ids=["desk", "phone"])
def test_tenant_sees_own_requests_and_blocks_of_others(
    browser: Any, tenants: Busy, size: tuple[int, int], tmp_path: Path
) -> None:
    pool = "octavoView.stage.pool"
    others = f"[...Array(97).keys()].filter((block) => {pool}.refs[block] && {pool}.owner[block] < 0)"
    with (
        window(browser, tenants.url, key="sk-1", size=size) as own,
        window(browser, tenants.url, key="sk-admin", size=size) as admin,
    ):
        with tenants.kept_busy("sk-1", "sk-2"):
            admin.until("octavoView.stage.pool.queues.running.length === 2")
            own.js("document.querySelector('input[value=owner]').click()")
            own.until(f"octavoView.stage.pool.queues.running.length === 1 && {others}.length")
            facts = "[...document.querySelectorAll('#facts dd')].map((each) => each.textContent)"
            own.until(
                f"{others}.length && (octavoView.stage.grid.pick({others}[0]), octavoView.stage.paint(), "
                f"{facts}.includes('another tenant'))"
            )
            own.page.screenshot(path=tmp_path / "own.png", full_page=True)
            admin.page.screenshot(path=tmp_path / "admin.png", full_page=True)
        assert own.page.is_visible("#only-own") and not admin.page.is_visible("#only-own")
        assert not own.page.is_visible("nav a[data-use=playground]") and own.page.is_visible("nav a[data-use=live]")
        assert own.js("document.documentElement.scrollWidth <= innerWidth")
        own.until("octavoView.stage.pool.counts.running === 0")
        names = own.js("octavoView.stage.pool.events.map((event) => event.request_id)")
        tenant = tenants.server.app.asgi._keys.find(b"sk-1")
        assert tenant is not None and not tenant.sees_all
        assert any(names) and all(name is None or tenant.sees(name) for name in names)


def test_live_reconnects_after_a_lost_stream(browser: Any, busy: Busy) -> None:
    with window(browser, f"{busy.url}#live") as shown:
        shown.js(
            "octavoView.uses.live.source.dispatchEvent(new MessageEvent('bye', { data: '{\"reason\": \"slow\"}' }))"
        )
        assert "slow" in shown.page.inner_text("#connection")
        shown.until("document.querySelector('#connection').dataset.state === 'open'")
        busy.give(4).result()
        shown.until("octavoView.stage.pool.stats.num_cached > 0")


@pytest.fixture(scope="module")
def two_engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    from tests.engine.models import make_talking_checkpoint

    model = str(make_talking_checkpoint(tmp_path_factory.mktemp("talking")))
    command = [sys.executable, "-c", "from octavo.cli.main import main; main()", "serve", model, "--port=0"]
    command += ["--data-parallel-size=2", "--dp-router=round-robin", "--num-gpu-blocks-override=96"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            line = next(line for line in process.stderr if "/view/" in line)
            threading.Thread(target=process.stderr.read, daemon=True).start()  # or the pipe fills up
            yield line.split()[-1]
        finally:
            process.terminate()


LIVE = "octavoView.uses.live"


def load_engines(shown: Window) -> list[int]:
    """Give each engine another number of blocks, and return these numbers. Requests go to the engines by turns."""
    server = shown.page.url.partition("view/")[0]
    for num in (12, 36):
        body = {"prompt": f"Four score and {num}", "max_tokens": num, "ignore_eos": True}
        assert shown.page.request.post(f"{server}v1/completions", data=body).ok
    cached = [shown.page.request.get(f"{server}debug/kv?replica={i}").json()["num_cached"] for i in range(2)]
    assert cached[0] != cached[1]
    return cached


@pytest.mark.parametrize("size", [SIZES[0], SIZES[-1]], ids=["desk", "phone"])
def test_every_engine_is_shown(browser: Any, two_engines: str, size: tuple[int, int]) -> None:
    with window(browser, two_engines, size=size) as shown:
        page, keys, cached = shown.page, Keyboard(shown), load_engines(shown)
        numbers = "octavoView.stage.pool?.stats.num_cached"
        assert page.locator("#engine option").all_inner_texts() == ["0 of 2", "1 of 2"]
        assert page.get_by_label("Engine").input_value() == "0"
        assert size != SIZES[-1] or page.locator("#engine").bounding_box()["height"] >= 44
        shown.until(f"{numbers} === {cached[0]}")
        keys.go_to("engine")
        assert keys.press("ArrowDown") == "engine"
        shown.until(f"{numbers} === {cached[1]}")
        assert page.url.endswith("#live=1") and page.input_value("#engine") == "1"
        with page.expect_request("**/view/blocks/*") as asked:
            page.focus("#grid")
            page.keyboard.press("ArrowRight")
        assert asked.value.url.endswith("?replica=1")
        other = page.url
        page.go_back()
        shown.until(f"{numbers} === {cached[0]}")
        assert page.input_value("#engine") == "0"
        assert shown.js("document.documentElement.scrollWidth <= innerWidth")
    with window(browser, other, size=size) as shown:
        shown.until(f"{numbers} === {cached[1]}")
        assert shown.page.input_value("#engine") == "1"


@pytest.mark.parametrize("engine", ["2", "-1", "x", "1.0"])
def test_link_to_no_engine_shows_engine_0(browser: Any, two_engines: str, engine: str) -> None:
    with window(browser, f"{two_engines}#live={engine}", size=SIZES[-1]) as shown:
        assert f"The server has no engine “{engine}”" in shown.page.inner_text("#notice span")
        assert shown.page.input_value("#engine") == "0" and shown.js(f"{LIVE}.source.url").endswith("replica=0")
        shown.page.select_option("#engine", "1")
        shown.until(f"{LIVE}.engine === 1")
        assert not shown.page.is_visible("#notice")


def test_one_engine_has_no_selector(browser: Any, busy: Busy, recording: str) -> None:
    for url in (f"{busy.url}#live", recording):
        with window(browser, url) as shown:
            assert not shown.page.is_visible("#engines") and not shown.page.is_visible("#notice")


# -- a recording -------------------------------------------------------------------------------------------------------


def at(page: Any, url: str, time_s: float) -> dict[str, Any]:
    answer: dict[str, Any] = page.request.get(f"{url}replay/at?time_s={time_s}").json()
    return answer


def test_replay_scrubs_plays_and_jumps(browser: Any, recording: str) -> None:
    with window(browser, f"{recording}#replay=1") as shown:
        page = shown.page
        summary = page.request.get(f"{recording}replay").json()
        times = [mark["time_s"] for mark in summary["marks"] if mark["event"] == "preempted"]
        assert len(times) > 3
        shown.until("octavoView.uses.replay.now_s === 1 && !octavoView.uses.replay.seeking")
        assert shown.js("octavoView.summary().stats") == at(page, recording, 1)["stats"]
        for share in (0.9, 0.2, 0.5):  # forwards and backwards
            time_s = round(share * summary["duration_s"], 3)
            page.fill("#scrub", str(time_s))
            shown.until(f"octavoView.uses.replay.now_s === {time_s} && !octavoView.uses.replay.seeking")
            expected = at(page, recording, time_s)
            assert shown.js("octavoView.summary().stats") == expected["stats"]
            assert shown.js("octavoView.stage.pool.requests.size") == len(expected["requests"])
        page.fill("#scrub", "0")
        shown.until("!octavoView.uses.replay.seeking")
        page.keyboard.press("Escape")
        page.click("#jump")
        shown.until(f"Math.abs(octavoView.uses.replay.now_s - {times[0]}) < 0.06 && !octavoView.uses.replay.seeking")
        shown.js("octavoView.uses.replay.seek(0)")
        page.select_option("#speed", "20")
        page.click("#run")
        shown.until("octavoView.uses.replay.now_s === octavoView.uses.replay.summary.duration_s")
        shown.until("!octavoView.uses.replay.playing && !octavoView.uses.replay.frames.length")
        # Playing to the end shows the same as a jump to the end.
        assert shown.js("octavoView.summary().stats") == at(page, recording, summary["duration_s"])["stats"]
        assert shown.js("octavoView.stage.pool.steps.some(s => s.numPreempted || s.numSwaps)")
        assert page.get_attribute("#export", "href").startswith("replay/export?from_s=")
        assert page.request.get(recording + page.get_attribute("#trace", "href")).ok


# -- all uses ----------------------------------------------------------------------------------------------------------


def urls(playground: str, busy: Busy, recording: str) -> dict[str, str]:
    history = "64x16;new,60;fork,A,3;write,B;append,C,14;new,40;free,E;new,100"
    return {
        "play": f"{playground}#play={history}",
        "lesson": f"{playground}#lesson=copy-on-write.2",
        "kernel": f"{playground}#lesson=kernel.3",
        "size": f"{playground}#lesson=block-size.1",
        "manager": f"{playground}#lesson=block-manager.4",
        "questions": f"{playground}#lesson=questions.2",
        "wrong": f"{playground}#lesson=nothing",
        "live": f"{busy.url}#live",
        "replay": f"{recording}#replay=2",
    }


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_axe_finds_no_violations(
    browser: Any, playground: str, busy: Busy, recording: str, two_engines: str, dark: bool
) -> None:
    axe = os.environ.get("OCTAVO_AXE")
    if not axe:
        pytest.skip("set OCTAVO_AXE to the path of axe.min.js")
    source = Path(axe).read_text(encoding="utf-8")
    for name, url in (urls(playground, busy, recording) | {"engines": f"{two_engines}#live=1"}).items():
        for size in SIZES:
            with window(browser, url, dark=dark, size=size) as shown:
                shown.js("octavoView.stage.paint()")
                if name == "play":
                    shown.page.click("#more-button")
                shown.js(source)  # evaluated, because the policy forbids other scripts
                found = shown.js("axe.run().then((result) => result.violations)")
                violations = [(each["id"], [node["target"] for node in each["nodes"]]) for each in found]
                assert not violations, (name, size)


FOCUSED = """(() => {
  const element = document.activeElement;
  if (element === document.body) return null;
  const shown = element.matches("#modes input") ? element.nextElementSibling : element;
  const box = shown.getBoundingClientRect();
  const { outlineStyle, outlineWidth } = getComputedStyle(shown);
  const name = element.id || element.className + ":" + element.textContent.trim().slice(0, 40);
  const isInSight = box.width > 0 && box.height > 0 && box.bottom > 0 && box.top < innerHeight
    && box.right > 0 && box.left < innerWidth;
  return { name, isInSight, hasOutline: outlineStyle !== "none" && parseFloat(outlineWidth) >= 1 };
})()"""


class Keyboard:
    """Keys only. Each element that gets the focus must be in sight, with an outline."""

    def __init__(self, shown: Window) -> None:
        self.shown = shown

    def press(self, key: str) -> str:
        """Press a key; return the name of the element that has the focus, or an empty text if none has."""
        self.shown.page.keyboard.press(key)
        self.shown.settle()
        focused = self.shown.js(FOCUSED)
        if focused is None:
            return ""
        assert focused["isInSight"] and focused["hasOutline"], (key, focused)
        return str(focused["name"])

    def go_to(self, name: str, key: str = "Tab") -> None:
        seen = []
        for _ in range(150):
            seen.append(self.press(key))
            if seen[-1] == name:
                return
        raise AssertionError(f"{key} never comes to {name}: {seen}")


@pytest.mark.parametrize("size", [SIZES[0], SIZES[-1]], ids=["desk", "phone"])
def test_the_playground_by_keyboard_alone(browser: Any, playground: str, size: tuple[int, int]) -> None:
    lesson = next(lesson for lesson in LESSONS if lesson.id == "block-tables")
    with window(browser, playground, size=size) as shown:
        page, keys = shown.page, Keyboard(shown)
        keys.go_to(f":{lesson.title}")
        keys.press("Enter")
        assert page.inner_text("#lesson-title") == lesson.title
        for i in range(1, len(lesson.steps)):
            if i == 1:  # then the button keeps the focus
                keys.go_to("lesson-next")
            keys.press("Enter" if i % 2 else "Space")
            assert page.url.endswith(f"#lesson={lesson.id}.{i + 1}")
        keys.go_to("lesson-back")
        keys.press("Space")
        assert page.url.endswith(f".{len(lesson.steps) - 1}")
        keys.go_to("lesson-leave", "Shift+Tab")
        keys.press("Enter")
        assert page.is_visible("#lesson-list")
        keys.go_to("more-button", "Shift+Tab")
        keys.press("Enter")
        keys.go_to("reset")
        assert keys.press("Enter") == "more-button" and not page.is_visible("#more")
        keys.go_to("new-tokens")
        for key in ("Control+a", "7"):
            keys.press(key)
        keys.go_to("new")
        keys.press("Enter")
        keys.go_to("fork")
        keys.press("Space")
        assert shown.history.endswith(";new,7;fork,A,1")
        keys.go_to("grid")
        for key in ("ArrowRight", "ArrowRight", "ArrowDown", "ArrowUp", "ArrowLeft", "ArrowRight"):
            assert keys.press(key) == "grid"
        assert shown.js("octavoView.stage.grid.picked") == 2 and page.inner_text("#facts dd").strip() == "2"
        assert page.inner_text("#picked").startswith("Block 2: used, 2 references")


@pytest.mark.parametrize("key", ["Tab", "Shift+Tab"])
def test_the_focus_goes_through_all_uses_and_is_never_trapped(
    browser: Any, playground: str, busy: Busy, recording: str, key: str
) -> None:
    for name, url in urls(playground, busy, recording).items():
        with window(browser, url) as shown:
            keys, seen = Keyboard(shown), [""]
            while len(seen) < 250 and (len(seen) == 1 or seen[-1]):
                seen.append(keys.press(key))
            assert not seen[-1], (name, "the focus never leaves the page", seen)
            own = {"play": "new", "live": "zoom-in", "replay": "scrub", "wrong": "begin-lesson"}
            wanted = own.get(name, "lesson-next")
            assert wanted in seen and "grid" in seen and len(set(seen)) > 10, (name, seen)


def test_the_tabs_are_switched_by_keyboard(browser: Any, recording: str) -> None:
    with window(browser, recording) as shown:
        keys = Keyboard(shown)
        for label, use in (("Playground", "playground"), ("Replay", "replay")):
            keys.go_to(f":{label}")
            keys.press("Enter")
            shown.until(f"document.body.dataset.use === '{use}' && octavoView.stage.pool")
            assert shown.page.inner_text("nav a[aria-current]") == label


@pytest.mark.parametrize("size", SIZES, ids=[f"{width}x{height}" for width, height in SIZES])
def test_page_does_not_overflow_horizontally(
    browser: Any, playground: str, busy: Busy, recording: str, size: tuple[int, int]
) -> None:
    for name, url in urls(playground, busy, recording).items():
        with window(browser, url, size=size) as shown:
            shown.js("octavoView.stage.paint()")
            assert shown.js("document.documentElement.scrollWidth <= innerWidth"), (name, size)


def test_a_lesson_and_its_blocks_are_in_sight_on_a_phone(browser: Any, playground: str) -> None:
    with window(browser, f"{playground}#lesson=copy-on-write.2", size=SIZES[-1]) as shown:
        shown.js("octavoView.stage.paint()")
        for name in ("#lesson .current-step", "#grid"):
            box = shown.page.locator(name).bounding_box()
            assert box["y"] >= 0 and box["y"] + box["height"] <= SIZES[-1][1], (name, box)


def test_the_blocks_stay_in_sight_at_the_end_of_a_long_step_on_a_phone(browser: Any, playground: str) -> None:
    for link in ("kernel.6", "virtual-memory.1", "bytes.4", "questions.5"):
        with window(browser, f"{playground}#lesson={link}", size=SIZES[-1]) as shown:
            shown.settle()
            shown.page.locator("#lesson-next").scroll_into_view_if_needed()
            grid, button = (shown.page.locator(name).bounding_box() for name in ("#grid", "#lesson-next"))
            assert grid["y"] >= 0 and grid["y"] + grid["height"] < button["y"], link
            assert button["y"] + button["height"] <= SIZES[-1][1], link


def test_no_layout_shift_while_playing(browser: Any, recording: str) -> None:
    with window(browser, f"{recording}#replay=1") as shown:
        shown.js(
            "globalThis.moved = 0; new PerformanceObserver((list) => list.getEntries().forEach((e) => "
            "(moved += e.hadRecentInput ? 0 : e.value))).observe({ type: 'layout-shift' })"
        )
        shown.js("octavoView.uses.replay.play()")
        shown.until("octavoView.uses.replay.now_s > 5")
        assert shown.js("moved") < 0.01


def test_a_million_blocks(browser: Any, busy: Busy) -> None:
    num = 1_000_000
    coin = random.Random(3)
    words = bytearray(2 * num)
    for i in range(0, num, 2):
        words[2 * i : 2 * i + 2] = coin.choice([0x8001, 0x8000, 1]).to_bytes(2, "little")
    empty = b64encode(b"").decode()
    snapshot = {
        "kind": "snapshot",
        "epoch": "m",
        "frame": 0,
        "time_s": 0,
        "step": 0,
        "num_blocks": num,
        "block_size": 16,
    }
    snapshot |= {"num_host_blocks": 0, "words": b64encode(words).decode(), "requests": [], "sequences": []}
    snapshot |= {"seals": {"block_ids": empty, "seal_ids": empty, "parent_ids": empty}, "counts": {}}
    with window(browser, f"{busy.url}#live") as shown:
        shown.js("octavoView.uses.live.leave()")
        stats = shown.js("octavoView.stage.pool.stats")
        shown.page.evaluate("(s) => { globalThis.input = s }", json.dumps(snapshot | {"stats": stats}))
        seconds = shown.js("(() => { const t = performance.now(); octavoView.stage.show(JSON.parse(input));"
                           " octavoView.stage.grid._draw(); return (performance.now() - t) / 1000 })()")  # fmt: skip
        for frame in range(1, 21):
            ids = sorted(coin.sample(range(1, num + 1), 100))
            blocks = {
                "ids": b64encode(b"".join(i.to_bytes(4, "little") for i in ids)).decode(),
                "words": b64encode(b"\x03\x80" * 100).decode(),
            }
            delta = {
                "kind": "delta",
                "epoch": "m",
                "frame": frame,
                "time_s": frame / 10,
                "step": frame,
                "blocks": blocks,
            }
            shown.page.evaluate("(d) => octavoView.stage.apply(d)", delta)
            for i in ids:
                words[2 * i - 2 : 2 * i] = b"\x03\x80"
        seen = shown.js("[0, 1, 3].map((n) => octavoView.stage.pool.refs.slice(1).filter((refs) => refs === n).length)")
        refs = [(words[i] | words[i + 1] << 8) & 0x7FFF for i in range(0, 2 * num, 2)]
        assert seen == [refs.count(n) for n in (0, 1, 3)]
        pixels = (
            "(() => { const g = octavoView.stage.grid; const i = g.pixels; let bad = 0; for (let b = 1; b <= "
            "g.pool.numBlocks; b++) bad += i[b - 1] !== g.paletteImage[g._paletteIndex(b)]; return bad })()"
        )
        assert shown.js(pixels) == 0, "the heat map differs from the pool"
        for _ in range(12):
            shown.page.click("#zoom-in")
        assert shown.js("octavoView.stage.grid.cell") > 9
        heap = shown.js("(globalThis.gc?.(), performance.memory.usedJSHeapSize / 2 ** 20)")
        assert seconds < 20 and heap < 300, (seconds, heap)
        print(f"first frame {seconds:.2f} s, heap {heap:.0f} MB")
