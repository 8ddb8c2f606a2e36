// The pool as a grid on a canvas: cells with text if they are large enough, else a heat map.
//
// Each block is a pixel of an image, of which only changed pixels are updated. If cells are large, the visible ones are
// drawn one by one instead. So a million blocks cost as much as a thousand.

import { css, inkOn, letter, mix, ownerColour, pixel, ramp, readTheme, rgb } from "./colours.mjs";
import { reducedMotion } from "./dom.mjs";

export const MODES = ["state", "owner", "references", "age", "group"];
const DETAIL_PX = 9; // cells from this size on are drawn one by one
const [FREE, CACHED, USED, KEPT, OWNER, RAMP] = [0, 1, 2, 3, 4, 12]; // indices of the palette
const MIN_LABEL = 9; // px
const FLASH_MS = 600;
const MAX_FLASHES = 3000;
const AGES_S = [1, 3, 10, 30, 100, 300, 1000];
const RECOLOUR_MS = 500; // between two updates of ages

// The slot whose colour a group of layers has; that of states is theirs alone.
export const STATE_SLOT = 5;
const WINDOW_SLOTS = [1, 2, 3, 4, 6, 7];
export const groupSlot = (pool, group) => (pool.isState(group) ? STATE_SLOT : WINDOW_SLOTS[(group - 1) % 6]);

// K and V are square, states round; a checkpoint has a second ring.
export function drawRing(c, x, y, size) {
  const gap = Math.max(2, size * 0.1);
  c.beginPath();
  c.roundRect(x + gap, y + gap, size - 2 * gap, size - 2 * gap, size / 2);
  c.stroke();
}

export class PoolGrid {
  // Draws a `Pool` (see pool.mjs). `onPoint(block)` gets the hovered block, `onPick(block)` the selected one; 0: none.
  constructor(canvas, { onPoint = () => {}, onPick = () => {} } = {}) {
    this.canvas = canvas;
    this.context = canvas.getContext("2d");
    this.image = document.createElement("canvas"); // one pixel per block
    this.base = document.createElement("canvas"); // the visible part without flashes and marks, which change every frame
    this.mode = "state";
    this.pool = null;
    this.pointed = 0;
    this.picked = 0;
    this.marked = new Map(); // highlighted blocks: of a copy's phase, of a hovered table
    this.arrow = null;
    this.flashes = new Map(); // block -> time of its change
    this.onPoint = onPoint;
    this.onPick = onPick;
    this.view = { x: 0, y: 0, zoom: 1 }; // top left of the image in CSS pixels; zoom 1 fits
    this.retheme();
    this._listen();
    new ResizeObserver(() => this.resize()).observe(canvas);
    matchMedia("(resolution: 1dppx)").addEventListener("change", () => this.resize());
  }

  show(pool) {
    this.pool = pool;
    this.flashes.clear();
    this.view = { x: 0, y: 0, zoom: 1 };
    this.pointed = this.picked = 0;
    this.resize();
  }

  colourBy(mode) {
    this.mode = mode;
    this.recolour();
  }

  retheme() {
    this.theme = readTheme();
    const { surface, accent, line, muted } = this.theme;
    const state = (this.theme.state = rgb(ownerColour(STATE_SLOT)));
    this.ramp = ramp(this.theme, 8);
    const owners = Array.from({ length: 8 }, (_, slot) => rgb(ownerColour(slot)));
    const used = [accent, mix(state, surface, 0.38)];
    this.palette = [mix(line, surface, 0.55), mix(accent, surface, 0.38), ...used, ...owners, ...this.ramp];
    this.paletteImage = this.palette.map(pixel);
    this.hatch = this._hatch(css(mix(accent, surface, 0.14)), css(mix(accent, surface, 0.6)));
    this.keptHatch = this._hatch(css(mix(state, surface, 0.14)), css(mix(state, surface, 0.6)));
    this.wasted = this._hatch(css(surface), css(mix(muted, surface, 0.45)));
    this.faint = css(muted);
    if (this.pool) this.recolour();
  }

