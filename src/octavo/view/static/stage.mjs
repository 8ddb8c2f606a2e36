// The picture on the screen: one pool, and all that shows it. Playground, live and replay only feed it.

import { css, mix } from "./colours.mjs";
import { $, format, h, keep, text } from "./dom.mjs";
import { MODES, PoolGrid } from "./grid.mjs";
import * as panels from "./panels.mjs";
import { Pool } from "./pool.mjs";
import { Timeline } from "./timeline.mjs";

const PANELS_MS = 120; // text changes no faster than one can read

const LEGENDS = {
  state: [
    ["used", "full to the left as far as its slots are"],
    ["cached", "in no use, findable"],
    ["free", ""],
  ],
  owner: [
    ["used", "a colour and a letter a sequence; bands where several share"],
    ["cached", ""],
    ["free", ""],
  ],
  references: [
    ["few", "1 reference"],
    ["many", "4 and more"],
    ["cached", ""],
    ["free", ""],
  ],
  age: [
    ["many", "changed just now"],
    ["few", "long ago"],
    ["free", ""],
  ],
};

export class Stage {
  constructor() {
    this.pool = null;
    this.tokens = null; // of the playground's sequences
    this.answer = null; // the playground's last
    this.title = undefined; // what is beside a table
    this.onlyOwn = false; // requests of other keys are not shown, though their blocks are
    this.onPick = () => {}; // asks the server for more about a block
    this.grid = new PoolGrid($("#grid"), { onPoint: (b) => this._point(b), onPick: (b) => this._pick(b) });
    this.timeline = new Timeline($("#steps"), (step) => this._sayStep(step));
    this._makeModes();
    $("#zoom-in").onclick = () => this.grid.zoom(1.6);
    $("#zoom-out").onclick = () => this.grid.zoom(1 / 1.6);
    $("#zoom-fit").onclick = () => this.grid.fit();
    for (const panel of ["#tables", "#tree"]) this._link($(panel));
    new ResizeObserver(() => this._drawPieces()).observe($("#pieces"));
  }

  // -- what is shown -------------------------------------------------------------------------------------------------

  // A snapshot. What differs from the picture before is marked as changed, if it is the same pool.
  show(snapshot, { names = null, ageUnit = "" } = {}) {
    const { pool } = this;
    const same = pool && pool.numBlocks === snapshot.num_blocks && pool.blockSize === snapshot.block_size;
    if (same && ageUnit === pool.ageUnit) this.grid.touch(pool.replace(snapshot, names), pool.news);
    else {
      this.pool = new Pool(snapshot, names);
      this.pool.ageUnit = ageUnit;
      this.pool.onlyOwn = this.onlyOwn;
      this.grid.show(this.pool);
    }
    this._refresh();
    this.told = null;
  }

  // A delta; throws `OutOfStep`.
  apply(delta) {
    this.grid.touch(this.pool.apply(delta), this.pool.news);
    this._refresh();
  }

  forget() {
    this.pool = this.answer = this.tokens = null;
  }

  _refresh() {
    this.due ??= setTimeout(
      () => {
        this.due = null;
        this.paint();
      },
      Math.max(0, PANELS_MS - (performance.now() - (this.painted ?? 0))),
    );
  }

  paint() {
    const { pool } = this;
    if (!pool) return;
    this.painted = performance.now();
    text($("#pool-title"), `${format(pool.numBlocks)} blocks of ${pool.blockSize}`);
    panels.showNumbers(pool, $("#numbers"), $("#shares"), this.answer?.compare);
    panels.showTables(pool, $("#tables > ul"), $("#tables-note"), this.title);
    if (this.answer) this._drawPieces();
    else {
      panels.showQueues(pool, $("#queues"));
      panels.showLog(pool, $("#happened"));
      this.timeline.show(pool.steps);
    }
    // A tree of thousands costs more to make than all the rest: less often.
    if (pool.numBlocks <= 4096 || this.painted - (this.planted ?? 0) > 1000) {
      panels.showTree(pool, $("#tree"));
      this.planted = this.painted;
    }
    this._details();
    this._mark();
  }

  _drawPieces() {
    if (this.answer && this.pool) panels.showPieces(this.pool, $("#pieces"), $("#contrast"), this.grid, this.answer);
  }

  // -- one block -----------------------------------------------------------------------------------------------------

