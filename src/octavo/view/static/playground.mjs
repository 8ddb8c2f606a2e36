// The playground: the server's own core executes every action. The history of actions is the session and its link.

import { $, count, h, notice, reducedMotion, renderList, text } from "./dom.mjs";
import { showChoices, showCode, showRows, showStops } from "./lesson.mjs";
import { fetchJson, copyLink } from "./server.mjs";

const FIRST_POOL = "64x16";
const PHASE_MS = 1100;
const MAX_PHASES = 40;
const VISITED = "octavo-view-visited";

const number = (selector) => Math.max(0, Math.floor(Number($(selector).value) || 0));
const typed = () => encodeURIComponent($("#words").value.trim()).replaceAll("'", "%27");

// Button -> the action that it sends; `name` is the selected sequence.
const ACTIONS = {
  new: () => `new,${number("#new-tokens")}`,
  text: () => `text,${typed()}`,
  share: () => `share,${number("#shared")},${number("#own")}`,
  append: (name) => `append,${name},${number("#append-tokens")}`,
  type: (name) => `type,${name},${typed()}`,
  write: (name) => `write,${name}`,
  fork: (name) => `fork,${name},${number("#forks")}`,
  beam: (name) => `beam,${name},${number("#beams")}`,
  swap: (name) => `preempt,${name},swap`,
  recompute: (name) => `preempt,${name},recompute`,
  resume: (name) => `resume,${name}`,
  free: (name) => `free,${name}`,
  fill: () => "fill",
  forget: () => "forget",
};
const KEYS = { n: "new", a: "append", f: "fork", w: "write", x: "free", u: "undo" };
const NEW_SEQUENCE_ACTIONS = new Set(["new", "text", "share"]);

export class Playground {
  constructor(stage) {
    this.stage = stage;
    this.history = FIRST_POOL;
    this.queue = Promise.resolve();
    for (const name of Object.keys(ACTIONS)) $(`#${name}`).onclick = () => this.do(name);
    $("#undo").onclick = () => this._post(() => this.history.replace(/;[^;]*$/, ""));
    $("#reset").onclick = () => this._post(() => this.reply?.pool ?? FIRST_POOL);
    $("#link").onclick = (event) => copyLink(event.target, `play=${this.history}`);
    $("#pool-form").onsubmit = (event) => {
      event.preventDefault();
      const maxLen = number("#max-len");
      this.go(`${number("#num-blocks")}x${number("#block-size")}${maxLen ? `x${maxLen}` : ""}`);
    };
    $("#sequence").onchange = () => this._mark();
    $("#tables > ul").addEventListener("click", (event) => {
      const name = this.reply?.names[event.target.closest(".row")?.dataset.uid];
      if (name) $("#sequence").value = name;
      this._mark();
    });
    $("#lesson-next").onclick = () => this._changeStep(1);
    $("#lesson-back").onclick = () => this._changeStep(-1);
    $("#lesson-leave").onclick = () => this._closeLesson();
    $("#begin-lesson").onclick = () => this.openLesson(this.lessons[0].id);
    $("#begin").hidden = Boolean(localStorage.getItem(VISITED));
  }