  // Cached blocks are hatched, which distinguishes them from free and used ones without colour.
  _hatch(ground, stroke) {
    const tile = document.createElement("canvas");
    tile.width = tile.height = 8;
    const c = tile.getContext("2d");
    c.fillStyle = ground;
    c.fillRect(0, 0, 8, 8);
    c.strokeStyle = stroke;
    c.lineWidth = 1.4;
    for (const x of [-8, 0, 8]) {
      c.moveTo(x, 8);
      c.lineTo(x + 8, 0);
    }
    c.stroke();
    return this.context.createPattern(tile, "repeat");
  }

  // -- colours -------------------------------------------------------------------------------------------------------

  colourOf(block) {
    return this.palette[this._paletteIndex(block)];
  }

  // An index into `palette`, which holds colours as [r, g, b], and into `paletteImage`, which holds them as pixels.
  _paletteIndex(block) {
    const { pool, mode } = this;
    const refs = pool.refs[block];
    if (!refs && !pool.cached[block]) return FREE;
    if (mode === "age") return RAMP + 7 - this._ageStep(block);
    const kind = pool.kindOf(block);
    if (!refs) return kind ? KEPT : CACHED;
    if (mode === "owner") return OWNER + (pool.owner[block] < 0 ? 7 : pool.owner[block] % 8);
    if (mode === "group") return pool.groups[block] ? OWNER + groupSlot(pool, pool.groups[block]) : USED;
    if (mode === "references") return RAMP + Math.min(7, 2 * refs - 1);
    return kind ? OWNER + STATE_SLOT : USED;
  }

  _ageStep(block) {
    const age = this.pool.ageOf(block);
    const step = AGES_S.findIndex((limit) => age < limit);
    return step < 0 ? AGES_S.length : step;
  }

  recolour() {
    const { pool, pixels } = this;
    if (!pixels) return;
    const { paletteImage } = this;
    for (let block = 1; block <= pool.numBlocks; block++) pixels[block - 1] = paletteImage[this._paletteIndex(block)];
    this.stale = null; // the whole image
    this.recoloured = performance.now();
    this.redraw();
  }

  // Redraws changed blocks; null: any may have changed. `updated` blocks flash.
  update(blocks, updated = []) {
    if (!blocks) return this.recolour();
    const now = performance.now();
    for (const block of blocks) {
      this.pixels[block - 1] = this.paletteImage[this._paletteIndex(block)];
      this.stale?.push(block);
    }
    if (!reducedMotion.matches)
      for (const block of updated.slice(0, MAX_FLASHES - this.flashes.size)) this.flashes.set(block, now);
    this.redraw();
  }

  mark(blocks, arrow = null) {
    this.marked = blocks;
    this.arrow = arrow;
    this.redraw();
  }

  // -- geometry ------------------------------------------------------------------------------------------------------

  resize() {
    const { canvas, pool } = this;
    const width = canvas.clientWidth;
    const height = parseFloat(getComputedStyle(canvas).maxHeight);
    if (!pool || !width) return;
    const dpr = devicePixelRatio || 1;
    // The largest cell size with which all blocks fit.
    let cell = Math.sqrt((width * height) / pool.numBlocks);
    let columns = Math.max(1, Math.floor(width / cell));
    while (Math.ceil(pool.numBlocks / columns) * (width / columns) > height + 0.01) columns++;
    cell = Math.min(width / columns, height / Math.ceil(pool.numBlocks / columns), 64);
    if (pool.numBlocks * cell < width) columns = pool.numBlocks;
    else columns = Math.max(columns, Math.min(pool.numBlocks, Math.floor(width / cell)));
    this.rows = Math.ceil(pool.numBlocks / columns);
    this.columns = columns = Math.ceil(pool.numBlocks / this.rows); // no row with a few blocks only
    this.fitCell = cell;
    canvas.style.height = `${Math.ceil(this.rows * cell)}px`;
    canvas.width = Math.round(width * dpr);
    canvas.height = Math.round(canvas.clientHeight * dpr);
    this.image.width = columns;
    this.image.height = this.rows;
    this.imageContext = this.image.getContext("2d");
    this.imageData = this.imageContext.createImageData(columns, this.rows);
    this.pixels = new Uint32Array(this.imageData.data.buffer);
    this._clamp();
    this.recolour();
    this._draw(); // at once: resizing clears the canvas
  }

