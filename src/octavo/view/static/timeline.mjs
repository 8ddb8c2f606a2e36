// The last steps on a canvas: computed tokens as bars, blocks used as a line, preemptions and swaps as marks.

import { css, mix, readTheme } from "./colours.mjs";

const BAR_PX = 4;
const FOOT_PX = 16; // for the marks
const HEAD_PX = 14;

export class Timeline {
  // A step: { step, prefill, decode, used, num_blocks, numPreempted, numSwaps }. `onPoint` is called with
  // the hovered step or null.
  constructor(canvas, onPoint = () => {}) {
    this.canvas = canvas;
    this.context = canvas.getContext("2d");
    this.steps = [];
    this.retheme();
    new ResizeObserver(() => this.draw()).observe(canvas);
    canvas.addEventListener("pointermove", (event) => onPoint(this._at(event.offsetX)));
    canvas.addEventListener("pointerleave", () => onPoint(null));
  }

  retheme() {
    this.theme = readTheme();
    this.redraw();
  }

  show(steps) {
    this.steps = steps;
    this.redraw();
  }

  redraw() {
    this.frame ??= requestAnimationFrame(() => {
      this.frame = null;
      this.draw();
    });
  }

  _visibleSteps() {
    return this.steps.slice(-Math.floor(this.canvas.clientWidth / BAR_PX));
  }

  _at(x) {
    const shown = this._visibleSteps();
    return shown[Math.floor((x - (this.canvas.clientWidth - shown.length * BAR_PX)) / BAR_PX)] ?? null;
  }

  draw() {
    const { canvas, context: c, theme } = this;
    const { clientWidth: width, clientHeight: height } = canvas;
    if (!width) return;
    const dpr = devicePixelRatio || 1;
    if (canvas.width !== Math.round(width * dpr) || canvas.height !== Math.round(height * dpr)) {
      canvas.width = Math.round(width * dpr);
      canvas.height = Math.round(height * dpr);
    }
    c.setTransform(dpr, 0, 0, dpr, 0, 0);
    c.clearRect(0, 0, width, height);
    const shown = this._visibleSteps();
    const floor = height - FOOT_PX;
    const maxTokens = Math.max(1, ...shown.map((step) => step.prefill + step.decode));
    const scale = (floor - HEAD_PX) / maxTokens;
    c.font = "11px ui-sans-serif, system-ui, sans-serif";
    c.fillStyle = c.strokeStyle = css(theme.line);
    c.fillRect(0, floor, width, 1);
    const left = width - shown.length * BAR_PX;
    shown.forEach((step, i) => this._bar(step, left + i * BAR_PX, floor, scale));
    this._drawBlocksUsed(shown, left, floor);
    c.fillStyle = css(theme.muted);
    c.textAlign = "left";
    c.fillText(shown.length ? `${maxTokens} tokens` : "No step yet.", 0, HEAD_PX - 4);
  }

  // Decode tokens are solid, at the bottom; prefill tokens are paler.
  _bar(step, x, floor, scale) {
    const { context: c, theme } = this;
    const decode = step.decode * scale;
    const prefill = step.prefill * scale;
    c.fillStyle = css(theme.accent);
    c.fillRect(x, floor - decode, BAR_PX - 1, decode);
    c.fillStyle = css(mix(theme.accent, theme.surface, 0.4));
    c.fillRect(x, floor - decode - prefill, BAR_PX - 1, prefill);
    c.fillStyle = css(theme.warn);
    if (step.numPreempted) this._mark(x + BAR_PX / 2, floor + 4, [-4, 0, 4, 0, 0, 8]);
    else if (step.numSwaps) this._mark(x + BAR_PX / 2, floor + 4, [0, 0, 4, 4, 0, 8, -4, 4]);
  }

  _mark(x, y, corners) {
    const { context: c } = this;
    c.beginPath();
    for (let i = 0; i < corners.length; i += 2) c.lineTo(x + corners[i], y + corners[i + 1]);
    c.fill();
  }

  _drawBlocksUsed(shown, left, floor) {
    const { context: c, theme } = this;
    c.beginPath();
    shown.forEach((step, i) => {
      const y = floor - (step.used / Math.max(1, step.num_blocks)) * (floor - HEAD_PX);
      c.lineTo(left + i * BAR_PX + BAR_PX / 2, y);
    });
    c.strokeStyle = css(theme.ink);
    c.lineWidth = 1.25;
    c.stroke();
  }
}
