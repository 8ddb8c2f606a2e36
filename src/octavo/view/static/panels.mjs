// The panels around the grid: block tables, requests, numbers, a block's details, the prefix tree and the log.

import { css, inkOn, letter, mix, ownerColour, rgb, slotOf } from "./colours.mjs";
import { $, count, format, h, percent, renderList, text } from "./dom.mjs";
import { shortAge } from "./grid.mjs";

const MAX_ROWS = 60;
const MAX_CHIPS = 40; // of a table: the first and the last ones
const MAX_NODES = 150;
const MAX_EVENTS = 60;

export function paint(element, slot) {
  const colour = ownerColour(slot);
  element.style.setProperty("--tone", colour);
  element.style.setProperty("--on-tone", inkOn(rgb(colour)));
}

const nameOf = (sequence) => sequence.name ?? letter(sequence.slot);

// -- block tables -----------------------------------------------------------------------------------------------------

function makeRow() {
  const sequence = h("button", { class: "sequence", type: "button" }, h("span", { class: "owner" }));
  sequence.append(h("span", {}, h("span", { class: "name" }), h("small")));
  return h("li", { class: "row" }, sequence, h("div", { class: "chips" }));
}

// The table entries shown as chips, [[i, block], ...]: all, or the first and the last ones with null between them.
function entries(blocks) {
  const all = blocks.map((block, i) => [i, block]);
  if (all.length <= MAX_CHIPS) return all;
  return [...all.slice(0, MAX_CHIPS / 2), null, ...all.slice(-MAX_CHIPS / 2)];
}

export function showTables(pool, list, note, title = (sequence) => shorten(sequence.request)) {
  const all = [...pool.sequences.values()].filter((sequence) => sequence.slot >= 0);
  text(note, all.length > MAX_ROWS ? `the first ${MAX_ROWS} of ${format(all.length)}` : "");
  if (!all.length)
    return void renderList(
      list,
      [0],
      () => "none",
      () => h("li", { class: "row empty" }, "No sequence has blocks."),
    );
  renderList(
    list,
    all.slice(0, MAX_ROWS),
    (sequence) => sequence.uid,
    makeRow,
    (row, sequence) => {
      row.dataset.uid = sequence.uid;
      paint(row, sequence.slot);
      text($(".owner", row), nameOf(sequence));
      text($(".name", row), title(sequence));
      const length = sequence.group ? pool.groupName(sequence.group) : count(sequence.num_tokens, "token");
      text($("small", row), length + (pool.isSwapped(sequence) ? ", swapped out" : ""));
      renderList(
        $(".chips", row),
        entries(sequence.blocks),
        (entry) => entry?.[0] ?? "more",
        makeChip,
        (chip, entry) => {
          if (entry) fillChip(pool, sequence, chip, ...entry);
          else text(chip, `… ${format(sequence.blocks.length - MAX_CHIPS)} more …`);
        },
      );
    },
  );
}

const makeChip = (entry) => (entry ? h("span", { class: "chip" }, "", h("sup")) : h("span", { class: "more" }));

function fillChip(pool, sequence, chip, i, block) {
  const swapped = pool.isSwapped(sequence);
  const refs = swapped || block <= 0 ? 0 : pool.refs[block];
  const filled = pool.filledIn(sequence, i);
  if (swapped && block > 0) delete chip.dataset.block;
  else chip.dataset.block = Math.abs(block);
  chip.firstChild.data = block === 0 ? "–" : swapped && block > 0 ? `h${block}` : String(Math.abs(block));
  const isState = pool.isState(sequence.group);
  const isKept = isState && refs && pool.sealIds[block];
  text(chip.lastChild, `${isKept ? "c" : ""}${refs > 1 ? `×${refs}` : ""}`);
  chip.classList.toggle("round", isState);
  chip.style.setProperty("--full", `${(100 * filled) / pool.blockSize}%`);
  const whole = isKept ? "a checkpoint" : "a state";
  const part = isState ? `part ${i + 1} of ${pool.stateBlocks} of ${whole}` : `entry ${i}, ${filled} of ${pool.blockSize} slots`;
  chip.title = block === 0 ? "dropped: outside the attention window" : part;
}

// -- requests ---------------------------------------------------------------------------------------------------------

