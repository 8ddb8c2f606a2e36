"""The page's modules, run by node with a minimal document."""

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
from tests.core.lab import Lab
from tests.view.test_page_state import FilmedWorld

STATIC = Path(octavo.view.__file__).parent / "static"

DOCUMENT = """
import { readFileSync } from "node:fs";
const input = JSON.parse(readFileSync(0, "utf8"));
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
const replies = []; // [beginning of a path, function that returns the reply], the latest first
const requests = [];
const set = (name, value) => Object.defineProperty(globalThis, name, { value, configurable: true });
set("document", { createElement: () => new Element(), querySelector: $, querySelectorAll: () => [] });
set("localStorage", { getItem: () => null, setItem() {} });
set("matchMedia", () => ({ matches: true, addEventListener() {} }));
set("ResizeObserver", class { observe() {} });
set("requestAnimationFrame", (draw) => drawing.push(draw));
set("performance", { now: () => clock });
set("history", { replaceState() {} });
set("fetch", async (path, options) => {
  const body = options?.body ? JSON.parse(options.body) : null;
  requests.push([path, body]);
  const reply = await replies.find(([beginning]) => path.startsWith(beginning))[1](path, body);
  return { ok: !reply.error, status: reply.error ? 400 : 200, json: async () => reply };
});
const settle = () => new Promise((resolve) => setImmediate(resolve));
async function pass(ms, count = 1) { // draws `count` animation frames, `ms` milliseconds apart
  for (let i = 0; i < count; i++) {
    clock += ms;
    for (const draw of drawing.splice(0)) draw();
    await settle();
  }
}
function held() { // a reply that is delayed until it is released
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
  grid: { mark() {}, resize() {} },
};
const output = (value) => console.log(JSON.stringify(value));
const load = (name) => import(`${process.argv[1]}/${name}.mjs`);
"""
RECORDING = """
const { Replay } = await load("replay");
replies.push(["replay/at", (path) => ({ time_s: Math.floor(Number(path.split("=")[1])) })]);
replies.push(["replay/frames", (path) => {
  const [from_s, to_s] = path.match(/=[0-9.]+/g).map((each) => Number(each.slice(1)));
  const frames = [];
  for (let at = Math.floor(from_s) + 1; at <= to_s; at++) frames.push({ time_s: at });
  return { frames, end_s: to_s };
}]);
replies.push(["replay", () => ({ duration_s: 1000, num_blocks: 4, marks: [], used: [] })]);
const replay = new Replay(stage, "busy.frames");
$("#speed").value = 1;
"""


def run_page(script: str, data: Any = None) -> Any:
    """The JSON that a script passes to `output`; the script has `data` as `input`."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed")
    command = [node, "--input-type=module", "-e", DOCUMENT + script, STATIC.as_uri()]
    done = subprocess.run(command, input=json.dumps(data), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_ranks_are_shown_where_there_are_several() -> None:
    script = """
    const { showRanks } = await load("panels");
    const [section, rows] = [new Element(), new Element()];
    const shown = input.map((ranks) => {
      showRanks(ranks, section, rows);
      return [section.hidden, ...rows.children.map((row) => row.children.map((cell) => cell.textContent).join(" "))];
    });
    output(shown);
    """
    place = {"plan": 1242, "collective": 9922, "is_inside": True, "age_s": 0.3, "is_behind": False}
    late = place | {"collective": 9921, "age_s": 62.0, "is_behind": True}
    first, second = "0 1,242 9,922 now", "1 behind 1,242 9,921 62s ago"
    assert run_page(script, [[], [place, late], [place, place], []]) == [
        [True],
        [False, first, second],
        [False, first, first.replace("0 ", "1 ", 1)],
        [True],
    ]


def test_missing_stats_are_not_shown() -> None:
    """An attached server has few of them, an engine of Octavo has all."""
    attached = ExternalPool("tcp://127.0.0.1:1")
    world = FilmedWorld(46)
    try:
        stats = [attached._stats(), world.cache.stats().as_dict()]
    finally:
        attached.close()
    script = """
    const { showNumbers } = await load("panels");
    const bar = { children: [new Element(), new Element()] };
    output(input.map((stats) => {
      const root = new Element();
      showNumbers({ stats, numBlocks: 4, blockSize: 16 }, root, bar);
      return root.children.map((row) => row.children.map((each) => each.textContent));
    }));
    """
    few, many = run_page(script, stats)
    assert [name for name, _ in few] == ["used", "cached", "free", "evicted"]
    assert {"saved by sharing", "unfilled slots", "prefix cache hits", "copied on write"} < {name for name, _ in many}
    assert not any("NaN" in value or "undefined" in value for _, value in few + many)


def test_log_has_a_text_for_every_event() -> None:
    """Evictions included, which have fewer fields in a frame than the core's event."""
    events: dict[str, Any] = {}
    for seed in range(46, 60):
        world = FilmedWorld(seed)
        world.run()
        events |= {event["event"]: event for frame in world.frames for event in frame.get("events", ())}
    assert isinstance(world.publisher, Publisher) and {"evicted", "copied", "preempted", "finished"} < events.keys()
    script = """
    const { showLog } = await load("panels");
    const list = new Element();
    showLog({ events: input }, list);
    output(list.children.map((line) => line.textContent));
    """
    lines = run_page(script, list(events.values()))
    assert len(lines) == len(events)
    assert not [line for line in lines if "undefined" in line or "NaN" in line]


