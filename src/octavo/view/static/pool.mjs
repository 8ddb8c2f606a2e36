// The picture of the pool that the server tells of: a snapshot, kept up to date with deltas (PROTOCOL.md).

import { slotOf } from "./colours.mjs";

const SEALED = 0x8000;
const MOST_STEPS = 2000;
const MOST_EVENTS = 200;
const MOST_INDEXED = 50_000; // table entries up to which each block's owners are all known; else the last one is

const NOBODY = { add() {} }; // is told of a change

function bytes(base64 = "") {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(base64);
  const string = atob(base64);
  const array = new Uint8Array(string.length);
  for (let i = 0; i < array.length; i++) array[i] = string.charCodeAt(i);
  return array;
}

const u16 = (base64) => new Uint16Array(bytes(base64).buffer);
const u32 = (base64) => new Uint32Array(bytes(base64).buffer);
const i32 = (base64) => new Int32Array(bytes(base64).buffer);
const f64 = (base64) => new Float64Array(bytes(base64).buffer);

// A delta does not follow what is known: take a new snapshot.
export class OutOfStep extends Error {}

export class Pool {
  // `names` (uid -> name) are the playground's; elsewhere a sequence is called after the letter that it is given.
  constructor(snapshot, names = null) {
    const { num_blocks: n } = snapshot;
    this.numBlocks = n;
    this.blockSize = snapshot.block_size;
    this.numHostBlocks = snapshot.num_host_blocks;
    this.refs = new Uint16Array(n + 1);
    this.cached = new Uint8Array(n + 1); // sealed, whether or not in use
    this.owner = new Int32Array(n + 1).fill(-1); // slot of a sequence that has it
    this.entry = new Int32Array(n + 1); // and where in its table
    this.changed = new Float64Array(n + 1); // when, in the picture's time
    this.sealIds = new Float64Array(n + 1);
    this.parentIds = new Float64Array(n + 1);
    this.replace(snapshot, names);
    this.changed.fill(-Infinity); // not seen by us
  }

  // Takes over a snapshot of a pool of the same size. Returns the blocks that look different now, null if too many.
  replace(snapshot, names = null) {
    this.names = names;
    this.news = [];
    if (this.epoch !== snapshot.epoch || this.time_s > snapshot.time_s) {
      this.steps = [];
      this.events = [];
      this.changed.fill(-Infinity);
    }
    this.epoch = snapshot.epoch;
    this.frame = snapshot.frame;
    this._setTime(snapshot);
    const isFirst = !this.sequences;
    const touched = isFirst || this.numBlocks > MOST_INDEXED ? NOBODY : new Set();
    this.owner.fill(-1);
    this.sequences = new Map();
    this.requests = new Map();
    this.slots = [];
    this.stats = snapshot.stats;
    this.counts = snapshot.counts;
    const words = u16(snapshot.words);
    for (let i = 0; i < words.length; i++) if (words[i] !== this._word(i + 1)) this._setWord(i + 1, words[i], touched);
    this.sealIds.fill(0);
    this._setSeals(snapshot.seals);
    this._take(snapshot, touched);
    this.lines = { running: [], swapped: [], waiting: [], pinned: [] };
    for (const request of snapshot.requests) this.lines[request.status].push(request.id);
    // It tells the last steps and events again, some of which we may have.
    const [step, at] = [this.steps.at(-1)?.step ?? -1, this.events.at(-1)?.time_s ?? -Infinity];
    const { steps = [], events = [] } = snapshot;
    this._log({ steps: steps.filter(([each]) => each > step), events: events.filter((each) => each.time_s > at) });
    this.version = (this.version ?? 0) + 1;
    return touched === NOBODY ? null : touched;
  }