const WAIT_TEXTS = {
  blocks: ({ needs, free, evictable, in_windows, in_states }) => {
    const parts = [in_windows && `${in_windows} in windows`, in_states && `${in_states} in its state`].filter(Boolean);
    const ofThem = parts.length ? ` (${parts.join(", ")})` : "";
    return `needs ${count(needs, "block")}${ofThem}: ${free} free, ${evictable} cached`;
  },
  rows: ({ needs, free }) => `needs ${count(needs, "row")}: ${free} left`,
  budget: ({ needs, free }) => `needs ${count(needs, "token")} of the step's token budget: ${free} left`,
  "in flight": ({ needs }) => `${count(needs, "result")} still on the device`,
  "prefix in flight": () => "its next block is being computed by another request",
  "long prefill": () => "another long prompt is in prefill; short prompts go first",
};

// A wait reason as text. The numbers are unknown if the reason was given before the first viewer came.
export const waitText = (waits) =>
  !waits ? "" : waits.needs == null ? `waits: ${waits.reason}` : (WAIT_TEXTS[waits.reason]?.(waits) ?? waits.reason);

export function showQueues(pool, root) {
  for (const status of ["running", "swapped", "waiting"]) {
    const ids = pool.queues[status] ?? [];
    text($(`#num-${status}`, root), format(pool.counts[status] ?? ids.length));
    const requests = ids
      .slice(0, MAX_ROWS)
      .map((id) => pool.requests.get(id))
      .filter(Boolean);
    renderList(
      $(`#${status}`, root),
      requests,
      (request) => request.id,
      makeRequest,
      (item, request) => {
        const sequences = request.sequences.map((uid) => pool.sequences.get(uid)).filter(Boolean);
        const longest = Math.max(0, ...sequences.map((sequence) => sequence.num_tokens));
        const width = request.width > 1 ? ` × ${request.width}` : "";
        const preempted = request.num_preempted ? `, preempted ${request.num_preempted}×` : "";
        const hits = request.num_cached > 0 ? `, ${format(request.num_cached)} cached` : "";
        const badge = $(".owner", item);
        const holder = sequences.find((sequence) => sequence.slot >= 0);
        badge.hidden = !holder;
        if (holder) paint(badge, holder.slot);
        text(badge, holder ? nameOf(holder) : "");
        text($(".name", item), shorten(request.id));
        text($(".length", item), `${format(longest || request.num_prompt)}${width}`);
        text($("small", item), waitText(request.waits) || `prompt of ${format(request.num_prompt)}${hits}${preempted}`);
        item.title = `${request.id} ${waitText(request.waits)}`;
      },
    );
  }
}

function makeRequest() {
  const line = ["owner", "name", "length"].map((name) => h("span", { class: name }));
  return h("li", {}, h("div", {}, ...line), h("small"));
}

// The beginning of an id: chatcmpl-3a66ebe6747a2e2a... -> chatcmpl-3a66ebe6…
const shorten = (id) => (id.length > 20 ? `${id.slice(0, 17)}…` : id);

// -- numbers ----------------------------------------------------------------------------------------------------------

// Numbers of blocks and slots as text: in MiB with `unit` bytes a token, else as they are.
function amounts(pool, unit) {
  const [each, size] = unit ? [unit / 2 ** 20, pool.blockSize] : [1, 1];
  const slots = (n) => format(n * each);
  const blocks = (n) => slots(n * size);
  return {
    mark: unit ? " MiB" : "",
    slots,
    blocks,
    countBlocks: (n) => (unit ? `${blocks(n)} MiB` : count(n, "block")),
    countSlots: (n) => (unit ? `${slots(n)} MiB empty` : count(n, "empty slot")),
  };
}