def test_a_wait_without_numbers_is_a_phrase() -> None:
    waits = [None, {"reason": "rows"}, {"reason": "rows", "needs": 1, "free": 0}]
    script = 'const { waitText } = await load("panels"); output(input.map(waitText));'
    assert run_page(script, waits) == ["", "waits: rows", "needs 1 row: 0 left"]


def test_a_wait_for_blocks_tells_those_of_windows_and_states() -> None:
    wait = {"reason": "blocks", "needs": 41, "free": 3, "evictable": 2}
    waits = [wait | {"in_windows": 21, "in_states": 4}, wait | {"in_windows": 0, "in_states": 16}, wait]
    script = 'const { waitText } = await load("panels"); output(input.map(waitText));'
    texts = ["41 blocks (21 in windows, 4 in its state)", "41 blocks (16 in its state)", "41 blocks"]
    assert run_page(script, waits) == [f"needs {text}: 3 free, 2 cached" for text in texts]


def test_speed_change_keeps_fetched_frames() -> None:
    """At 100 times the speed, minutes are fetched ahead. Slower playing continues with them."""
    script = f"""{RECORDING}
    await replay.enter("");
    $("#speed").value = 100;
    replay.play();
    await pass(10, 3);
    $("#speed").value = 1;
    $("#speed").onchange?.();
    await pass(50, 80);
    output({{ now: replay.now_s, applied: stage.applied, shown: stage.shown }});
    """
    result = run_page(script)
    assert 4 < result["now"] < 10 and result["shown"] == 1
    assert result["applied"] == list(range(1, int(result["now"]) + 1))


def test_replay_pauses_when_the_server_fails() -> None:
    script = f"""{RECORDING}
    await replay.enter("");
    replies.unshift(["replay/frames", () => {{ throw new Error("gone"); }}]);
    replay.play();
    await pass(16, 50);
    const gone = [requests.filter(([path]) => path.startsWith("replay/frames")).length, replay.playing];
    replies.shift();
    replay.play();
    await pass(100, 15);
    output([gone, stage.applied, $("#connection").textContent]);
    """
    assert run_page(script) == [[1, False], [1], "busy.frames"]


def test_late_replies_are_not_shown_in_another_use() -> None:
    script = f"""{RECORDING}
    const {{ Playground }} = await load("playground");
    const playground = new Playground(stage);
    const shown = [];

    const moment = held();
    replies.unshift(["replay/at", () => moment.promise]);
    const entering = replay.enter("3");
    await settle();
    replay.leave();
    moment.release({{ time_s: 3 }});
    await entering;
    shown.push(stage.shown);

    const action = held();
    replies.push(["play/lessons", () => []], ["play", () => action.promise]);
    const going = playground.enter("");
    await settle();
    playground.leave();
    action.release({{ history: "64x16;new,64" }});
    await going;
    shown.push(stage.shown);
    output([shown, playground.history, stage.reply ?? null]);
    """
    assert run_page(script) == [[0, 0], "64x16;new,64", None]


