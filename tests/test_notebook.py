"""What notebooks show of an `LLM` and of a `RequestOutput`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, CompletionOutput, RequestOutput, SamplingParams
from octavo.engine.outputs import RequestMetrics
from octavo.notebook import (
    MAX_PROMPT,
    MAX_SQUARES,
    OTHERS,
    OWNERS,
    SHARED,
    PoolPicture,
    message_html,
    picture_pool,
    pool_html,
)
from tests.engine.models import WrappedModel, make_talking_checkpoint

GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
MARKUP = "<script>alert('a & \"b\"')</script>"
PREFIX = list(range(3, 12))
PIN = 'pin:"><guide>'


class Page(HTMLParser):
    """The squares of a pool with their titles, the texts, and whether every tag is closed by its own."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.squares: list[tuple[str, str]] = []
        self.texts: list[str] = []
        self._open: list[str] = []
        self.feed(html)
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        assert tag in ("div", "span", "b", "i") and values.keys() <= {"style", "title"}
        self._open.append(tag)
        if values.get("title"):
            self.squares.append((str(values["title"]), str(values["style"])))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(self.texts)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_talking_checkpoint(tmp_path_factory.mktemp("talking"))


@pytest.fixture
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), block_size=4, num_gpu_blocks_override=60) as made:
        yield made


def page_of(llm: LLM) -> Page:
    return Page(llm._repr_html_())


def ids(*tokens: int) -> dict[str, Any]:
    return {"prompt_token_ids": list(tokens)}