export function showNumbers(pool, root, bar, compare, unit = 0) {
  const { stats } = pool;
  const as = amounts(pool, unit);
  const slots = stats.num_used * pool.blockSize;
  const unshared = stats.num_used + stats.num_saved_by_sharing;
  // An attached server has only some of them.
  const row = (name, stat, value = format) => stat in stats && [name, value(stats[stat])];
  const rows = [
    row("used", "num_used", (n) => `${as.blocks(n)} of ${as.blocks(pool.numBlocks)}${as.mark}`),
    row("cached", "num_cached", (n) => as.blocks(n) + as.mark),
    row("free", "num_free", (n) => as.blocks(n) + as.mark),
    row("saved by sharing", "num_saved_by_sharing", (n) =>
      unshared ? `${as.blocks(n)} of ${as.blocks(unshared)}${as.mark}` : "0",
    ),
    row("unfilled slots", "num_unfilled_slots", (n) => `${as.slots(n)}${as.mark} (${percent(n, slots)})`),
    row("prefix cache hits", "num_hits", (n) => `${format(n)} (${percent(n, n + stats.num_misses)})`),
    row("evicted", "num_evicted"),
    row("copied on write", "num_copied"),
  ].filter(Boolean);
  if (stats.num_host_blocks)
    rows.push(["host blocks", `${format(stats.num_host_used)} of ${format(stats.num_host_blocks)}`]);
  if (compare) rows.push(["without sharing", as.blocks(compare.unshared_blocks) + as.mark]);
  renderList(
    root,
    rows,
    ([name]) => name,
    ([name]) => h("div", {}, h("dt", {}, name), h("dd")),
    (row, [, value]) => {
      text(row.lastChild, value);
    },
  );
  bar.children[0].style.setProperty("--share", `${(100 * stats.num_used) / pool.numBlocks}%`);
  bar.children[1].style.setProperty("--share", `${(100 * stats.num_cached) / pool.numBlocks}%`);
}

// -- tensor parallel ranks --------------------------------------------------------------------------------------------

// One rank is none.
export function showRanks(ranks, section, rows) {
  section.hidden = !ranks.length;
  renderList(
    rows,
    ranks.map((place, rank) => ({ rank, ...place })),
    (place) => place.rank,
    () => h("tr", {}, h("th", { scope: "row" }), h("td"), h("td"), h("td")),
    (row, place) => {
      row.className = place.is_behind ? "behind" : "";
      const age = place.age_s < 1 ? "now" : `${shortAge(place.age_s)} ago`;
      const name = `${place.rank}${place.is_behind ? " behind" : ""}`;
      for (const [i, cell] of [name, format(place.plan), format(place.collective), age].entries())
        text(row.children[i], cell);
    },
  );
}

// -- one block --------------------------------------------------------------------------------------------------------

export function describeBlock(pool, block) {
  const state = pool.stateOf(block);
  const owners = ownersOf(pool, block).join(", ");
  const held = state === "used" ? `, ${count(pool.refs[block], "reference")}, ${owners}` : "";
  const group = pool.groupOf(block);
  return `Block ${block}: ${state}${held}${group && `, group ${group}`}${pool.kindOf(block) === "checkpoint" ? ", checkpoint" : ""}`;
}

// The names of a block's owners. If only a key's own requests are shown, a used block without owner is another key's.
function ownersOf(pool, block) {
  const names = pool.ownersOf(block).map((slot) => nameOf(pool.slots[slot]));
  return !names.length && pool.onlyOwn && pool.refs[block] ? ["another tenant"] : names;
}

export function showBlock(pool, block, root, { tokens = null, details = null } = {}) {
  if (!block || block > pool.numBlocks) {
    // Without a block the card is folded; after the first one it keeps its height.
    if (!$(".empty", root)) root.replaceChildren(h("p", { class: "note" }, "Point at a block or select one."));
    return;
  }
  const owners = pool.ownersOf(block).map((slot) => pool.slots[slot]);
  const sequence = owners[0];
  const age = pool.ageOf(block);
  const index = sequence ? pool.entry[block] : -1;
  const [start, filled] = [index * pool.blockSize, pool.filledOf(block)];
  const positions = index < 0 || !filled ? "–" : `${start} to ${start + filled - 1}`;
  const facts = [
    ["block", block],
    ["state", pool.stateOf(block)],
    ["references", pool.refs[block]],
    ...(pool.kindOf(block)
      ? factsOfState(pool, block, sequence)
      : [
          ["filled slots", `${filled} of ${pool.blockSize}`],
          ["positions", positions],
        ]),
    ["owners", ownersOf(pool, block).join(" ") || "–"],
    ...(pool.hasGroups ? [["group", pool.groupOf(block) || "–"]] : []),
    ["seal", pool.cached[block] ? pool.sealIds[block] || "yes" : "–"],
    [pool.groups[block] ? "found by" : "follows", pool.cached[block] && pool.parentIds[block] ? `seal ${pool.parentIds[block]}` : "–"],
    ["changed", Number.isFinite(age) ? `${pool.ageUnit ? count(age, pool.ageUnit) : shortAge(age)} ago` : "before"],
  ];
  if (details?.name) facts.push(["digest", details.name.slice(0, 16)]);
  const content = details?.text ?? (tokens && sequence ? tokensIn(pool, sequence, index, tokens) : null);
  root.replaceChildren(
    h(
      "dl",
      { class: "numbers" },
      ...facts.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, String(value)))),
    ),
    ...(content ? [h("p", { id: "tokens" }, content)] : []),
  );
}