  // `link`: a history, or "lesson=ID.STEP".
  async enter(link) {
    this.isShown = true;
    this.stage.onPick = () => {};
    this.stage.title = (sequence) => count(sequence.blocks.length, "block");
    this.lessons ??= await fetchJson("play/lessons").catch(() => []);
    if (!this.isShown) return; // the user left the playground meanwhile
    renderList(
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
    const [, id, number = "1"] = /^lesson=([^.]*)(?:\.(\d+))?/.exec(link ?? "") ?? [];
    const lesson = this.lessons.find((each) => each.id === id);
    if (lesson?.steps[number - 1]) return this.openLesson(id, number - 1, true);
    const before = this.lesson ? FIRST_POOL : this.history;
    this._hideLesson();
    if (lesson) notice(`“${lesson.title}” has no step ${number}.`);
    else if (id !== undefined) notice(`There is no lesson “${id.slice(0, 60)}”.`);
    if (link && id === undefined) {
      if (await this.go(link)) return;
      notice(`This link cannot be shown: ${$("#error").textContent}`);
    }
    await this.go(before);
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

  // -- actions -------------------------------------------------------------------------------------------------------

  do(name) {
    this._visit();
    notice();
    return this._post(() => this.history, ACTIONS[name]($("#sequence").value), NEW_SEQUENCE_ACTIONS.has(name));
  }

  go(link) {
    return this._post(() => link);
  }

  // Sends one action after the other, in the order of the clicks: each continues the history of the one before.
  // Resolves to false if the server refuses it as invalid.
  _post(from, action = null, isNew = false) {
    this.queue = this.queue.then(async () => {
      try {
        const reply = await fetchJson("play", { history: from(), action });
        text($("#error"), "");
        if (this.isShown) this._show(reply, isNew, action);
        else this.history = reply.history; // shown when the user comes back
        return true;
      } catch (error) {
        text($("#error"), error.message);
        return false;
      }
    });
    return this.queue;
  }

  _show(reply, isNew, action) {
    const { stage } = this;
    this.reply = reply;
    this.history = reply.history;
    const numActions = reply.history.split(";").length - 1;
    stage.reply = reply;
    stage.tokens = reply.tokens;
    stage.show({ ...reply.picture, epoch: reply.pool, time_s: numActions }, { names: reply.names, ageUnit: "action" });
    stage.paint();
    text($("#sentence"), reply.says);
    text($("#why"), reply.why ?? "");
    $("#story").dataset.done = reply.done;
    this._fillSequences(reply, isNew);
    this._fillPool(reply);
    $("#undo").disabled = !numActions;
    $("#reset").disabled = !numActions;
    this._showPhases(reply.phases ?? [], action);
    if (!this.lesson)
      history.replaceState(null, "", numActions || reply.pool !== FIRST_POOL ? `#play=${reply.history}` : "#play");
  }

  _fillSequences(reply, isNew) {
    const select = $("#sequence");
    const names = Object.values(reply.names);
    const before = select.value;
    renderList(
      select,
      names,
      (name) => name,
      (name) => h("option", { value: name }, name),
    );
    if (isNew && reply.done) select.value = names.at(-1);
    else if (names.includes(before)) select.value = before;
    for (const button of document.querySelectorAll(".needs-sequence")) button.disabled = !names.length;
    $("#type").disabled = !names.length;
  }

  _fillPool(reply) {
    const [numBlocks, blockSize, maxLen = ""] = reply.pool.split("x");
    $("#num-blocks").value = numBlocks;
    $("#block-size").value = blockSize;
    $("#max-len").value = maxLen;
    $("#max-len").placeholder = reply.contiguous.max_len;
  }

  _mark() {
    const name = $("#sequence").value;
    for (const row of document.querySelectorAll("#tables .row"))
      row.classList.toggle("chosen", this.reply?.names[row.dataset.uid] === name);
  }

  // -- phases of an action -------------------------------------------------------------------------------------------

  // If a block was copied, only the four phases of the copy are shown.
  _showPhases(phases, action) {
    this._stopPhases();
    if (this.isTraced) phases = phases.filter((phase) => phase.lines.length);
    const copy = this.isTraced ? -1 : phases.findIndex((phase) => phase.kind === "copy");
    const isCopy = copy >= 0;
    const from = isCopy ? Math.max(0, copy - 1) : 0;
    this.phases = action ? phases.slice(from, from + (isCopy ? 4 : MAX_PHASES)) : [];
    const numLeft = phases.length - this.phases.length;
    renderList(
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
    text($("#phase-text"), "");
    if (this.phases.length && (isCopy || this.isTraced)) this._phase(0, this.isTraced);
    this._mark();
  }

  // The lesson shows the core's own code; each phase has the lines that ran.
  get isTraced() {
    return Boolean(this.lesson?.code && !this.lesson.steps[0].lines);
  }

  // Shows phase i, and after a while the next one, unless the user selected it or prefers reduced motion.
  _phase(i, isSelected = false) {
    clearTimeout(this.timer);
    const phase = this.phases[i];
    [...$("#phases").children].forEach((button, j) => {
      if (i === j) button.setAttribute("aria-current", "step");
      else button.removeAttribute("aria-current");
    });
    text($("#phase-text"), phase.says);
    this.at = i;
    if (this.isTraced) {
      showCode($("#source"), this.lesson.code, phase.lines);
      this._labelButtons();
    }
    const arrow = phase.kind === "copy" && phase.from_block_id ? [phase.from_block_id, phase.block_id] : null;
    this.stage.grid.mark(new Set([phase.block_id].filter(Boolean)), arrow);
    if (isSelected || reducedMotion.matches) return;
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

  // The first visit has one large button, which begins lesson 1.
  _visit() {
    localStorage.setItem(VISITED, "yes");
    $("#begin").hidden = true;
  }

  openLesson(id, step = 0, isLink = false) {
    this._visit();
    this.lesson = this.lessons.find((lesson) => lesson.id === id);
    $("#lesson-list").hidden = true;
    $("#lesson").hidden = false;
    text($("#lesson-title"), this.lesson.title);
    text($("#lesson-text"), this.lesson.text);
    this.stage.colourBy(this.lesson.colour);
    $("#unit").value = this.lesson.unit ?? 0;
    return this._showStep(step, isLink);
  }

  _changeStep(by) {
    if (this.isTraced && this.phases[this.at + by]) return this._phase(this.at + by, true);
    if (this.step + by < this.lesson.steps.length) return this._showStep(this.step + by);
    const next = this.lessons[this.lessons.indexOf(this.lesson) + 1];
    return next ? this.openLesson(next.id) : this._closeLesson();
  }

  // Goes to the history before the step's last action and then does that action, so that its phases are shown.
  async _showStep(number, isLink = false) {
    this.step = number;
    const { steps, id, code } = this.lesson;
    [this.phases, this.at] = [[], 0];
    const step = steps[number];
    const cut = step.history.lastIndexOf(";");
    const act = () => this._post(() => step.history.slice(0, cut), step.history.slice(cut + 1));
    text($("#lesson-place"), `Step ${number + 1} of ${steps.length}`);
    text($("#lesson-step"), step.text);
    showChoices($("#lesson-choices"), $("#lesson-look"), step, act);
    showRows($("#lesson-rows"), step.rows);
    showStops($("#slider"), $("#lesson-rows"), step, (stop) => this.go(stop));
    showCode($("#source"), code, step.lines);
    this._labelButtons();
    const address = `#lesson=${id}.${number + 1}`;
    if (isLink) history.replaceState(null, "", address);
    else history.pushState(null, "", address);
    if (step.choices) await this.go(step.history.slice(0, cut));
    else if (step.action) await this._post(() => step.history, step.action); // to show that it is refused
    else await (cut > 0 ? act() : this.go(step.history));
    if (this.lesson?.steps[this.step] === step) this.stage.grid.pick(step.block ?? 0);
  }

  _labelButtons() {
    const isLast = this.step + 1 === this.lesson.steps.length;
    const [next, back] = [$("#lesson-next"), $("#lesson-back")];
    const isMore = this.isTraced && this.at + 1 < this.phases.length;
    const isEnd = isLast && this.lesson === this.lessons.at(-1);
    text(next, isMore ? "Next lines" : isEnd ? "Done" : isLast ? "Next lesson" : "Next step");
    const isFirst = this.step === 0 && !(this.isTraced && this.at);
    if (isFirst && document.activeElement === back) next.focus(); // a disabled button loses the focus
    back.disabled = isFirst;
  }

  _hideLesson() {
    this.lesson = null;
    $("#source").hidden = true;
    $("#lesson-list").hidden = false;
    $("#lesson").hidden = true;
    this.stage.grid.resize(); // on a phone it has more room now
  }

  _closeLesson() {
    this._hideLesson();
    history.pushState(null, "", `#play=${this.history}`);
    $("#lesson-list ol button").focus();
  }
}