  // Returns the blocks that look different now. Throws `OutOfStep`.
  apply(delta) {
    if (delta.epoch !== this.epoch || delta.frame !== this.frame + 1) throw new OutOfStep();
    this.frame = delta.frame;
    this.news = []; // blocks that were taken, shared, released or sealed, and not only filled
    this._setTime(delta);
    const touched = new Set();
    for (const uid of delta.gone_sequences ?? []) this._forget(uid, touched);
    for (const id of delta.gone ?? []) {
      for (const uid of this.requests.get(id)?.sequences ?? []) this._forget(uid, touched);
      this.requests.delete(id);
    }
    if (delta.blocks) {
      const ids = u32(delta.blocks.ids);
      const words = u16(delta.blocks.words);
      ids.forEach((block, i) => this._setWord(block, words[i], touched));
    }
    if (delta.seals) this._setSeals(delta.seals);
    this._take(delta, touched);
    for (const { uid, start, block_ids } of delta.tables ?? []) {
      const sequence = this.sequences.get(uid);
      this._disown(sequence, start, touched);
      sequence.blocks = sequence.blocks.slice(0, start).concat([...i32(block_ids)]);
      this._own(sequence, start, touched);
    }
    this._advance(delta.progress, touched);
    this._adopt(touched);
    Object.assign(this.lines, delta.lines);
    Object.assign(this.stats, delta.stats);
    if (delta.counts) this.counts = delta.counts;
    this._log(delta);
    this.version++;
    return touched;
  }

  _setTime({ time_s, step }) {
    this.time_s = time_s;
    this.step = step;
    this.received = performance.now();
  }

  _word(block) {
    return this.refs[block] | (this.cached[block] ? SEALED : 0);
  }

  _setWord(block, word, touched) {
    this.refs[block] = word & ~SEALED;
    this.cached[block] = word & SEALED ? 1 : 0;
    if (!(word & SEALED)) this.sealIds[block] = 0;
    this.changed[block] = this.time_s;
    if (touched !== NOBODY) this.news.push(block);
    touched.add(block);
  }

  _setSeals(seals) {
    if (!seals) return;
    const [ids, own, parents] = [u32(seals.block_ids), f64(seals.seal_ids), f64(seals.parent_ids)];
    ids.forEach((block, i) => {
      this.sealIds[block] = own[i];
      this.parentIds[block] = parents[i];
    });
  }

  // New and changed requests, and new sequences. Those that are swapped out own nothing: their tables hold other ids,
  // and are told anew when they go and when they come.
  _take({ requests = [], sequences = [] }, touched) {
    for (const told of sequences) {
      const sequence = { ...told, blocks: [...i32(told.block_ids)], request: null, slot: -1 };
      sequence.name = this.names?.[told.uid] ?? null;
      this.sequences.set(told.uid, sequence);
      if (sequence.name) this._giveSlot(sequence);
    }
    for (const request of requests) {
      this.requests.set(request.id, request);
      for (const uid of request.sequences) {
        const sequence = this.sequences.get(uid);
        if (!sequence || sequence.request) continue;
        sequence.request = request.id;
        this._own(sequence, 0, touched);
      }
    }
  }

  // Its place among those that have blocks: a colour and a letter. A name of its own says which.
  _giveSlot(sequence) {
    const free = this.slots.findIndex((each) => !each);
    sequence.slot = sequence.name ? slotOf(sequence.name) : free < 0 ? this.slots.length : free;
    this.slots[sequence.slot] = sequence;
  }

  isSwapped(sequence) {
    return this.requests.get(sequence.request)?.status === "swapped";
  }

  _own(sequence, start, touched) {
    if (this.isSwapped(sequence)) return;
    if (sequence.slot < 0 && sequence.blocks.length) this._giveSlot(sequence);
    for (let i = start; i < sequence.blocks.length; i++) {
      const block = sequence.blocks[i];
      if (block <= 0) continue;
      this.owner[block] = sequence.slot;
      this.entry[block] = i;
      touched.add(block);
    }
  }

  _disown(sequence, start, touched) {
    this.orphans ??= new Set();
    for (let i = start; i < sequence.blocks.length; i++) {
      const block = sequence.blocks[i];
      if (block > 0 && this.owner[block] === sequence.slot) {
        this.owner[block] = -1;
        this.orphans.add(block);
        touched.add(block);
      }
    }
  }

  // Blocks that lost the owner we knew, and are in use: somebody else has them too.
  _adopt(touched) {
    const { orphans } = this;
    this.orphans = null;
    for (const block of orphans ?? []) if (!this.refs[block] || this.owner[block] >= 0) orphans.delete(block);
    if (!orphans?.size) return;
    for (const sequence of this.sequences.values())
      if (sequence.blocks.some((block) => orphans.has(block))) this._own(sequence, 0, touched);
  }

  _forget(uid, touched) {
    const sequence = this.sequences.get(uid);
    if (!sequence) return;
    this._disown(sequence, 0, touched);
    this.sequences.delete(uid);
    if (sequence.slot >= 0) this.slots[sequence.slot] = undefined;
  }

