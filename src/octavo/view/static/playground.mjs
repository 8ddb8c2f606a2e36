// Learn by hand: every deed is done by the server's real core. The history of deeds is the session, and its link.

import { $, calm, count, h, keep, text } from "./dom.mjs";
import { ask, copyLink } from "./server.mjs";

const FIRST_POOL = "64x16";
const PHASE_MS = 1100;
const MOST_PHASES = 40;

const number = (selector) => Math.max(0, Math.floor(Number($(selector).value) || 0));
const typed = () => encodeURIComponent($("#words").value.trim()).replaceAll("'", "%27");

// Button -> the action that it asks for; `one` is the sequence that is chosen.
const DEEDS = {
  new: () => `new,${number("#new-tokens")}`,
  text: () => `text,${typed()}`,
  share: () => `share,${number("#shared")},${number("#own")}`,
  append: (one) => `append,${one},${number("#append-tokens")}`,
  type: (one) => `type,${one},${typed()}`,
  write: (one) => `write,${one}`,
  fork: (one) => `fork,${one},${number("#forks")}`,
  beam: (one) => `beam,${one},${number("#beams")}`,
  swap: (one) => `preempt,${one},swap`,
  recompute: (one) => `preempt,${one},recompute`,
  resume: (one) => `resume,${one}`,
  free: (one) => `free,${one}`,
  fill: () => "fill",
  forget: () => "forget",
};
const KEYS = { n: "new", a: "append", f: "fork", w: "write", x: "free", u: "undo" };
const STARTS_ONE = new Set(["new", "text", "share"]);

export class Playground {
  constructor(stage) {
    this.stage = stage;
    this.history = FIRST_POOL;
    this.queue = Promise.resolve();
    for (const name of Object.keys(DEEDS)) $(`#${name}`).onclick = () => this.do(name);
    $("#undo").onclick = () => this._post(() => this.history.replace(/;[^;]*$/, ""));
    $("#reset").onclick = () => this._post(() => this.answer?.pool ?? FIRST_POOL);
    $("#link").onclick = (event) => copyLink(event.target, `play=${this.history}`);
    $("#pool-form").onsubmit = (event) => {
      event.preventDefault();
      const longest = number("#max-len");
      this.go(`${number("#num-blocks")}x${number("#block-size")}${longest ? `x${longest}` : ""}`);
    };
    $("#sequence").onchange = () => this._mark();
    $("#tables > ul").addEventListener("click", (event) => {
      const name = this.answer?.names[event.target.closest(".row")?.dataset.uid];
      if (name) $("#sequence").value = name;
      this._mark();
    });
    $("#lesson-next").onclick = () => this._turn(1);
    $("#lesson-back").onclick = () => this._turn(-1);
    $("#lesson-leave").onclick = () => this._closeLesson();
  }

  // `link`: a history, or "lesson=ID.STEP".
  async enter(link) {
    this.isShown = true;
    this.stage.onPick = () => {};
    this.stage.title = (sequence) => count(sequence.blocks.length, "block");
    this.lessons ??= await ask("play/lessons").catch(() => []);
    if (!this.isShown) return; // somebody has gone on to another use meanwhile
    keep(
      $("#lesson-list ol"),
      this.lessons,
      (lesson) => lesson.id,
      (lesson) => {
        const at = String(this.lessons.indexOf(lesson) + 1);
        return h(
          "li",
          {},
          h("button", { type: "button", "data-number": at, onclick: () => this.openLesson(lesson.id) }, lesson.title),
        );
      },
    );
    const [, id, step] = /^lesson=([^.]+)(?:\.(\d+))?$/.exec(link ?? "") ?? [];
    if (id && this.lessons.some((lesson) => lesson.id === id)) await this.openLesson(id, Number(step ?? 1) - 1);
    else await this.go(link && !id ? link : this.history);
  }

  leave() {
    this.isShown = false;
    this._stopPhases();
    this.stage.title = undefined;
  }

  onKey(key) {
    if (!(key in KEYS)) return false;
    $(`#${KEYS[key]}`).click();
    return true;
  }

  // -- deeds ---------------------------------------------------------------------------------------------------------

  do(name) {
    return this._post(() => this.history, DEEDS[name]($("#sequence").value), STARTS_ONE.has(name));
  }

  go(link) {
    return this._post(() => link);
  }

  // One after the other, in the order of the clicks: each builds on the history that the one before has made.
  _post(from, action = null, startsOne = false) {
    this.queue = this.queue.then(async () => {
      try {
        const answer = await ask("play", { history: from(), action });
        text($("#error"), "");
        if (this.isShown) this._show(answer, startsOne, action);
        else this.history = answer.history; // for when one comes back; the stage is another's by now
      } catch (error) {
        text($("#error"), error.message);
      }
    });
    return this.queue;
  }

  _show(answer, startsOne, action) {
    const { stage } = this;
    this.answer = answer;
    this.history = answer.history;
    const numDeeds = answer.history.split(";").length - 1;
    stage.answer = answer;
    stage.tokens = answer.tokens;
    stage.show({ ...answer.picture, epoch: answer.pool, time_s: numDeeds }, { names: answer.names, ageUnit: "deed" });
    stage.paint();
    text($("#sentence"), answer.says);
    text($("#why"), answer.why ?? "");
    $("#story").dataset.done = answer.done;
    this._fillSequences(answer, startsOne);
    this._fillPool(answer);
    $("#undo").disabled = !numDeeds;
    $("#reset").disabled = !numDeeds;
    this._showPhases(answer.phases ?? [], action);
    if (!this.lesson)
      history.replaceState(null, "", numDeeds || answer.pool !== FIRST_POOL ? `#play=${answer.history}` : "#play");
  }