  get cell() {
    return this.fitCell * this.view.zoom;
  }

  _clamp() {
    const { view, canvas } = this;
    const maxZoom = Math.max(1, 48 / this.fitCell);
    view.zoom = Math.min(maxZoom, Math.max(1, view.zoom));
    const spareX = canvas.clientWidth - this.columns * this.cell;
    const spareY = canvas.clientHeight - this.rows * this.cell;
    view.x = spareX > 0 ? 0 : Math.min(0, Math.max(spareX, view.x));
    view.y = spareY > 0 ? 0 : Math.min(0, Math.max(spareY, view.y));
    canvas.classList.toggle("zoomed", view.zoom > 1);
  }

  // Zooms by `factor` around the point (x, y).
  zoom(factor, x = this.canvas.clientWidth / 2, y = this.canvas.clientHeight / 2) {
    const { view } = this;
    const before = view.zoom;
    view.zoom *= factor;
    const maxZoom = Math.max(1, 48 / this.fitCell);
    view.zoom = Math.min(maxZoom, Math.max(1, view.zoom));
    const scale = view.zoom / before;
    view.x = x - (x - view.x) * scale;
    view.y = y - (y - view.y) * scale;
    this._clamp();
    this.redraw();
  }

  fit() {
    this.view = { x: 0, y: 0, zoom: 1 };
    this._clamp();
    this.redraw();
  }

  blockAt(x, y) {
    if (!this.pool) return 0;
    const column = Math.floor((x - this.view.x) / this.cell);
    const row = Math.floor((y - this.view.y) / this.cell);
    const block = row * this.columns + column + 1;
    return column >= 0 && column < this.columns && row >= 0 && block <= this.pool.numBlocks ? block : 0;
  }

  placeOf(block) {
    const index = block - 1;
    const { view, cell, columns } = this;
    return { x: view.x + (index % columns) * cell, y: view.y + Math.floor(index / columns) * cell };
  }

  reveal(block) {
    const { x, y } = this.placeOf(block);
    const { clientWidth: width, clientHeight: height } = this.canvas;
    if (x < 0 || x + this.cell > width) this.view.x += width / 2 - x;
    if (y < 0 || y + this.cell > height) this.view.y += height / 2 - y;
    this._clamp();
    this.redraw();
  }

  // -- drawing -------------------------------------------------------------------------------------------------------

  redraw() {
    this.frame ??= requestAnimationFrame(() => {
      this.frame = null;
      this._draw();
    });
  }

  _draw() {
    if (!this.pool || !this.imageData) return;
    const { context: c, canvas, view, cell } = this;
    const drawn = `${view.x} ${view.y} ${view.zoom}`;
    if (this.stale?.length !== 0 || this.drawn !== drawn) this._drawBase();
    this.drawn = drawn;
    c.setTransform(1, 0, 0, 1, 0, 0);
    c.clearRect(0, 0, canvas.width, canvas.height);
    c.drawImage(this.base, 0, 0);
    const dpr = canvas.width / canvas.clientWidth;
    c.setTransform(dpr, 0, 0, dpr, 0, 0);
    this._drawFlashes();
    this._drawMarks();
    this.numFrames = (this.numFrames ?? 0) + 1;
    if (this.mode === "age" && performance.now() - this.recoloured > RECOLOUR_MS) this.recolour();
    if (this.flashes.size || this.arrow) this.redraw();
  }

  _drawBase() {
    this._updateImage();
    const { base, canvas, view, cell } = this;
    base.width = canvas.width; // also clears it
    base.height = canvas.height;
    const c = base.getContext("2d");
    const dpr = canvas.width / canvas.clientWidth;
    c.setTransform(dpr, 0, 0, dpr, 0, 0);
    if (cell >= DETAIL_PX) this._drawCells(c);
    else {
      c.imageSmoothingEnabled = cell * dpr < 1; // several blocks per pixel are averaged
      c.drawImage(this.image, view.x, view.y, this.columns * cell, this.rows * cell);
    }
  }

