"""What the page's modules do with what they are told and when, run by node on a document that is hardly one."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest

import octavo.view
from octavo.view.live.external import ExternalPool
from octavo.view.live.messages import Frame, Snapshot
from octavo.view.live.publisher import Publisher
from octavo.view.live.state import PoolState
from tests.view.test_page_picture import FilmedWorld

STATIC = Path(octavo.view.__file__).parent / "static"

DOCUMENT = """
import { readFileSync } from "node:fs";
const told = JSON.parse(readFileSync(0, "utf8"));
class Element {
  dataset = {};
  style = { setProperty() {} };
  classList = { toggle() {}, add() {}, remove() {} };
  childNodes = [];
  value = "";
  get children() { return this.childNodes.filter((child) => child instanceof Element); }
  get firstElementChild() { return this.children[0] ?? null; }
  get nextElementSibling() { return this.parent.children[this.parent.children.indexOf(this) + 1] ?? null; }
  get lastChild() { return this.childNodes.at(-1); }
  append(...nodes) { for (const node of nodes) this.insertBefore(node, null); }
  insertBefore(node, next) {
    node.remove?.();
    this.childNodes.splice(next ? this.childNodes.indexOf(next) : this.childNodes.length, 0, node);
    if (node instanceof Element) node.parent = this;
  }
  remove() { this.parent?.childNodes.splice(this.parent.childNodes.indexOf(this), 1); }
  replaceChildren(...nodes) { this.childNodes = []; this.append(...nodes); }
  get textContent() { return this.childNodes.map((node) => node.textContent ?? node).join(""); }
  set textContent(value) { this.childNodes = [value]; }
  setAttribute() {}
  removeAttribute() {}
  addEventListener() {}
}
const byName = {};
const $ = (name) => (byName[name] ??= new Element());
let clock = 0;
let drawing = [];
const answers = []; // [beginning of a path, what is answered], the latest first
const asked = [];
const set = (name, value) => Object.defineProperty(globalThis, name, { value, configurable: true });
set("document", { createElement: () => new Element(), querySelector: $, querySelectorAll: () => [] });
set("matchMedia", () => ({ matches: true, addEventListener() {} }));
set("ResizeObserver", class { observe() {} });
set("requestAnimationFrame", (draw) => drawing.push(draw));
set("performance", { now: () => clock });
set("history", { replaceState() {} });
set("fetch", async (path, options) => {
  const body = options?.body ? JSON.parse(options.body) : null;
  asked.push([path, body]);
  const answer = await answers.find(([beginning]) => path.startsWith(beginning))[1](path, body);
  return { ok: !answer.error, status: answer.error ? 400 : 200, json: async () => answer };
});
const settle = () => new Promise((resolve) => setImmediate(resolve));
async function pass(ms, count = 1) { // so many pictures are drawn, one after so many milliseconds
  for (let i = 0; i < count; i++) {
    clock += ms;
    for (const draw of drawing.splice(0)) draw();
    await settle();
  }
}
function held() { // an answer that is on its way until it is let go
  let release;
  const promise = new Promise((resolve) => (release = resolve));
  return { promise, release };
}
const stage = {
  shown: 0, applied: [], pool: null,
  show({ time_s }) { this.shown++; this.pool = { time_s }; },
  apply({ time_s }) { this.applied.push(time_s); this.pool.time_s = time_s; },
  clear() { this.pool = null; },
  paint() {},
  grid: { mark() {} },
};
const say = (value) => console.log(JSON.stringify(value));
const load = (name) => import(`${process.argv[1]}/${name}.mjs`);
"""
RECORDING = """
const { Replay } = await load("replay");
answers.push(["replay/at", (path) => ({ time_s: Math.floor(Number(path.split("=")[1])) })]);
answers.push(["replay/frames", (path) => {
  const [from_s, to_s] = path.match(/=[0-9.]+/g).map((each) => Number(each.slice(1)));
  const frames = [];
  for (let at = Math.floor(from_s) + 1; at <= to_s; at++) frames.push({ time_s: at });
  return { frames, end_s: to_s };
}]);
answers.push(["replay", () => ({ duration_s: 1000, num_blocks: 4, marks: [], used: [] })]);
const replay = new Replay(stage, "busy.frames");
$("#speed").value = 1;
"""


def run_page(script: str, told: Any = None) -> Any:
    """What a script says with `say`, which has `told`."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("there is no node here to run the page's modules with")
    command = [node, "--input-type=module", "-e", DOCUMENT + script, STATIC.as_uri()]
    done = subprocess.run(command, input=json.dumps(told), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_numbers_that_nobody_told_are_not_shown() -> None:
    """A server that is attached to tells few of them; an engine of our own all."""
    attached = ExternalPool("tcp://127.0.0.1:1")
    world = FilmedWorld(46)
    try:
        stats = [attached._stats(), world.cache.stats().as_dict()]
    finally:
        attached.close()
    script = """
    const { showNumbers } = await load("panels");
    const bar = { children: [new Element(), new Element()] };
    say(told.map((stats) => {
      const root = new Element();
      showNumbers({ stats, numBlocks: 4, blockSize: 16 }, root, bar);
      return root.children.map((row) => row.children.map((each) => each.textContent));
    }));
    """
    few, many = run_page(script, stats)
    assert [name for name, _ in few] == ["used", "cached", "free", "evicted"]
    assert {"saved by sharing", "unfilled slots", "prefix cache hits", "copied on write"} < {name for name, _ in many}
    assert not any("NaN" in value or "undefined" in value for _, value in few + many)


def test_the_log_knows_all_that_a_tap_tells() -> None:
    """An eviction among it, which is told with less than the core's own event has."""
    told: dict[str, Any] = {}
    for seed in range(46, 60):
        world = FilmedWorld(seed)
        world.run()
        told |= {event["event"]: event for frame in world.frames for event in frame.get("events", ())}
    assert isinstance(world.publisher, Publisher) and {"evicted", "copied", "preempted", "finished"} < told.keys()
    script = """
    const { showLog } = await load("panels");
    const list = new Element();
    showLog({ events: told }, list);
    say(list.children.map((line) => line.textContent));
    """
    lines = run_page(script, list(told.values()))
    assert len(lines) == len(told)
    assert not [line for line in lines if "undefined" in line or "NaN" in line]


def test_another_speed_drops_nothing_that_was_fetched() -> None:
    """At 100 times the speed, minutes are fetched ahead: they are what slower playing goes on with."""
    script = f"""{RECORDING}
    await replay.enter("");
    $("#speed").value = 100;
    replay.play();
    await pass(10, 3);
    $("#speed").value = 1;
    $("#speed").onchange?.();
    await pass(50, 80);
    say({{ now: replay.now_s, applied: stage.applied, shown: stage.shown }});
    """
    said = run_page(script)
    assert 4 < said["now"] < 10 and said["shown"] == 1
    assert said["applied"] == list(range(1, int(said["now"]) + 1))


def test_a_recording_that_is_not_answered_any_more_is_paused() -> None:
    script = f"""{RECORDING}
    await replay.enter("");
    answers.unshift(["replay/frames", () => {{ throw new Error("gone"); }}]);
    replay.play();
    await pass(16, 50);
    const gone = [asked.filter(([path]) => path.startsWith("replay/frames")).length, replay.playing];
    answers.shift();
    replay.play();
    await pass(100, 15);
    say([gone, stage.applied, $("#connection").textContent]);
    """
    assert run_page(script) == [[1, False], [1], "busy.frames"]


def test_what_comes_late_is_not_shown_in_another_use() -> None:
    script = f"""{RECORDING}
    const {{ Playground }} = await load("playground");
    const playground = new Playground(stage);
    const shown = [];

    const moment = held();
    answers.unshift(["replay/at", () => moment.promise]);
    const entering = replay.enter("3");
    await settle();
    replay.leave();
    moment.release({{ time_s: 3 }});
    await entering;
    shown.push(stage.shown);

    const deed = held();
    answers.push(["play/lessons", () => []], ["play", () => deed.promise]);
    const going = playground.enter("");
    await settle();
    playground.leave();
    deed.release({{ history: "64x16;new,64" }});
    await going;
    shown.push(stage.shown);
    say([shown, playground.history, stage.reply ?? null]);
    """
    assert run_page(script) == [[0, 0], "64x16;new,64", None]


def test_after_a_broken_link_one_can_begin_anew() -> None:
    script = """
    const { Playground } = await load("playground");
    const playground = new Playground(stage);
    answers.push(["play/lessons", () => []], ["play", () => ({ error: { message: "no such pool" } })]);
    await playground.enter("0x0");
    await $("#reset").onclick();
    say([asked.at(-1), $("#error").textContent]);
    """
    assert run_page(script) == [["play", {"history": "64x16", "action": None}], "no such pool"]


def test_a_block_of_a_pool_that_is_no_more_is_nothing() -> None:
    """Between two uses the grid still has the last one's blocks, and the pointer may be over them."""
    script = """
    const { Stage } = await load("stage");
    const picked = [];
    const between = { pool: null, grid: { canvas: {} }, onPick: (b) => picked.push(b), _showDetails() {}, _mark() {} };
    Stage.prototype._point.call(between, 3);
    Stage.prototype._pick.call(between, 3);
    say([between.grid.canvas.title, $("#picked").textContent, picked]);
    """
    assert run_page(script) == ["", "", []]


@pytest.mark.parametrize("num", [150, 151])
def test_a_tree_says_when_it_is_not_whole(num: int) -> None:
    script = """
    const { showTree } = await load("panels");
    const root = new Element();
    const roots = Array.from({ length: told }, (_, i) => ({ block: i + 1, children: [] }));
    showTree({ tree: () => roots, refs: [], owner: [] }, root);
    say(root.children.map((each) => each.children.length || each.textContent));
    """
    assert run_page(script, num) == [150] + ["The first 150 branches."] * (num > 150)


def test_a_snapshot_tells_nothing_twice() -> None:
    """Whoever falls behind, or goes forward in a recording, is told the last steps and events again."""
    world = FilmedWorld(60)
    world.run()
    picture: PoolState | None = None
    runs: list[Any] = []
    for frame in world.frames:
        known = msgspec.convert(frame, Frame)  # type: ignore[call-overload]  # a union
        if isinstance(known, Snapshot) or picture is None:
            picture = PoolState(known)
        else:
            picture.apply(known)
        runs.append([frame, json.loads(msgspec.json.encode(picture.snapshot()))])
    last = [[each[0] for each in picture.steps], len(picture.events)] if picture else []
    script = """
    const { Pool } = await load("pool");
    let pool = null;
    for (const [frame, again] of told) {
      if (frame.kind === "delta") pool.apply(frame);
      else pool = new Pool(frame);
      pool.replace(again);
    }
    const marks = pool.steps.reduce((sum, step) => sum + step.numPreempted, 0);
    say([pool.steps.map((each) => each.step), pool.events.length, marks]);
    """
    steps, num_events, marks = run_page(script, runs)
    assert picture is not None and len(steps) > 20 and [steps, num_events] == last
    preempted = [e for e in picture.events if e["event"] == "preempted" and e["how"] != "swap"]
    assert marks == len(preempted)


def test_what_a_window_gave_up_costs_no_time() -> None:
    """Entries of the null block are nobody's; of a long sequence behind a window there are tens of thousands."""
    script = """
    const { Pool } = await load("pool");
    const ids = new Int32Array(49_000);
    ids[48_999] = 2;
    const block_ids = Buffer.from(ids.buffer).toString("base64");
    const own = { uid: 1, index: 0, num_tokens: 1, num_computed: 1, block_ids };
    const request = { id: "a", status: "running", sequences: [1] };
    const pool = new Pool({ ...told, requests: [request], sequences: [own] });
    say([pool.ownersOf(2), pool.ownersOf(0), pool.index.size]);
    """
    zeros = base64.b64encode(bytes(8)).decode()
    sizes = {"num_blocks": 4, "block_size": 4, "num_host_blocks": 0, "words": zeros}
    assert run_page(script, {"epoch": "e", "frame": 0, "time_s": 0, **sizes, "seals": {}}) == [[0], [], 1]


@pytest.mark.parametrize(("num_computed", "said"), [(4, "\N{EN DASH}"), (5, "4 to 4"), (8, "4 to 7")])
def test_a_block_says_which_positions_it_has(num_computed: int, said: str) -> None:
    """None, if it was taken for a step that is on its way."""
    script = """
    const { Pool } = await load("pool");
    const { showBlock } = await load("panels");
    const base64 = (array) => Buffer.from(array.buffer).toString("base64");
    const own = { uid: 1, index: 0, num_tokens: 9, num_computed: told, block_ids: base64(new Int32Array([1, 2])) };
    const pool = new Pool({
      epoch: "e", frame: 0, time_s: 0, num_blocks: 2, block_size: 4, words: base64(new Uint16Array([1, 1])), seals: {},
      requests: [{ id: "a", status: "running", sequences: [1] }], sequences: [own],
    });
    const root = new Element();
    showBlock(pool, 2, root);
    say(root.children[0].children.map((each) => each.children.map((part) => part.textContent)));
    """
    assert dict(run_page(script, num_computed))["positions"] == said


def test_a_link_that_is_copied_twice_gets_its_name_back() -> None:
    script = """
    const { copyLink } = await load("server");
    const later = [];
    set("setTimeout", (call) => later.push(call));
    set("navigator", { clipboard: { async writeText() {} } });
    set("location", { href: "http://127.0.0.1/view/" });
    const button = new Element();
    button.textContent = "Copy link";
    await copyLink(button, "play=64x16");
    await copyLink(button, "play=64x16");
    const said = button.textContent;
    for (const call of later) call();
    say([said, button.textContent]);
    """
    assert run_page(script) == ["Copied", "Copy link"]