  _fillSequences(answer, startsOne) {
    const select = $("#sequence");
    const names = Object.values(answer.names);
    const before = select.value;
    keep(
      select,
      names,
      (name) => name,
      (name) => h("option", { value: name }, name),
    );
    if (startsOne && answer.done) select.value = names.at(-1);
    else if (names.includes(before)) select.value = before;
    for (const button of document.querySelectorAll(".needs-one")) button.disabled = !names.length;
    $("#type").disabled = !names.length;
  }

  _fillPool(answer) {
    const [numBlocks, blockSize, longest = ""] = answer.pool.split("x");
    $("#num-blocks").value = numBlocks;
    $("#block-size").value = blockSize;
    $("#max-len").value = longest;
    $("#max-len").placeholder = answer.contiguous.max_len;
  }

  _mark() {
    const name = $("#sequence").value;
    for (const row of document.querySelectorAll("#tables .row"))
      row.classList.toggle("chosen", this.answer?.names[row.dataset.uid] === name);
  }

  // -- what happened, step by step -----------------------------------------------------------------------------------

  // Where a block was copied, that is what one came to see: its four steps, and nothing beside them.
  _showPhases(phases, action) {
    this._stopPhases();
    const copy = phases.findIndex((phase) => phase.kind === "copy");
    const isCopy = copy >= 0;
    const from = isCopy ? Math.max(0, copy - 1) : 0;
    this.phases = action ? phases.slice(from, from + (isCopy ? 4 : MOST_PHASES)) : [];
    const numLeft = phases.length - this.phases.length;
    keep(
      $("#phases"),
      this.phases.map((phase, i) => [i, phase]),
      ([i, p]) => `${i}${p.kind}${p.block_id}${p.sequence}`,
      ([i, p]) => {
        const button = h(
          "button",
          { type: "button", onclick: () => this._phase(i, true) },
          h("b", {}, String(i + 1)),
          p.kind,
        );
        if (p.block_id) button.append(h("span", { class: "mono" }, String(p.block_id)));
        return button;
      },
    );
    if (action && numLeft) $("#phases").append(h("span", { class: "more" }, `and ${numLeft} more`));
    text($("#phase-says"), "");
    if (isCopy && action) this._phase(0);
    this._mark();
  }

  // Shows phase i, and after a while the next, unless somebody chose this one or does not want things to move.
  _phase(i, chosen = false) {
    clearTimeout(this.timer);
    const phase = this.phases[i];
    [...$("#phases").children].forEach((button, j) => {
      if (i === j) button.setAttribute("aria-current", "step");
      else button.removeAttribute("aria-current");
    });
    text($("#phase-says"), phase.says);
    const arrow = phase.kind === "copy" && phase.from_block_id ? [phase.from_block_id, phase.block_id] : null;
    this.stage.grid.mark(new Set([phase.block_id].filter(Boolean)), arrow);
    if (chosen || calm.matches) return;
    this.timer = setTimeout(() => {
      if (i + 1 < this.phases.length) this._phase(i + 1);
      else this.stage.grid.mark(new Set());
    }, PHASE_MS);
  }

  _stopPhases() {
    clearTimeout(this.timer);
    this.stage.grid.mark(new Set());
  }

  // -- lessons -------------------------------------------------------------------------------------------------------

  openLesson(id, step = 0) {
    this.lesson = this.lessons.find((lesson) => lesson.id === id);
    $("#lesson-list").hidden = true;
    $("#lesson").hidden = false;
    text($("#lesson-title"), this.lesson.title);
    text($("#lesson-text"), this.lesson.text);
    this.step = Math.min(Math.max(0, step), this.lesson.steps.length - 1);
    return this._showStep();
  }

  _turn(by) {
    if (this.step + by >= this.lesson.steps.length) {
      const next = this.lessons[this.lessons.indexOf(this.lesson) + 1];
      return next ? this.openLesson(next.id) : this._closeLesson();
    }
    this.step += by;
    return this._showStep();
  }

  // A step whose history continues what is on the screen by one action is done; others are gone to.
  _showStep() {
    const { steps, id } = this.lesson;
    const step = steps[this.step];
    text($("#lesson-place"), `Step ${this.step + 1} of ${steps.length}`);
    text($("#lesson-step"), step.text);
    text($("#lesson-look"), step.look ?? "");
    const isLast = this.step + 1 === steps.length;
    const isEnd = isLast && this.lesson === this.lessons.at(-1);
    text($("#lesson-next"), isEnd ? "Done" : isLast ? "Next lesson" : "Next step");
    $("#lesson-back").disabled = this.step === 0;
    history.replaceState(null, "", `#lesson=${id}.${this.step + 1}`);
    if (step.action) return this._post(() => step.history, step.action); // to see it refused
    const cut = step.history.lastIndexOf(";");
    if (cut > 0) return this._post(() => step.history.slice(0, cut), step.history.slice(cut + 1));
    return this.go(step.history);
  }

  _closeLesson() {
    this.lesson = null;
    $("#lesson-list").hidden = false;
    $("#lesson").hidden = true;
    history.replaceState(null, "", `#play=${this.history}`);
    $("#lesson-list button").focus();
  }
}
