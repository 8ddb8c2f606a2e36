// One pool and everything that shows it. Playground, live and replay feed it.

import { css, mix, ownerColour, rgb } from "./colours.mjs";
import { $, format, h, renderList, text } from "./dom.mjs";
import { MODES, PoolGrid, drawRing } from "./grid.mjs";
import * as panels from "./panels.mjs";
import { Pool } from "./pool.mjs";
import { Timeline } from "./timeline.mjs";

const PANELS_MS = 120; // between two updates of the text

// By mode: what is drawn, and what it means.
const LEGENDS = {
  state: { used: "used", partly: "partly filled", cached: "cached: no references, can be found", free: "free" },
  owner: { owner: "one sequence's", shared: "shared by two", cached: "cached", free: "free" },
  references: { few: "1 reference", many: "4 or more", cached: "cached", free: "free" },
  age: { many: "just changed", few: "changed long ago", free: "free" },
  group: {
    used: "layers that see all tokens",
    window: "layers with a sliding window",
    cached: "cached",
    free: "free",
  },
};

const STATES = { recurrent: "round, s: a sequence's state", kept: "two rings, c: a checkpoint of a state" };

export class Stage {
  constructor() {
    this.pool = null;
    this.tokens = null; // uid -> tokens of the playground's sequences
    this.reply = null; // the playground's last one
    this.title = undefined; // sequence -> the text next to its table
    this.onlyOwn = false; // requests of other keys are hidden, though their blocks are shown
    this.onPick = () => {}; // fetches details of a block
    this.grid = new PoolGrid($("#grid"), { onPoint: (b) => this._point(b), onPick: (b) => this._pick(b) });
    this.timeline = new Timeline($("#steps"), (step) => this._describeStep(step));
    this._makeModes();
    $("#zoom-in").onclick = () => this.grid.zoom(1.6);
    $("#zoom-out").onclick = () => this.grid.zoom(1 / 1.6);
    $("#zoom-fit").onclick = () => this.grid.fit();
    $("#unit").onchange = () => this.paint();
    for (const panel of ["#tables", "#tree"]) this._link($(panel));
    new ResizeObserver(() => this._drawPieces()).observe($("#pieces"));
  }

  // -- state ---------------------------------------------------------------------------------------------------------

  // Shows a snapshot. If the pool has the same size, blocks that differ are marked as changed.
  show(snapshot, { names = null, ageUnit = "" } = {}) {
    const { pool } = this;
    const same = pool && pool.numBlocks === snapshot.num_blocks && pool.blockSize === snapshot.block_size;
    if (same && ageUnit === pool.ageUnit) this.grid.update(pool.replace(snapshot, names), pool.updated);
    else {
      this.pool = new Pool(snapshot, names);
      this.pool.ageUnit = ageUnit;
      this.pool.onlyOwn = this.onlyOwn;
      this.grid.show(this.pool);
    }
    this._showLegend();
    this._refresh();
    this.details = null;
  }

  // Applies a delta. Throws `FrameLost`.
  apply(delta) {
    this.grid.update(this.pool.apply(delta), this.pool.updated);
    this._refresh();
  }

  clear() {
    this.pool = this.reply = this.tokens = null;
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
    this._offerGroups();
    panels.showNumbers(pool, $("#numbers"), $("#shares"), this.reply?.compare, this.unit);
    panels.showTables(pool, $("#tables > ul"), $("#tables-note"), this.title);
    if (this.reply) this._drawPieces();
    else {
      panels.showQueues(pool, $("#queues"));
      panels.showLog(pool, $("#events"));
      this.timeline.show(pool.steps);
      const perPass = pool.tokensPerPass();
      text($("#per-pass"), perPass === null ? "decode tokens" : `decode tokens, ${perPass.toFixed(1)} a pass`);
    }
    // A large tree costs more than all other panels, so it is updated less often.
    if (pool.numBlocks <= 4096 || this.painted - (this.treePainted ?? 0) > 1000) {
      panels.showTree(pool, $("#tree"));
      this.treePainted = this.painted;
    }
    this._showDetails();
    this._mark();
  }

  _drawPieces() {
    const { pool, grid, reply, unit } = this;
    if (reply && pool) panels.showPieces(pool, $("#pieces"), $("#contrast"), grid, reply, unit);
  }

  // Bytes of a token, in the playground only: there the pool has no model. 0: blocks.
  get unit() {
    return this.reply ? Number($("#unit").value) : 0;
  }

  // -- one block -----------------------------------------------------------------------------------------------------

  _point(block) {
    this._showDetails();
    this._mark();
    this.grid.canvas.title = block && this.pool ? panels.describeBlock(this.pool, block) : "";
  }