LIVE = """
const { Live } = await load("live");
const opened = [];
set("EventSource", class {
  constructor(path) { opened.push(path); }
  addEventListener() {}
  close() {}
});
const details = [];
const live = new Live({ showDetails: (each) => details.push(each.engine) }, "tiny", 2);
"""


def test_links_to_engines() -> None:
    script = f"""{LIVE}
    const notices = input.map((engine) => {{
      $("#notice span").textContent = "";
      live.enter(engine);
      return $("#notice span").textContent !== "";
    }});
    output([opened.map((path) => path.split("=")), notices]);
    """
    links = ["", "0", "1", "2", "-1", "1.0", "x", "1" * 20]
    opened, notices = run_page(script, links)
    assert opened == [["events?replica", "1" if link == "1" else "0"] for link in links]
    assert notices == [False] * 3 + [True] * 5


def test_engines_that_come_later_are_listed() -> None:
    script = f"""{LIVE}
    const listeners = {{}};
    EventSource.prototype.addEventListener = (name, listen) => (listeners[name] = listen);
    const seen = () => [$("#engine").children.length, $("#engine").value, $("#engines").hidden];
    const one = new Live({{}}, "tiny", 1);
    const before = seen();
    one.enter("");
    for (const num of [3, 2]) listeners.engines({{ data: JSON.stringify({{ num_replicas: num }}) }});
    const after = seen();
    one.enter("2");
    output([before, after, $("#engine").value]);
    """
    assert run_page(script) == [[1, 0, True], [3, 0, False], 2]


def test_late_details_of_another_engine_are_not_shown() -> None:
    script = f"""{LIVE}
    const late = held();
    replies.push(["blocks/3?replica=0", () => late.promise], ["blocks/3?replica=1", () => ({{ engine: 1 }})]);
    live.enter("0");
    live.stage.onPick(3);
    live.leave();
    live.enter("1");
    live.stage.onPick(3);
    await settle();
    late.release({{ engine: 0 }});
    await settle();
    output(details);
    """
    assert run_page(script) == [1]


def test_reset_after_an_invalid_link() -> None:
    script = """
    const { Playground } = await load("playground");
    const playground = new Playground(stage);
    replies.push(["play/lessons", () => []], ["play", () => ({ error: { message: "no such pool" } })]);
    await playground.enter("0x0");
    await $("#reset").onclick();
    output([requests.at(-1), $("#error").textContent]);
    """
    assert run_page(script) == [["play", {"history": "64x16", "action": None}], "no such pool"]


def test_block_of_a_cleared_pool_is_ignored() -> None:
    """Between two uses, the grid still shows the last pool's blocks, and the pointer may be over them."""
    script = """
    const { Stage } = await load("stage");
    const picked = [];
    const between = { pool: null, grid: { canvas: {} }, onPick: (b) => picked.push(b), _showDetails() {}, _mark() {} };
    Stage.prototype._point.call(between, 3);
    Stage.prototype._pick.call(between, 3);
    output([between.grid.canvas.title, $("#picked").textContent, picked]);
    """
    assert run_page(script) == ["", "", []]


@pytest.mark.parametrize("num", [150, 151])
def test_truncated_tree_has_a_note(num: int) -> None:
    script = """
    const { showTree } = await load("panels");
    const root = new Element();
    const roots = Array.from({ length: input }, (_, i) => ({ block: i + 1, children: [] }));
    showTree({ tree: () => roots, refs: [], owner: [] }, root);
    output(root.children.map((each) => each.children.length || each.textContent));
    """
    assert run_page(script, num) == [150] + ["The first 150 branches."] * (num > 150)