  _updateImage() {
    const { stale, imageContext, imageData, columns } = this;
    if (stale === null || stale.length > 400) imageContext.putImageData(imageData, 0, 0);
    else
      for (const block of stale) {
        const index = block - 1;
        imageContext.putImageData(imageData, 0, 0, index % columns, Math.floor(index / columns), 1, 1);
      }
    this.stale = [];
  }

  // The visible blocks.
  *_visible() {
    const { view, cell, columns, rows, canvas, pool } = this;
    const left = Math.max(0, Math.floor(-view.x / cell));
    const right = Math.min(columns, Math.ceil((canvas.clientWidth - view.x) / cell));
    const top = Math.max(0, Math.floor(-view.y / cell));
    const bottom = Math.min(rows, Math.ceil((canvas.clientHeight - view.y) / cell));
    for (let row = top; row < bottom; row++)
      for (let column = left; column < right; column++) {
        const block = row * columns + column + 1;
        if (block <= pool.numBlocks) yield [block, view.x + column * cell, view.y + row * cell];
      }
  }

  _drawCells(c) {
    const { cell } = this;
    const gap = Math.min(6, Math.max(1, cell * 0.11));
    c.lineWidth = 1;
    c.textAlign = "center";
    c.textBaseline = "middle";
    for (const [block, x, y] of this._visible()) this._drawCell(c, block, x + gap / 2, y + gap / 2, cell - gap);
  }

  _drawCell(c, block, x, y, size) {
    const { pool, theme } = this;
    const refs = pool.refs[block];
    const kind = pool.kindOf(block);
    const radius = kind ? size / 2 : Math.min(5, size * 0.14);
    c.beginPath();
    c.roundRect(x, y, size, size, radius);
    if (!refs && !pool.cached[block]) {
      c.strokeStyle = css(theme.line);
      c.stroke();
      if (size >= 26) this._write(c, block, x + size / 2, y + size / 2, this.faint, Math.min(13, Math.max(MIN_LABEL, size * 0.3)), 400);
      return;
    }
    const colour = this.colourOf(block);
    if (!refs && this.mode !== "age") {
      c.fillStyle = kind ? this.keptHatch : this.hatch;
      c.fill();
      c.strokeStyle = css(kind ? theme.state : mix(theme.accent, theme.surface, 0.5));
      c.stroke();
    } else this._fill(c, block, x, y, size, colour);
    if (kind === "checkpoint") drawRing(c, x, y, size);
    if (size < 26) return; // a smaller label cannot be read
    const label = this._label(block, refs, kind);
    const ground = refs || this.mode === "age" ? mix(colour, theme.surface, 0.62) : theme.surface;
    const ink = inkOn(ground);
    const font = Math.min(14, Math.max(MIN_LABEL, Math.min(0.34, 1.4 / String(label).length) * size)); // fits the cell
    if (!refs && this.mode !== "age") this._plate(c, label, x, y, size, font);
    this._write(
      c,
      label,
      x + size / 2,
      y + size / 2,
      refs || this.mode === "age" ? ink : css(theme.ink),
      font,
      600,
    );
    if (refs > 1 && this.mode !== "references" && size >= 30) this._badge(c, `×${refs}`, x + size, y, size);
  }

  // A used block is dark from the left as far as its slots are filled; the pale rest is waste.
  _fill(c, block, x, y, size, colour) {
    const { pool, theme } = this;
    const owners = this.mode === "owner" ? pool.ownersOf(block) : null;
    const share = Math.min(1, pool.filledOf(block) / pool.blockSize);
    c.save();
    c.clip();
    const bands = owners && owners.length > 1 ? owners.slice(0, 4).map((slot) => rgb(ownerColour(slot))) : [colour];
    bands.forEach((band, i) => {
      const height = size / bands.length;
      c.fillStyle = css(mix(band, theme.surface, 0.2));
      c.fillRect(x, y + i * height, size, height + 0.5);
      c.fillStyle = css(mix(band, theme.surface, 0.62));
      c.fillRect(x, y + i * height, size * share, height + 0.5);
    });
    c.restore();
    c.strokeStyle = css(colour);
    c.stroke();
  }