  _pick(block) {
    this.details = null;
    text($("#picked"), block && this.pool ? panels.describeBlock(this.pool, block) : "");
    this._showDetails();
    this._mark();
    if (block && this.pool) this.onPick(block);
  }

  // Details of the selected block, from the server.
  showDetails(details) {
    this.details = details;
    this._showDetails();
  }

  get block() {
    return this.grid.pointed || this.grid.picked;
  }

  _showDetails() {
    if (!this.pool) return;
    const details = this.details?.id === this.block ? this.details : null;
    panels.showBlock(this.pool, this.block, $("#facts"), { tokens: this.tokens, details });
  }

  _mark() {
    const { block } = this;
    for (const chip of document.querySelectorAll(".chip.on")) chip.classList.remove("on");
    if (block) for (const chip of document.querySelectorAll(`.chip[data-block="${block}"]`)) chip.classList.add("on");
  }

  // Hovering a chip highlights its block; hovering a row highlights all of its blocks, and the sequence's state.
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
    const { pool } = this;
    const sequence = pool?.sequences.get(Number(uid));
    const isMarked = (each) => each === sequence || (each.main === sequence.main && pool.isState(each.group));
    const tables = sequence && !pool.isSwapped(sequence) ? [...pool.sequences.values()].filter(isMarked) : [];
    const blocks = tables.flatMap((each) => each.blocks);
    this.grid.mark(new Set(blocks.filter((block) => block > 0)), this.grid.arrow);
  }

  _describeStep(step) {
    if (!step) return text($("#step-text"), "");
    const { prefill, decode, running, waiting, swapped, accepted } = step;
    const drafts = accepted ? ` (${accepted} from drafts)` : "";
    const tokens = `${prefill} prefill and ${decode} decode tokens${drafts}`;
    text($("#step-text"), `step ${step.step}: ${tokens}; ${running} running, ${waiting} waiting, ${swapped} swapped`);
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

  // With one group of layers there is nothing to tell apart.
  _offerGroups() {
    const offered = this.pool.hasGroups;
    $("#modes input[value=group]").parentElement.hidden = !offered;
    $("#kept").hidden = !this.pool.stateBlocks;
    if (!offered && this.grid.mode === "group") this.colourBy("state");
  }

  colourBy(mode) {
    $(`#modes input[value=${mode}]`).checked = true;
    this.grid.colourBy(mode);
    this._showLegend();
  }

  _showLegend() {
    const key = ([kind]) => `${this.grid.mode} ${kind}`;
    renderList($("#legend"), this._legend(), key, ([, meaning]) =>
      h("li", {}, h("canvas", { width: 28, height: 28, "aria-hidden": "true" }), meaning),
    );
    this._drawLegend();
  }

  // [[kind, meaning], ...] of the pool's blocks.
  _legend() {
    const { pool } = this;
    const kinds = Object.entries({ ...LEGENDS[this.grid.mode], ...(pool?.stateBlocks && STATES) });
    return kinds.filter(([kind]) => kind !== "window" || pool?.windows.length);
  }

  // As the grid draws such blocks.
  _drawLegend() {
    const { theme, ramp, hatch, keptHatch, mode } = this.grid;
    const ofState = mode === "state" || mode === "group" ? theme.state : theme.muted; // else it has another colour
    this._legend().forEach(([kind], i) => {
      const c = $("#legend").children[i].firstChild.getContext("2d");
      const owners = { owner: [0], shared: [0, 1], window: [1] }[kind]?.map((slot) => rgb(ownerColour(slot)));
      const colours = { few: ramp[1], many: ramp[7], free: theme.line, recurrent: ofState, kept: ofState };
      const tones = owners ?? [colours[kind] ?? theme.accent];
      const isPale = owners || ["used", "partly", "recurrent", "kept"].includes(kind);
      const isHatched = kind === "cached" || (kind === "kept" && mode !== "age");
      c.clearRect(0, 0, 28, 28);
      c.lineWidth = 2;
      c.beginPath();
      c.roundRect(2, 2, 24, 24, kind in STATES ? 12 : 4);
      c.save();
      c.clip();
      tones.forEach((tone, j) => {
        c.fillStyle = isHatched ? (kind === "kept" ? keptHatch : hatch) : css(mix(tone, theme.surface, isPale ? 0.62 : 1));
        if (kind !== "free") c.fillRect(0, 14 * j, kind === "partly" ? 14 : 28, 28);
      });
      c.restore();
      c.strokeStyle = css(tones[0]);
      c.stroke();
      if (kind === "kept") drawRing(c, 2, 2, 24);
    });
  }

  retheme() {
    this.grid.retheme();
    this.timeline.retheme();
    this._drawLegend();
    this._drawPieces();
  }
}
