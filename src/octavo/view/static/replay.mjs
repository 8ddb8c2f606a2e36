// A recording: play it, scrub through it, jump to what matters.

import { css, mix, readTheme } from "./colours.mjs";
import { $, h, text } from "./dom.mjs";
import { OutOfStep } from "./pool.mjs";
import { ask, copyLink } from "./server.mjs";

const SPEEDS = [0.1, 0.5, 1, 2, 5, 20, 100];
const AHEAD_S = 4; // of playing, fetched at once
const LEAD_S = 0.05; // a jump ends this long before what it goes to

export class Replay {
  constructor(stage, title) {
    this.stage = stage;
    this.title = title;
    this.now_s = 0;
    this.frames = [];
    for (const speed of SPEEDS) $("#speed").append(h("option", { value: speed, selected: speed === 1 }, `${speed} ×`));
    $("#run").onclick = () => this.toggle();
    $("#jump").onclick = () => this.jump();
    $("#scrub").oninput = (event) => {
      this.pause();
      this.seek(Number(event.target.value));
    };
    $("#moment-link").onclick = (event) => copyLink(event.target, this.link);
    new ResizeObserver(() => this.drawOverview()).observe($("#overview"));
  }

  // `moment`: seconds, from the link.
  async enter(moment) {
    this.isShown = true;
    this.stage.onPick = async (block) => {
      const told = await ask(`blocks/${block}?time_s=${this.now_s}`).catch(() => null);
      if (told) this.stage.tell(told);
    };
    text($("#connection"), this.title);
    this.about ??= await ask("replay");
    $("#scrub").max = this.about.duration_s;
    $("#trace").href = "replay/trace";
    $("#jump").disabled = !this._preemptions().length;
    this.drawOverview();
    await this.seek(Number(moment) || 0);
  }

  leave() {
    this.isShown = false; // the address is another's
    this.pause();
    text($("#connection"), "");
  }

  onKey(key, target) {
    if (key === "p") this.jump();
    else if (key === " " && !target.closest("button, a")) this.toggle();
    else return false;
    return true;
  }

  get speed() {
    return Number($("#speed").value);
  }

  _preemptions() {
    return this.about.marks.filter((mark) => mark.event === "preempted");
  }

  // -- where we are --------------------------------------------------------------------------------------------------

  // Of many calls that come while one is on its way, only the last is carried out.
  async seek(time_s) {
    this._at(Math.min(Math.max(0, time_s), this.about.duration_s));
    this.frames = [];
    this.fetched_s = null;
    if (this.seeking) return void (this.next_s = this.now_s);
    this.seeking = true;
    try {
      do {
        this.next_s = null;
        const told = await ask(`replay/at?time_s=${this.now_s}`);
        if (this.isShown) this.stage.show(told); // else the stage is another's by now
      } while (this.next_s !== null);
    } finally {
      this.seeking = false;
    }
    this._keepMoment();
  }

  get link() {
    return `replay=${this.now_s.toFixed(3)}`;
  }

  // The address says where we are, so that it can be passed on; not while it plays.
  _keepMoment() {
    if (this.isShown) history.replaceState(null, "", `#${this.link}`);
  }

  _at(time_s) {
    this.now_s = time_s;
    $("#scrub").value = time_s;
    $("#scrub").setAttribute("aria-valuetext", `${time_s.toFixed(1)} seconds`);
    text($("#moment"), `${time_s.toFixed(2)} of ${this.about.duration_s.toFixed(1)} s`);
    $("#export").href = `replay/export?from_s=${time_s}&to_s=${this.about.duration_s}`;
    this.drawOverview();
  }

  // To just before the next preemption, so that one sees it happen; after the last, to the first.
  async jump() {
    const times = this._preemptions().map((mark) => mark.time_s);
    const next = times.find((time_s) => time_s > this.now_s + 2 * LEAD_S) ?? times[0];
    if (next !== undefined) await this.seek(next - LEAD_S);
  }

  // -- playing -------------------------------------------------------------------------------------------------------

  toggle() {
    if (this.playing) this.pause();
    else this.play();
  }

  async play() {
    if (this.now_s >= this.about.duration_s) await this.seek(0);
    if (!this.isShown) return;
    this.playing = true;
    text($("#connection"), this.title);
    $("#run").textContent = "Pause";
    this.tick = performance.now();
    this._play();
  }

  pause() {
    if (this.playing) this._keepMoment();
    this.playing = false;
    $("#run").textContent = "Play";
  }

  _play() {
    if (!this.playing) return;
    const now = performance.now();
    if (!this.seeking) {
      this._fetch();
      const target = this.now_s + ((now - this.tick) / 1000) * this.speed;
      // Never past what has been fetched: time waits for the network.
      this._at(Math.min(target, this.fetched_s ?? this.now_s, this.about.duration_s));
      this._apply();
      if (this.now_s >= this.about.duration_s) this.pause();
    }
    this.tick = now;
    requestAnimationFrame(() => this._play());
  }

  _apply() {
    try {
      while (this.frames.length && this.frames[0].time_s <= this.now_s) this.stage.apply(this.frames.shift());
    } catch (error) {
      if (!(error instanceof OutOfStep)) throw error;
      this.seek(this.now_s);
    }
  }

  async _fetch() {
    const ahead_s = AHEAD_S * this.speed;
    const from_s = this.fetched_s ?? this.stage.pool.time_s;
    if (this.fetching || from_s >= this.about.duration_s || from_s - this.now_s > ahead_s / 2) return;
    this.fetching = true;
    try {
      const told = await ask(`replay/frames?from_s=${from_s}&to_s=${from_s + ahead_s}`);
      // A jump meanwhile makes this an answer to another question.
      if (!this.isShown || this.seeking || (this.fetched_s ?? this.stage.pool.time_s) !== from_s) return;
      this.frames.push(...told.frames);
      this.fetched_s = told.end_s;
    } catch (error) {
      this.pause(); // or it would be asked for again with every picture
      if (this.isShown) text($("#connection"), error.message);
    } finally {
      this.fetching = false;
    }
  }

  // -- the curve over the slider -------------------------------------------------------------------------------------

  drawOverview() {
    const canvas = $("#overview");
    const { clientWidth: width, clientHeight: height } = canvas;
    if (!this.about || !width) return;
    const dpr = devicePixelRatio || 1;
    const c = canvas.getContext("2d");
    canvas.width = Math.round(width * dpr);
    canvas.height = Math.round(height * dpr);
    c.scale(dpr, dpr);
    const theme = readTheme();
    const x = (time_s) => 8 + (time_s / Math.max(1e-9, this.about.duration_s)) * (width - 16); // as the slider's thumb
    const curve = (value, colour) => {
      c.beginPath();
      c.moveTo(x(0), height);
      for (const row of this.about.used)
        c.lineTo(x(row[0]), height - (value(row) / this.about.num_blocks) * (height - 10));
      c.lineTo(x(this.about.used.at(-1)?.[0] ?? 0), height);
      c.fillStyle = css(colour);
      c.fill();
    };
    curve(([, used, cached]) => used + cached, mix(theme.accent, theme.surface, 0.2));
    curve(([, used]) => used, mix(theme.accent, theme.surface, 0.6));
    c.fillStyle = css(theme.warn);
    for (const mark of this._preemptions()) c.fillRect(x(mark.time_s) - 0.5, 0, 1.5, 8);
    c.fillStyle = css(theme.ink);
    c.fillRect(x(this.now_s) - 0.75, 0, 1.5, height);
  }
}