  _label(block, refs, kind) {
    if (this.mode === "references" && refs) return `×${refs}`;
    if (this.mode === "owner" && refs) return this._letters(this.pool.ownersOf(block)) || "?";
    if (this.mode === "group" && !kind) return this.pool.groupName(this.pool.groups[block]).split(":")[0];
    if (this.mode === "age") return shortAge(this.pool.ageOf(block));
    return `${{ state: "s", checkpoint: "c" }[kind] ?? ""}${block}`;
  }

  _letters(owners) {
    return owners.length > 3 ? `${owners.slice(0, 2).map(letter).join("")}…` : owners.map(letter).join("");
  }

  _write(c, label, x, y, colour, size, weight) {
    c.font = `${weight} ${size}px ui-sans-serif, system-ui, sans-serif`;
    c.fillStyle = colour;
    c.fillText(label, x, y + size * 0.05);
  }

  _plate(c, label, x, y, size, font) {
    const { theme } = this;
    const width = String(label).length * font * 0.62 + 5;
    c.fillStyle = css(theme.surface);
    c.beginPath();
    c.roundRect(x + size / 2 - width / 2, y + size / 2 - font * 0.68, width, font * 1.36, 3);
    c.fill();
  }

  _badge(c, label, right, top, size) {
    const { theme } = this;
    const font = Math.min(11, Math.max(MIN_LABEL, size * 0.24));
    const width = label.length * font * 0.6 + 6;
    c.fillStyle = css(theme.ink);
    c.beginPath();
    c.roundRect(right - width + 3, top - 3, width, font + 5, 4);
    c.fill();
    this._write(c, label, right - width / 2 + 3, top + font / 2 - 0.5, css(theme.surface), font, 700);
  }

  _drawFlashes() {
    const { context: c, flashes, cell } = this;
    const now = performance.now();
    const large = cell >= DETAIL_PX;
    c.lineWidth = 2;
    for (const [block, since] of flashes) {
      const left = 1 - (now - since) / FLASH_MS;
      if (left <= 0) {
        flashes.delete(block);
        continue;
      }
      const { x, y } = this.placeOf(block);
      c.globalAlpha = left;
      if (large) {
        c.strokeStyle = css(this.theme.warn);
        c.beginPath();
        c.roundRect(x + 1, y + 1, cell - 2, cell - 2, 5);
        c.stroke();
      } else {
        const size = Math.max(2, cell);
        c.fillStyle = css(this.theme.warn);
        c.fillRect(x, y, size, size);
      }
    }
    c.globalAlpha = 1;
  }

  _drawMarks() {
    const { context: c, cell, theme } = this;
    c.lineWidth = 2.5;
    const ring = (block, colour, dash) => {
      const { x, y } = this.placeOf(block);
      c.setLineDash(dash);
      c.strokeStyle = colour;
      c.beginPath();
      const size = Math.max(cell, 6);
      c.roundRect(x + 0.5, y + 0.5, size - 1, size - 1, Math.min(6, size / 4));
      c.stroke();
      c.setLineDash([]);
    };
    for (const block of this.marked.keys()) ring(block, css(theme.ink), []);
    if (this.picked) ring(this.picked, css(theme.ink), [4, 3]);
    if (this.pointed) ring(this.pointed, css(theme.ink), []);
    if (this.arrow) this._drawArrow(...this.arrow);
  }