// A state's block has no slots: it is a part of what came of all tokens so far. A checkpoint is found by the full block
// where they end.
function factsOfState(pool, block, sequence) {
  const kept = pool.checkpointOf(block);
  const num = kept ? kept.full && pool.tokensUpTo(kept.full) : sequence?.num_computed;
  return [
    ["part", kept || sequence ? `${(kept?.part ?? pool.entry[block]) + 1} of ${pool.stateBlocks}` : "–"],
    ["checkpoint", kept ? `after ${kept.full ? `block ${kept.full}` : "a block"}` : "no"],
    ["after", num ? count(num, "token") : "–"],
  ];
}

function tokensIn(pool, sequence, index, tokens) {
  const start = index * pool.blockSize;
  return (tokens[sequence.uid] ?? []).slice(start, start + pool.filledIn(sequence, index)).join(" ");
}

// -- the prefix tree --------------------------------------------------------------------------------------------------

export function showTree(pool, root) {
  const roots = pool.tree();
  const left = { nodes: MAX_NODES };
  const message = !roots ? "Too many blocks to draw as a tree." : roots.length ? "" : "No sealed block yet.";
  root.replaceChildren(message ? h("p", { class: roots ? "note empty" : "note" }, message) : branch(pool, roots, left));
  if (left.nodes < 0) root.append(h("p", { class: "note" }, `The first ${MAX_NODES} branches.`));
}

// A chain of blocks without branches is one line.
function branch(pool, nodes, left) {
  const list = h("ul");
  for (const first of nodes) {
    if (left.nodes-- <= 0) break;
    const run = [first];
    while (run.at(-1).children.length === 1) run.push(run.at(-1).children[0]);
    const blocks = run.map((node) => node.block);
    const shown = blocks.length > 6 ? [...blocks.slice(0, 3), 0, ...blocks.slice(-2)] : blocks;
    const item = h("li", { class: "chips" });
    for (const block of shown)
      if (!block) item.append(h("span", { class: "more" }, `… ${blocks.length - 5} …`));
      else {
        const cached = !pool.refs[block];
        const chip = h("span", { class: cached ? "chip cached" : "chip", "data-block": block }, String(block));
        if (cached) chip.title = "cached: no references, can be found";
        else if (pool.owner[block] >= 0) paint(chip, pool.owner[block]);
        if (run.find((node) => node.block === block).isKept) {
          chip.append(h("sup", {}, "c"));
          chip.title = `${chip.title && `${chip.title}; `}a checkpoint of the state after it is kept`;
        }
        item.append(chip);
      }
    const rest = run.at(-1).children;
    list.append(
      rest.length ? h("li", {}, h("div", { class: "chips" }, ...item.childNodes), branch(pool, rest, left)) : item,
    );
  }
  return list;
}

// -- the log ----------------------------------------------------------------------------------------------------------

const EVENT_TEXTS = {
  arrived: (e) => `${e.request_id} arrived: prompt of ${count(e.num_prompt_tokens, "token")}`,
  admitted: (e) =>
    `${e.request_id} admitted: ${format(e.num_cached_tokens)} of ${format(e.num_tokens)} tokens cached`,
  waiting: (e) => `${e.request_id} waits: ${waitText(e)}`,
  preempted: (e) =>
    `${e.request_id} preempted for ${e.for_request}, by ${e.how} (${e.why}): ` +
    `${count(e.needs, "block")} needed, ${e.free} free, ${e.evictable} cached`,
  swappedin: (e) =>
    `${e.request_id} swapped in: ${count(e.num_copied, "block")} copied, ${e.num_kept} still on the device`,
  swaplost: (e) => `${e.request_id} lost a block while swapped out and is recomputed`,
  pinned: (e) => `${e.request_id} pinned: ${count(e.num_blocks, "block")}`,
  unpinned: (e) => `${e.request_id} unpinned`,
  recomputed: (e) => `a step failed; ${e.request_id} is recomputed`,
  finished: (e) => `${e.request_id} finished (${e.reason}) at ${count(e.num_tokens, "token")}`,
  copied: (e) =>
    e.more === undefined
      ? `shared block ${e.src} copied to ${e.dst} before a write`
      : `state copied before a write: block ${e.src} to ${e.dst}${e.more ? `, and ${e.more} more` : ""}`,
  evicted: (e) => `block ${e.block_id} evicted from the prefix cache`,
};