@pytest.mark.parametrize(("num_blocks", "size"), [(1, 1), (MAX_SQUARES, 1), (MAX_SQUARES + 1, 2), (10_000, 21)])
def test_a_square_stands_for_a_block_or_for_several_in_a_large_pool(folder: Path, num_blocks: int, size: int) -> None:
    with LLM(str(folder), num_gpu_blocks_override=num_blocks) as llm:
        page = page_of(llm)
    titles = [title for title, _ in page.squares]
    assert len(titles) == -(-num_blocks // size) <= MAX_SQUARES
    assert ("a square is" in page.text) == (size > 1)
    if size == 1:
        assert titles == [f"block {i + 1}: free" for i in range(num_blocks)]
    else:
        assert titles[0] == f"blocks 1 to {size}: {size} free"
        assert f"to {num_blocks}: " in titles[-1]
        assert sum(int(title.split(": ")[1].split()[0]) for title in titles) == num_blocks
    assert f"{num_blocks:,} blocks of 16 tokens, 0 used, 0 cached" in page.text and f"free: {num_blocks:,}" in page.text


def pictures_of(llm: LLM, *prompts: dict[str, Any]) -> list[PoolPicture]:
    """The pool before each forward pass: taken on the engine's thread, so that no request ends meanwhile."""
    found: list[PoolPicture] = []
    WrappedModel(llm, before=lambda number, tokens: found.append(picture_pool(llm.engine)))
    llm.generate(list(prompts), GREEDY, use_tqdm=False)
    return found


def test_colours_are_owners_while_requests_run(llm: LLM) -> None:
    llm.pin_prefix(ids(*PREFIX), PIN.removeprefix("pin:"))
    titles = [title for title, _ in page_of(llm).squares]
    assert titles[:4] == [f"block {i}: {PIN}" for i in (1, 2, 3)] + ["block 4: free"]
    pictures = pictures_of(llm, ids(*PREFIX, 20), ids(30, 31, 32, 33, 34))
    for pool in pictures:
        assert sum(label not in ("free", "cached") for label in pool.labels) == pool.stats.num_used
    html = pool_html("m", pictures[-1])
    squares = dict(Page(html).squares)
    for i, label in enumerate(pictures[-1].labels, 1):
        assert f"block {i}: {label}" in squares
    # The request shares the two whole blocks of the pin, and has copied the third, which was partly filled.
    assert pictures[-1].labels[:3] == [SHARED, SHARED, PIN]
    assert pictures[-1].owners == ["request 0", "request 1", PIN]
    for owner, colour in zip(pictures[-1].owners, OWNERS, strict=False):
        styles = {style for title, style in squares.items() if title.endswith(f": {owner}")}
        assert [style.split("background:")[1] for style in styles] == [colour]


def test_a_pool_after_its_requests_is_cached(llm: LLM) -> None:
    for _ in range(2):
        llm.generate(ids(*PREFIX, 20), GREEDY, use_tqdm=False)
    page, stats = page_of(llm), llm.kv_stats()
    kinds = [title.split(": ")[1] for title, _ in page.squares]
    assert kinds.count("cached") == stats.num_cached > 0 and kinds.count("free") == stats.num_free
    assert f"0 used, {stats.num_cached} cached, prefix-cache hit rate {stats.hit_rate:.1%}" in page.text


def test_further_owners_share_a_colour_and_a_large_pool_has_stripes(folder: Path) -> None:
    with LLM(str(folder), num_gpu_blocks_override=2 * MAX_SQUARES) as llm:
        pool = pictures_of(llm, *(ids(3 + i, 4, 5) for i in range(9)))[-1]
    assert len(pool.owners) == 6 and pool.labels.count(OTHERS) == 3
    title, style = Page(pool_html("m", pool)).squares[0]
    assert title == "blocks 1 to 2: 1 request 0, 1 request 1"
    assert style.endswith("background:linear-gradient(180deg,#0072b2 0% 50%,#e69f00 50% 100%)")


def test_a_closed_llm_says_so(folder: Path) -> None:
    llm = LLM(str(folder), num_gpu_blocks_override=8)
    llm.close()
    page = page_of(llm)
    assert "closed" in page.text and not page.squares


def output_of(prompt: str | None, *samples: CompletionOutput, num_cached: int = 0) -> RequestOutput:
    return RequestOutput("0", prompt, [5] * 10, list(samples), True, RequestMetrics(0.0), num_cached)


def test_an_output_shows_texts_ends_and_tokens(llm: LLM) -> None:
    (output,) = llm.generate("Hello", SamplingParams(n=2, max_tokens=4, ignore_eos=True, seed=1), use_tqdm=False)
    page = Page(output._repr_html_())
    for sample in output.outputs:
        assert sample.text in page.texts
    assert page.texts.count("length, 4 tokens") == 2
    assert "computed prompt tokens: 5" in page.texts and "generated tokens: 8" in page.texts
    assert "shared blocks" not in page.text


def test_cached_tokens_are_a_part_of_the_bar() -> None:
    html = output_of(None, CompletionOutput(0, "a", [1] * 10, finish_reason="stop"), num_cached=4)._repr_html_()
    texts = Page(html).texts
    assert {"10 token ids", "prompt tokens in shared blocks: 4", "computed prompt tokens: 6"} <= set(texts)
    assert re.search(r"90deg,currentColor 0% 20%,#0072b2 20% 50%,#e69f00 50% 100%", html)


def test_texts_are_escaped_and_long_prompts_are_cut() -> None:
    sample = CompletionOutput(0, MARKUP, [7], finish_reason="stop", stop_reason=MARKUP)
    page = Page(output_of(MARKUP, sample)._repr_html_())  # which allows no tag but its own
    assert page.texts[:3] == [MARKUP, MARKUP, f"stop ({MARKUP}), 1 token"]
    assert Page(message_html(MARKUP, MARKUP)).texts == [MARKUP, " ", MARKUP]
    cut = Page(output_of("a" * (MAX_PROMPT + 1), CompletionOutput(0, "", []))._repr_html_())
    assert cut.texts[0] == "a" * MAX_PROMPT + " ..." and "running, 0 tokens" in cut.texts
    assert Page(output_of("", CompletionOutput(0, "", []))._repr_html_()).texts