  // From a block to its copy.
  _drawArrow(src, dst) {
    const { context: c, cell, theme } = this;
    const a = this.placeOf(src);
    const b = this.placeOf(dst);
    const [x0, y0, x1, y1] = [a.x + cell / 2, a.y + cell / 2, b.x + cell / 2, b.y + cell / 2];
    const bend = 0.22 * Math.hypot(x1 - x0, y1 - y0);
    const [mx, my] = [(x0 + x1) / 2, Math.max(6, (y0 + y1) / 2 - bend)];
    const angle = Math.atan2(y1 - my, x1 - mx);
    const [tipX, tipY] = [x1 - 0.36 * cell * Math.cos(angle), y1 - 0.36 * cell * Math.sin(angle)];
    c.strokeStyle = c.fillStyle = css(theme.warn);
    c.lineWidth = 2.5;
    c.setLineDash(reducedMotion.matches ? [] : [7, 5]);
    c.lineDashOffset = -performance.now() / 30;
    c.beginPath();
    c.moveTo(x0, y0);
    c.quadraticCurveTo(mx, my, tipX, tipY);
    c.stroke();
    c.setLineDash([]);
    c.beginPath();
    c.moveTo(tipX + 8 * Math.cos(angle), tipY + 8 * Math.sin(angle));
    for (const side of [2.5, -2.5]) c.lineTo(tipX + 8 * Math.cos(angle + side), tipY + 8 * Math.sin(angle + side));
    c.fill();
  }

  // -- mouse, touch and keys -----------------------------------------------------------------------------------------

  point(block) {
    if (block === this.pointed) return;
    this.pointed = block;
    this.onPoint(block);
    this.redraw();
  }

  pick(block) {
    this.picked = block;
    this.onPick(block);
    this.redraw();
  }

  _listen() {
    const { canvas } = this;
    const fingers = new Map();
    let moved = 0;
    canvas.addEventListener("pointerdown", (event) => {
      fingers.set(event.pointerId, [event.offsetX, event.offsetY]);
      if (fingers.size === 1) moved = 0;
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointermove", (event) => {
      const { offsetX: x, offsetY: y } = event;
      const before = fingers.get(event.pointerId);
      if (!before) return this.point(this.blockAt(x, y));
      const others = [...fingers].filter(([id]) => id !== event.pointerId);
      fingers.set(event.pointerId, [x, y]);
      moved += Math.abs(x - before[0]) + Math.abs(y - before[1]);
      if (others.length) {
        const [, [ox, oy]] = others[0];
        const factor = Math.hypot(x - ox, y - oy) / Math.max(1, Math.hypot(before[0] - ox, before[1] - oy));
        return this.zoom(factor, (x + ox) / 2, (y + oy) / 2);
      }
      this.view.x += x - before[0];
      this.view.y += y - before[1];
      this._clamp();
      this.redraw();
    });
    const release = (event) => {
      if (fingers.delete(event.pointerId) && event.type === "pointerup" && moved < 6)
        this.pick(this.blockAt(event.offsetX, event.offsetY));
    };
    canvas.addEventListener("pointerup", release);
    canvas.addEventListener("pointercancel", release);
    canvas.addEventListener("pointerleave", () => this.point(0));
    canvas.addEventListener(
      "wheel",
      (event) => {
        // If the whole pool is visible, the wheel scrolls the page; with Ctrl, or when zoomed in, it zooms.
        if (!event.ctrlKey && this.view.zoom === 1 && this.fitCell >= DETAIL_PX) return;
        event.preventDefault();
        this.zoom(Math.exp(-event.deltaY * 0.0022), event.offsetX, event.offsetY);
      },
      { passive: false },
    );
    canvas.addEventListener("keydown", (event) => this._onKey(event));
  }

  _onKey(event) {
    const columns = this.columns;
    const steps = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns };
    if (event.key in steps && this.pool) {
      const block = this.picked ? this.picked + steps[event.key] : 1;
      if (block >= 1 && block <= this.pool.numBlocks) {
        this.pick(block);
        this.reveal(block);
      }
    } else if (event.key === "+" || event.key === "=") this.zoom(1.5);
    else if (event.key === "-") this.zoom(1 / 1.5);
    else if (event.key === "0") this.fit();
    else if (event.key === "Escape") this.pick(0);
    else return;
    event.preventDefault();
    event.stopPropagation();
  }
}

export function shortAge(seconds) {
  if (!Number.isFinite(seconds)) return "–";
  if (seconds < 100) return `${seconds < 10 ? seconds.toFixed(1) : Math.round(seconds)}s`;
  return seconds < 6000 ? `${Math.round(seconds / 60)}m` : `${Math.round(seconds / 3600)}h`;
}