def test_snapshot_adds_no_step_or_event_twice() -> None:
    """A snapshot repeats the last steps and events."""
    world = FilmedWorld(60)
    world.run()
    state: PoolState | None = None
    runs: list[Any] = []
    for frame in world.frames:
        known = msgspec.convert(frame, Frame)  # type: ignore[call-overload]  # a union
        if isinstance(known, Snapshot) or state is None:
            state = PoolState(known)
        else:
            state.apply(known)
        runs.append([frame, json.loads(msgspec.json.encode(state.snapshot()))])
    last = [[each[0] for each in state.steps], len(state.events)] if state else []
    script = """
    const { Pool } = await load("pool");
    let pool = null;
    for (const [frame, again] of input) {
      if (frame.kind === "delta") pool.apply(frame);
      else pool = new Pool(frame);
      pool.replace(again);
    }
    const marks = pool.steps.reduce((sum, step) => sum + step.numPreempted, 0);
    output([pool.steps.map((each) => each.step), pool.events.length, marks]);
    """
    steps, num_events, marks = run_page(script, runs)
    assert state is not None and len(steps) > 20 and [steps, num_events] == last
    preempted = [e for e in state.events if e["event"] == "preempted" and e["how"] != "swap"]
    assert marks == len(preempted)


def test_tokens_of_a_pass_are_known_with_speculation() -> None:
    script = """
    const { Pool } = await load("pool");
    output(input.map((steps) => Pool.prototype.tokensPerPass.call({ steps })));
    """
    steps = [{"decode": 4}, {"decode": 2}]
    drafted = [{**step, "accepted": accepted} for step, accepted in zip(steps, (3, 0), strict=True)]
    assert run_page(script, [[], steps, drafted]) == [None, None, 2]


def test_dropped_blocks_are_not_indexed() -> None:
    """Entries of the null block have no owner. A long sequence with an attention window has tens of thousands."""
    script = """
    const { Pool } = await load("pool");
    const ids = new Int32Array(49_000);
    ids[48_999] = 2;
    const block_ids = Buffer.from(ids.buffer).toString("base64");
    const own = { uid: 1, index: 0, num_tokens: 1, num_computed: 1, block_ids };
    const request = { id: "a", status: "running", sequences: [1] };
    const pool = new Pool({ ...input, requests: [request], sequences: [own] });
    output([pool.ownersOf(2), pool.ownersOf(0), pool.index.size]);
    """
    zeros = base64.b64encode(bytes(8)).decode()
    sizes = {"num_blocks": 4, "block_size": 4, "num_host_blocks": 0, "words": zeros}
    assert run_page(script, {"epoch": "e", "frame": 0, "time_s": 0, **sizes, "seals": {}}) == [[0], [], 1]


@pytest.mark.parametrize(("num_computed", "positions"), [(4, "\N{EN DASH}"), (5, "4 to 4"), (8, "4 to 7")])
def test_block_details_have_the_filled_positions(num_computed: int, positions: str) -> None:
    """None if the block was allocated for a step that is still in flight."""
    script = """
    const { Pool } = await load("pool");
    const { showBlock } = await load("panels");
    const base64 = (array) => Buffer.from(array.buffer).toString("base64");
    const own = { uid: 1, index: 0, num_tokens: 9, num_computed: input, block_ids: base64(new Int32Array([1, 2])) };
    const pool = new Pool({
      epoch: "e", frame: 0, time_s: 0, num_blocks: 2, block_size: 4, words: base64(new Uint16Array([1, 1])), seals: {},
      requests: [{ id: "a", status: "running", sequences: [1] }], sequences: [own],
    });
    const root = new Element();
    showBlock(pool, 2, root);
    output(root.children[0].children.map((each) => each.children.map((part) => part.textContent)));
    """
    assert dict(run_page(script, num_computed))["positions"] == positions


