// A recording: play it, scrub through it, jump to preemptions.

import { css, mix, readTheme } from "./colours.mjs";
import { $, h, notice, text } from "./dom.mjs";
import { FrameLost } from "./pool.mjs";
import { fetchJson, copyLink } from "./server.mjs";

const SPEEDS = [0.1, 0.5, 1, 2, 5, 20, 100];
const PREFETCH_S = 4; // seconds of playing fetched at once
const JUMP_LEAD_S = 0.05; // a jump ends this long before its target

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
      const details = await fetchJson(`blocks/${block}?time_s=${this.now_s}`).catch(() => null);
      if (details) this.stage.showDetails(details);
    };
    text($("#connection"), this.title);
    this.summary ??= await fetchJson("replay");
    $("#scrub").max = this.summary.duration_s;
    $("#trace").href = "replay/trace";
    $("#jump").disabled = !this._preemptions().length;
    this.drawOverview();
    const time_s = Number(moment);
    if (Number.isNaN(time_s)) notice(`“${moment.slice(0, 60)}” is not a moment in seconds.`);
    await this.seek(time_s || 0);
  }

  leave() {
    this.isShown = false; // the address bar belongs to another use
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
    return this.summary.marks.filter((mark) => mark.event === "preempted");
  }

  // -- seeking -------------------------------------------------------------------------------------------------------

  // Of the calls that come while a request is under way, only the last one is executed.
  async seek(time_s) {
    this._setTime(Math.min(Math.max(0, time_s), this.summary.duration_s));
    this.frames = [];
    this.fetched_s = null;
    if (this.seeking) return void (this.next_s = this.now_s);
    this.seeking = true;
    try {
      do {
        this.next_s = null;
        const snapshot = await fetchJson(`replay/at?time_s=${this.now_s}`);
        if (this.isShown) this.stage.show(snapshot); // else another use is shown by now
      } while (this.next_s !== null);
    } finally {
      this.seeking = false;
    }
    this._updateLink();
  }

  get link() {
    return `replay=${this.now_s.toFixed(3)}`;
  }

  // Writes the moment into the address bar, so that the link can be shared; not while playing.
  _updateLink() {
    if (this.isShown) history.replaceState(null, "", `#${this.link}`);
  }

  _setTime(time_s) {
    this.now_s = time_s;
    $("#scrub").value = time_s;
    $("#scrub").setAttribute("aria-valuetext", `${time_s.toFixed(1)} seconds`);
    text($("#moment"), `${time_s.toFixed(2)} of ${this.summary.duration_s.toFixed(1)} s`);
    $("#export").href = `replay/export?from_s=${time_s}&to_s=${this.summary.duration_s}`;
    this.drawOverview();
  }

  // Jumps to just before the next preemption; after the last one, to the first.
  async jump() {
    const times = this._preemptions().map((mark) => mark.time_s);
    const next = times.find((time_s) => time_s > this.now_s + 2 * JUMP_LEAD_S) ?? times[0];
    if (next !== undefined) await this.seek(next - JUMP_LEAD_S);
  }

  // -- playing -------------------------------------------------------------------------------------------------------

  toggle() {
    if (this.playing) this.pause();
    else this.play();
  }

  async play() {
    if (this.now_s >= this.summary.duration_s) await this.seek(0);
    if (!this.isShown) return;
    this.playing = true;
    text($("#connection"), this.title);
    $("#run").textContent = "Pause";
    this.tick = performance.now();
    this._play();
  }

  pause() {
    if (this.playing) this._updateLink();
    this.playing = false;
    $("#run").textContent = "Play";
  }

  _play() {
    if (!this.playing) return;
    const now = performance.now();
    if (!this.seeking) {
      this._fetch();
      const target = this.now_s + ((now - this.tick) / 1000) * this.speed;
      // Never past the fetched frames: playing waits for the network.
      this._setTime(Math.min(target, this.fetched_s ?? this.now_s, this.summary.duration_s));
      this._apply();
      if (this.now_s >= this.summary.duration_s) this.pause();
    }
    this.tick = now;
    requestAnimationFrame(() => this._play());
  }

  _apply() {
    try {
      while (this.frames.length && this.frames[0].time_s <= this.now_s) this.stage.apply(this.frames.shift());
    } catch (error) {
      if (!(error instanceof FrameLost)) throw error;
      this.seek(this.now_s);
    }
  }

  async _fetch() {
    const ahead_s = PREFETCH_S * this.speed;
    const from_s = this.fetched_s ?? this.stage.pool.time_s;
    if (this.fetching || from_s >= this.summary.duration_s || from_s - this.now_s > ahead_s / 2) return;
    this.fetching = true;
    try {
      const reply = await fetchJson(`replay/frames?from_s=${from_s}&to_s=${from_s + ahead_s}`);
      // After a jump meanwhile, these frames belong to another moment.
      if (!this.isShown || this.seeking || (this.fetched_s ?? this.stage.pool.time_s) !== from_s) return;
      this.frames.push(...reply.frames);
      this.fetched_s = reply.end_s;
    } catch (error) {
      this.pause(); // else it would be requested again with every animation frame
      if (this.isShown) text($("#connection"), error.message);
    } finally {
      this.fetching = false;
    }
  }

  // -- the curve above the scrubber ----------------------------------------------------------------------------------

  drawOverview() {
    const canvas = $("#overview");
    const { clientWidth: width, clientHeight: height } = canvas;
    if (!this.summary || !width) return;
    const dpr = devicePixelRatio || 1;
    const c = canvas.getContext("2d");
    canvas.width = Math.round(width * dpr);
    canvas.height = Math.round(height * dpr);
    c.scale(dpr, dpr);
    const theme = readTheme();
    const x = (time_s) => 8 + (time_s / Math.max(1e-9, this.summary.duration_s)) * (width - 16); // as the thumb
    const curve = (value, colour) => {
      c.beginPath();
      c.moveTo(x(0), height);
      for (const row of this.summary.used)
        c.lineTo(x(row[0]), height - (value(row) / this.summary.num_blocks) * (height - 10));
      c.lineTo(x(this.summary.used.at(-1)?.[0] ?? 0), height);
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