  _point(block) {
    this._details();
    this._mark();
    this.grid.canvas.title = block && this.pool ? panels.sayBlock(this.pool, block) : "";
  }

  _pick(block) {
    this.told = null;
    text($("#picked"), block && this.pool ? panels.sayBlock(this.pool, block) : "");
    this._details();
    this._mark();
    if (block && this.pool) this.onPick(block);
  }

  // What the server says of a block that was chosen.
  tell(told) {
    this.told = told;
    this._details();
  }

  get block() {
    return this.grid.pointed || this.grid.picked;
  }

  _details() {
    if (!this.pool) return;
    const told = this.told?.id === this.block ? this.told : null;
    panels.showBlock(this.pool, this.block, $("#facts"), { tokens: this.tokens, told });
  }

  _mark() {
    const { block } = this;
    for (const chip of document.querySelectorAll(".chip.on")) chip.classList.remove("on");
    if (block) for (const chip of document.querySelectorAll(`.chip[data-block="${block}"]`)) chip.classList.add("on");
  }

  // Hovering a chip points at its block; hovering a row marks all of its blocks.
  _link(panel) {
    panel.addEventListener("pointerover", (event) => {
      const chip = event.target.closest(".chip");
      this.grid.point(Number(chip?.dataset.block ?? 0));
      this._markSequence(event.target.closest(".row")?.dataset.uid);
    });
    panel.addEventListener("pointerleave", () => {
      this.grid.point(0);
      this._markSequence();
    });
    panel.addEventListener("focusin", (event) => this._markSequence(event.target.closest(".row")?.dataset.uid));
    panel.addEventListener("focusout", () => this._markSequence());
    panel.addEventListener("click", (event) => {
      const block = Number(event.target.closest(".chip")?.dataset.block ?? 0);
      if (block) {
        this.grid.pick(block);
        this.grid.reveal(block);
      }
    });
  }

  _markSequence(uid) {
    const sequence = this.pool?.sequences.get(Number(uid));
    const blocks = sequence && !this.pool.isSwapped(sequence) ? sequence.blocks : [];
    this.grid.mark(new Set(blocks.filter((block) => block > 0)), this.grid.arrow);
  }

  _sayStep(step) {
    if (!step) return text($("#step-says"), "");
    const { prefill, decode, running, waiting, swapped } = step;
    const tokens = `${prefill} prompt and ${decode} decoded tokens`;
    text($("#step-says"), `step ${step.step}: ${tokens}; ${running} running, ${waiting} waiting, ${swapped} swapped`);
  }

  // -- colours -------------------------------------------------------------------------------------------------------

  _makeModes() {
    for (const mode of MODES) {
      const input = h("input", { type: "radio", name: "mode", value: mode, checked: mode === "state" });
      input.onchange = () => this.colourBy(mode);
      $("#modes").append(h("label", {}, input, h("span", {}, mode)));
    }
    this.colourBy("state");
  }

  colourBy(mode) {
    $(`#modes input[value=${mode}]`).checked = true;
    this.grid.colourBy(mode);
    const key = ([kind]) => `${mode} ${kind}`;
    keep($("#legend"), LEGENDS[mode], key, ([kind, says]) => {
      const sample = h("canvas", { width: 28, height: 28, "aria-hidden": "true" });
      const name = { few: "", many: "" }[kind] ?? kind;
      return h("li", {}, sample, [name, says].filter(Boolean).join(": "));
    });
    this._drawLegend();
  }

  _drawLegend() {
    const { grid } = this;
    LEGENDS[grid.mode].forEach(([kind], i) => {
      const c = $("#legend").children[i].firstChild.getContext("2d");
      c.clearRect(0, 0, 28, 28);
      c.lineWidth = 2;
      const tone = { few: grid.ramp[1], many: grid.ramp[7] }[kind] ?? grid.theme.accent;
      c.fillStyle = kind === "cached" ? grid.hatch : css(mix(tone, grid.theme.surface, kind === "used" ? 0.62 : 1));
      c.strokeStyle = kind === "free" ? css(grid.theme.line) : css(tone);
      c.beginPath();
      c.roundRect(2, 2, 24, 24, 4);
      if (kind !== "free") c.fill();
      c.stroke();
    });
  }

  retheme() {
    this.grid.retheme();
    this.timeline.retheme();
    this._drawLegend();
    this._drawPieces();
  }
}