export function showLog(pool, list) {
  const latest = pool.events.slice(-MAX_EVENTS).reverse();
  for (const event of latest) event.key ??= showLog.next = (showLog.next ?? 0) + 1;
  renderList(
    list,
    latest,
    (event) => event.key,
    (event) => {
      const urgent = event.event === "preempted" || event.event === "swaplost" || event.event === "recomputed";
      const names = { ...event };
      for (const name of ["request_id", "for_request"]) if (event[name]) names[name] = shorten(event[name]);
      const line = EVENT_TEXTS[event.event]?.(names) ?? event.event;
      return h("li", { class: urgent ? "urgent" : "" }, h("small", {}, `${event.time_s.toFixed(1)} s `), line);
    },
  );
}

// -- contiguous reservation -------------------------------------------------------------------------------------------

// The same memory with contiguous reservation: one row of slots, drawn in cells like the pool.
export function showPieces(pool, canvas, list, grid, { contiguous, compare }, unit = 0) {
  const c = canvas.getContext("2d");
  const width = canvas.clientWidth;
  const height = parseFloat(getComputedStyle(canvas).maxHeight);
  if (!width) return;
  const numCells = Math.ceil(contiguous.num_slots / pool.blockSize);
  let columns = Math.min(numCells, Math.max(1, Math.floor(Math.sqrt((numCells * width) / height))));
  while (Math.ceil(numCells / columns) * Math.min(width / columns, 32) > height) columns++;
  const perPiece = contiguous.max_len / pool.blockSize; // cells; rows end with a reservation, if possible
  if (Number.isInteger(perPiece) && perPiece <= numCells) columns = Math.ceil(columns / perPiece) * perPiece;
  const numRows = Math.ceil(numCells / columns);
  const cell = Math.min(width / columns, height / numRows, 32);
  canvas.style.height = `${Math.ceil(numRows * cell)}px`;
  const dpr = devicePixelRatio || 1;
  canvas.width = Math.round(width * dpr);
  canvas.height = Math.round(canvas.clientHeight * dpr);
  c.scale(dpr, dpr);
  const gap = Math.min(4, cell * 0.12);
  const { theme } = grid;
  const each = (start, stop, draw) => {
    for (let i = Math.floor(start / pool.blockSize); i * pool.blockSize < stop; i++)
      draw((i % columns) * cell + gap / 2, Math.floor(i / columns) * cell + gap / 2, cell - gap, i * pool.blockSize);
  };
  each(0, contiguous.num_slots, (x, y, size) => {
    c.strokeStyle = css(theme.line);
    c.strokeRect(x, y, size, size);
  });
  contiguous.pieces.forEach((piece) => {
    const colour = rgb(ownerColour(slotOf(piece.name)));
    each(piece.start, piece.start + piece.reserved, (x, y, size, from) => {
      const share = Math.min(1, Math.max(0, (piece.start + piece.filled - from) / pool.blockSize));
      c.fillStyle = grid.wasted;
      c.fillRect(x, y, size, size);
      c.fillStyle = css(mix(colour, theme.surface, 0.62));
      c.fillRect(x, y, size * share, size);
      c.strokeStyle = css(colour);
      c.strokeRect(x, y, size, size);
      if (from > piece.start || size < 12) return;
      c.font = `700 ${Math.min(13, size * 0.6)}px ui-sans-serif, system-ui, sans-serif`;
      c.textAlign = "center";
      c.textBaseline = "middle";
      c.fillStyle = inkOn(mix(colour, theme.surface, 0.62));
      c.fillText(piece.name, x + size / 2, y + size / 2 + 0.5);
    });
  });
  const { paged_blocks: paged, contiguous_blocks: reserved } = compare;
  const as = amounts(pool, unit);
  const facts = [
    ["reserved", `${as.countBlocks(reserved)}, ${as.countSlots(compare.contiguous_waste_slots)}`],
    ["in blocks", `${as.countBlocks(paged)}, ${as.countSlots(compare.paged_waste_slots)}`],
  ];
  if (contiguous.refused.length) facts.push(["no room for", contiguous.refused.join(" ")]);
  renderList(
    list,
    facts,
    ([name]) => name,
    ([name]) => h("li", {}, `${name} `, h("b")),
    (item, [, value]) => {
      text(item.lastChild, value);
    },
  );
}