def test_block_details_tell_a_state_and_a_checkpoint() -> None:
    """A full block, its window block, the head of a checkpoint under it, and a block of a state that a sequence has."""
    lab = Lab(30, 2, rows=4, windows=(4,), max_chunk=8, state_blocks=3, interval=4)
    lab.add("a", [1, 2, 3, 4, 5, 6, 7], 8)
    lab.step()
    lab.step()
    (sequence,) = lab.scheduler.running[0].sequences
    full, window, state = sequence.block_ids[2], sequence.windows[0].block_ids[2], sequence.state
    head = lab.pool.find_state(lab.pool.seal_id[full])[-1]
    frame = json.loads(msgspec.json.encode(Publisher(lab.scheduler).frame()))
    script = """
    const { Pool } = await load("pool");
    const { describeBlock, showBlock } = await load("panels");
    const pool = new Pool(input.frame);
    output(input.blocks.map((block) => {
      const root = new Element();
      showBlock(pool, block, root);
      const facts = root.children[0].children.map((each) => each.children.map((part) => part.textContent));
      return [describeBlock(pool, block), Object.fromEntries(facts)];
    }));
    """
    shown = run_page(script, {"frame": frame, "blocks": [full, window, head, state[0]]})
    lab.run()
    texts, facts = zip(*shown, strict=True)
    assert texts[2] == f"Block {head}: cached, group state, checkpoint"
    assert texts[3] == f"Block {state[0]}: used, 1 reference, A, group state"
    assert [each["group"] for each in facts] == ["full", "w1: last 4", "state", "state"]
    assert [each.get("part") for each in facts] == [None, None, "3 of 3", "1 of 3"]
    assert [each.get("checkpoint") for each in facts] == [None, None, f"after block {full}", "no"]
    assert [each.get("after") for each in facts] == [None, None, "6 tokens", "7 tokens"]
    assert {"filled slots", "positions"} < facts[0].keys() and "positions" not in facts[2]


def test_states_have_a_shape_a_label_and_a_legend() -> None:
    """A sequence whose state is a checkpoint at first, and then its own. The last cell is another key's: it took a
    block of the state, and the frames that this key gets have no owner of it."""
    lab = Lab(30, 2, rows=4, windows=(4,), max_chunk=8, state_blocks=3, interval=4)
    lab.add("a", [1, 2, 3, 4, 5, 6, 7], 8)
    publisher = Publisher(lab.scheduler)
    frames, tables = [], []
    for _ in range(2):
        lab.step()
        (sequence,) = lab.scheduler.running[0].sequences
        frames.append(json.loads(msgspec.json.encode(publisher.frame())))
        tables.append([sequence.block_ids[:], sequence.windows[0].block_ids[:], sequence.state[:]])
    script = """
    const { Pool } = await load("pool");
    const { PoolGrid, MODES } = await load("grid");
    const { Stage } = await load("stage");
    const [{ frames: [frame, next], tables }, seen] = [input, []];
    for (const [pool, [full, , state]] of [[new Pool(frame), tables[0]], [new Pool(next), tables[1]]]) {
      const grid = { mode: "state", pool, mark: (blocks) => seen.push([...blocks]) };
      const label = (block) => PoolGrid.prototype._label.call(grid, block, pool.refs[block], pool.kindOf(block));
      seen.push([full[0], state[0]].map(label));
      for (const { uid } of pool.sequences.values()) Stage.prototype._markSequence.call({ pool, grid }, uid);
    }
    const kinds = (pool, mode) => Stage.prototype._legend.call({ pool, grid: { mode } }).map(([kind]) => kind);
    const legend = (pool) => MODES.map((mode) => kinds(pool, mode));
    const taken = new Pool(next);
    taken.owner[tables[1][2][0]] = -1;
    output([seen, legend(taken), legend({ windows: [] }), taken.kindOf(tables[1][2][0])]);
    """
    seen, legends, plain, taken = run_page(script, {"frames": frames, "tables": tables})
    lab.run()
    shown = []
    for mark, (full, window, state) in zip("cs", tables, strict=True):
        held = [block for block in window if block]
        shown += [[str(full[0]), f"{mark}{state[0]}"], [*full, *state], [*held, *state], state]
    assert seen == shown
    assert all(kinds[-2:] == ["recurrent", "kept"] for kinds in legends) and "window" in legends[-1]
    assert plain == [[kind for kind in kinds[:-2] if kind != "window"] for kinds in legends]
    assert taken == ""


def test_copy_link_button_restores_its_label() -> None:
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
    const label = button.textContent;
    for (const call of later) call();
    output([label, button.textContent]);
    """
    assert run_page(script) == ["Copied", "Copy link"]