  _advance(progress, touched) {
    if (!progress) return;
    const [uids, known, computed] = [u32(progress.uids), u32(progress.num_tokens), u32(progress.num_computed)];
    uids.forEach((uid, i) => {
      const sequence = this.sequences.get(uid);
      if (!sequence) return;
      sequence.num_tokens = known[i];
      sequence.num_computed = computed[i];
      const tail = sequence.blocks.at(-1);
      if (tail > 0 && !this.isSwapped(sequence)) touched.add(tail);
    });
  }

  _log({ steps = [], events = [] }) {
    for (const [step, time_s, num_tokens, num_sampled, running, waiting, swapped, used, cached, free] of steps) {
      const decode = Math.min(num_sampled, num_tokens);
      const at = { step, time_s, prefill: num_tokens - decode, decode, running, waiting, swapped, used, cached, free };
      this.steps.push({ ...at, num_blocks: this.numBlocks, numPreempted: 0, numSwaps: 0 });
    }
    for (const event of events) {
      this.events.push(event);
      const swaps = event.event === "swappedin" || event.how === "swap";
      if (!swaps && event.event !== "preempted") continue;
      const step = this.steps.findLast((each) => each.time_s <= event.time_s) ?? this.steps.at(-1);
      if (step) step[swaps ? "numSwaps" : "numPreempted"]++;
    }
    if (this.steps.length > MOST_STEPS) this.steps.splice(0, this.steps.length - MOST_STEPS);
    if (this.events.length > MOST_EVENTS) this.events.splice(0, this.events.length - MOST_EVENTS);
  }

  // -- questions -----------------------------------------------------------------------------------------------------

  ageOf(block) {
    return Math.max(0, this.time_s - this.changed[block]);
  }

  filledIn(sequence, i) {
    return Math.min(Math.max(sequence.num_computed - i * this.blockSize, 0), this.blockSize);
  }

  filledOf(block) {
    const sequence = this.slots[this.owner[block]];
    if (this.cached[block] || !sequence) return this.cached[block] || this.refs[block] ? this.blockSize : 0;
    return this.filledIn(sequence, this.entry[block]);
  }

  stateOf(block) {
    if (this.refs[block]) return "used";
    return this.cached[block] ? "cached" : "free";
  }

  // Slots of the sequences that have it.
  ownersOf(block) {
    if (this.indexed !== this.version) {
      this.indexed = this.version;
      const owners = [...this.sequences.values()].filter((sequence) => !this.isSwapped(sequence));
      const size = owners.reduce((sum, sequence) => sum + sequence.blocks.length, 0);
      this.index = size > MOST_INDEXED ? null : new Map();
      if (this.index)
        for (const { blocks, slot } of owners)
          for (const each of blocks) if (each > 0) this.index.set(each, [...(this.index.get(each) ?? []), slot]);
    }
    return this.index?.get(block) ?? (this.owner[block] < 0 ? [] : [this.owner[block]]);
  }

  // The prefix tree, [{ block, children }]: a block's children continue its content. null: too large to draw.
  tree(most = 20_000) {
    const nodes = new Map();
    for (let block = 1; block <= this.numBlocks; block++) {
      if (!this.sealIds[block]) continue;
      if (nodes.size === most) return null;
      nodes.set(this.sealIds[block], { block, children: [] });
    }
    const roots = [];
    for (const node of nodes.values()) (nodes.get(this.parentIds[node.block])?.children ?? roots).push(node);
    return roots;
  }

  // Everything there is to know, as a test compares it with the real pool.
  summary() {
    const blocks = Array.from({ length: this.numBlocks }, (_, i) => i + 1);
    const row = (id, { num_tokens, num_computed, blocks }) => [id, num_tokens, num_computed, blocks];
    const tables = [...this.requests].flatMap(([id, { sequences }]) =>
      sequences.map((uid) => row(id, this.sequences.get(uid))),
    );
    return {
      refs: blocks.map((block) => this.refs[block]),
      states: blocks.map((block) => this.stateOf(block)),
      seals: blocks.map((block) => this.sealIds[block]),
      owners: blocks.map((block) => this.ownersOf(block).length),
      owned: blocks.map((block) => this.owner[block] >= 0),
      filled: blocks.map((block) => this.filledOf(block)),
      tables,
      numTables: this.sequences.size,
      lines: this.lines,
      stats: this.stats,
    };
  }
}
