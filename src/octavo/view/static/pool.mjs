// The state of a pool: a snapshot, updated with deltas (PROTOCOL.md).

import { slotOf } from "./colours.mjs";

const SEALED = 0x8000;
const MAX_STEPS = 2000;
const MAX_EVENTS = 200;
const MAX_INDEXED = 50_000; // table entries for which all owners of a block are indexed; beyond, only the last is known

const IGNORE = { add() {} }; // stands for a set of changed blocks that is not needed

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

// A delta does not follow the last frame: a new snapshot is needed.
export class FrameLost extends Error {}

export class Pool {
  // `names` (uid -> name) come from the playground; elsewhere a sequence gets a letter.
  constructor(snapshot, names = null) {
    const { num_blocks: n } = snapshot;
    this.numBlocks = n;
    this.blockSize = snapshot.block_size;
    this.numHostBlocks = snapshot.num_host_blocks;
    this.refs = new Uint16Array(n + 1);
    this.cached = new Uint8Array(n + 1); // 1 if sealed, in use or not
    this.owner = new Int32Array(n + 1).fill(-1); // slot of a sequence that has the block
    this.entry = new Int32Array(n + 1); // the block's index in that sequence's table
    this.changed = new Float64Array(n + 1); // time of the last change, in the state's time
    this.sealIds = new Float64Array(n + 1);
    this.parentIds = new Float64Array(n + 1);
    this.groups = new Uint8Array(n + 1); // of layers; 0: the full one, then those with windows, then states
    this.replace(snapshot, names);
    this.changed.fill(-Infinity); // before the first frame
  }

  // Replaces the state by a snapshot of a pool of the same size. Returns the blocks that changed; null: too many.
  replace(snapshot, names = null) {
    this.names = names;
    this.updated = [];
    if (this.epoch !== snapshot.epoch || this.time_s > snapshot.time_s) {
      this.steps = [];
      this.events = [];
      this.changed.fill(-Infinity);
    }
    this.epoch = snapshot.epoch;
    this.frame = snapshot.frame;
    this._setTime(snapshot);
    const isFirst = !this.sequences;
    const touched = isFirst || this.numBlocks > MAX_INDEXED ? IGNORE : new Set();
    this.owner.fill(-1);
    this.windows = snapshot.windows ?? []; // in tokens, of each window group
    this.stateBlocks = snapshot.state_blocks ?? 0; // of a sequence's state
    this.sequences = new Map();
    this.requests = new Map();
    this.slots = [];
    this.stats = snapshot.stats;
    this.counts = snapshot.counts;
    const words = u16(snapshot.words);
    for (let i = 0; i < words.length; i++) if (words[i] !== this._word(i + 1)) this._setWord(i + 1, words[i], touched);
    this.sealIds.fill(0);
    this._setSeals(snapshot.seals);
    this._addSequences(snapshot, touched);
    this.queues = { running: [], swapped: [], waiting: [], pinned: [] };
    for (const request of snapshot.requests) this.queues[request.status].push(request.id);
    // A snapshot repeats the last steps and events, some of which may be known.
    const [lastStep, last_s] = [this.steps.at(-1)?.step ?? -1, this.events.at(-1)?.time_s ?? -Infinity];
    const { steps = [], events = [] } = snapshot;
    this._log({
      steps: steps.filter(([step]) => step > lastStep),
      events: events.filter((event) => event.time_s > last_s),
    });
    this.version = (this.version ?? 0) + 1;
    return touched === IGNORE ? null : touched;
  }

  // Applies a delta. Returns the blocks that look different. Throws `FrameLost`.
  apply(delta) {
    if (delta.epoch !== this.epoch || delta.frame !== this.frame + 1) throw new FrameLost();
    this.frame = delta.frame;
    this.updated = []; // blocks that were allocated, shared, released or sealed; not those that were only filled
    this._setTime(delta);
    const touched = new Set();
    for (const uid of delta.gone_sequences ?? []) this._removeSequence(uid, touched);
    for (const id of delta.gone ?? []) {
      for (const uid of this.requests.get(id)?.sequences ?? []) this._removeSequence(uid, touched);
      this.requests.delete(id);
    }
    if (delta.blocks) {
      const ids = u32(delta.blocks.ids);
      const words = u16(delta.blocks.words);
      ids.forEach((block, i) => this._setWord(block, words[i], touched));
    }
    if (delta.seals) this._setSeals(delta.seals);
    this._addSequences(delta, touched);
    for (const { uid, start, block_ids } of delta.tables ?? []) {
      const sequence = this.sequences.get(uid);
      this._removeOwner(sequence, start, touched);
      sequence.blocks = sequence.blocks.slice(0, start).concat([...i32(block_ids)]);
      this._addOwner(sequence, start, touched);
    }
    this._updateProgress(delta.progress, touched);
    this._reassignOrphans(touched);
    Object.assign(this.queues, delta.lines);
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
    if (touched !== IGNORE) this.updated.push(block);
    touched.add(block);
  }

  _setSeals(seals) {
    if (!seals) return;
    const [ids, sealIds, parentIds] = [u32(seals.block_ids), f64(seals.seal_ids), f64(seals.parent_ids)];
    const groups = bytes(seals.groups);
    ids.forEach((block, i) => {
      this.groups[block] = groups[i] ?? 0;
      this.sealIds[block] = sealIds[i];
      this.parentIds[block] = parentIds[i];
    });
  }

  // New and changed requests, and new sequences. Swapped sequences own no blocks: their tables hold host ids, and are
  // sent again at each swap.
  _addSequences({ requests = [], sequences = [] }, touched) {
    for (const view of sequences) {
      const sequence = { ...view, blocks: [...i32(view.block_ids)], request: null, slot: -1 };
      sequence.name = this.names?.[view.uid] ?? null;
      this.sequences.set(view.uid, sequence);
      if (sequence.name) this._giveSlot(sequence);
    }
    for (const request of requests) {
      this.requests.set(request.id, request);
      let main;
      for (const uid of request.sequences) {
        const sequence = this.sequences.get(uid);
        if (!sequence?.group) main = sequence;
        if (!sequence || sequence.request) continue;
        sequence.main = main;
        sequence.request = request.id;
        this._addOwner(sequence, 0, touched);
      }
    }
  }

  // Assigns a slot, which gives the sequence a colour and a letter. A sequence with a name gets the slot of its name, and
  // a lane that of its sequence.
  _giveSlot(sequence) {
    if (sequence.group) return void (sequence.slot = sequence.main.slot);
    const free = this.slots.findIndex((slot) => !slot);
    sequence.slot = sequence.name ? slotOf(sequence.name) : free < 0 ? this.slots.length : free;
    this.slots[sequence.slot] = sequence;
  }

  isSwapped(sequence) {
    return this.requests.get(sequence.request)?.status === "swapped";
  }

  _addOwner(sequence, start, touched) {
    if (this.isSwapped(sequence)) return;
    if (sequence.slot < 0 && sequence.blocks.length) this._giveSlot(sequence);
    for (let i = start; i < sequence.blocks.length; i++) {
      const block = sequence.blocks[i];
      if (block <= 0) continue;
      this.owner[block] = sequence.slot;
      this.entry[block] = i;
      this.groups[block] = sequence.group ?? 0;
      touched.add(block);
    }
  }

  _removeOwner(sequence, start, touched) {
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

  // Finds another owner for blocks that lost theirs but are still in use.
  _reassignOrphans(touched) {
    const { orphans } = this;
    this.orphans = null;
    for (const block of orphans ?? []) if (!this.refs[block] || this.owner[block] >= 0) orphans.delete(block);
    if (!orphans?.size) return;
    for (const sequence of this.sequences.values())
      if (sequence.blocks.some((block) => orphans.has(block))) this._addOwner(sequence, 0, touched);
  }

  _removeSequence(uid, touched) {
    const sequence = this.sequences.get(uid);
    if (!sequence) return;
    this._removeOwner(sequence, 0, touched);
    this.sequences.delete(uid);
    if (sequence.slot >= 0 && !sequence.group) this.slots[sequence.slot] = undefined;
  }

  _updateProgress(progress, touched) {
    if (!progress) return;
    const [uids, numTokens, numComputed] = [u32(progress.uids), u32(progress.num_tokens), u32(progress.num_computed)];
    uids.forEach((uid, i) => {
      const sequence = this.sequences.get(uid);
      if (!sequence) return;
      sequence.num_tokens = numTokens[i];
      sequence.num_computed = numComputed[i];
      const tail = sequence.blocks.at(-1);
      if (tail > 0 && !this.isSwapped(sequence)) touched.add(tail);
    });
  }

  _log({ steps = [], events = [] }) {
    for (const [step, time_s, num_tokens, num_sampled, running, waiting, swapped, used, ...rest] of steps) {
      const [cached, free, accepted] = rest; // the last one only with speculation
      const decode = Math.min(num_sampled, num_tokens);
      const row = { step, time_s, prefill: num_tokens - decode, decode, running, waiting, swapped, used, cached, free };
      this.steps.push({ ...row, accepted, num_blocks: this.numBlocks, numPreempted: 0, numSwaps: 0 });
    }
    let run = 0;
    for (const event of events) {
      const ofState = event.event === "copied" && this.isState(this.groups[event.dst]);
      run = ofState ? run + 1 : 0;
      if (ofState && run % this.stateBlocks !== 1 % this.stateBlocks) continue; // a state's blocks are one line
      if (ofState) event.more = this.stateBlocks - 1;
      this.events.push(event);
      const swaps = event.event === "swappedin" || event.how === "swap";
      if (!swaps && event.event !== "preempted") continue;
      const step = this.steps.findLast((each) => each.time_s <= event.time_s) ?? this.steps.at(-1);
      if (step) step[swaps ? "numSwaps" : "numPreempted"]++;
    }
    if (this.steps.length > MAX_STEPS) this.steps.splice(0, this.steps.length - MAX_STEPS);
    if (this.events.length > MAX_EVENTS) this.events.splice(0, this.events.length - MAX_EVENTS);
  }

  // -- reading -------------------------------------------------------------------------------------------------------

  // Tokens of a sequence that a forward pass returns: one, and the drafts that were right. null without speculation.
  tokensPerPass() {
    const sum = (field) => this.steps.reduce((total, step) => total + step[field], 0);
    const passes = sum("decode") - sum("accepted"); // NaN without speculation
    return passes > 0 ? sum("decode") / passes : null;
  }

  ageOf(block) {
    return Math.max(0, this.time_s - this.changed[block]);
  }

  filledIn(sequence, i) {
    if (this.isState(sequence.group)) return this.blockSize;
    return Math.min(Math.max(sequence.num_computed - i * this.blockSize, 0), this.blockSize);
  }

  filledOf(block) {
    const sequence = this.slots[this.owner[block]];
    if (this.cached[block] || this.isState(this.groups[block]) || !sequence)
      return this.cached[block] || this.refs[block] ? this.blockSize : 0;
    return this.filledIn(sequence, this.entry[block]);
  }

  stateOf(block) {
    if (this.refs[block]) return "used";
    return this.cached[block] ? "cached" : "free";
  }

  // The group of a block's layers as text, such as "w1: last 1024" (tokens); "" for a free block, and where all layers are one group.
  groupOf(block) {
    return this.hasGroups && this._word(block) ? this.groupName(this.groups[block]) : "";
  }

  groupName(group) {
    if (this.isState(group)) return "state";
    return group ? `w${group}: last ${this.windows[group - 1]}` : "full";
  }

  get hasGroups() {
    return this.windows.length > 0 || this.stateBlocks > 0;
  }

  isState(group) {
    return group > this.windows.length;
  }

  // "checkpoint" of a sealed state's block, "state" of another state's, else "". A block that another key took is neither.
  kindOf(block) {
    if (!this.isState(this.groups[block])) return "";
    return this.sealIds[block] ? "checkpoint" : this.owner[block] >= 0 ? "state" : "";
  }

  // The checkpoint that a block is part of, { full, part }: the block whose seal it hangs on, 0 if that is gone, and which
  // block of the state it is, from 0. null: it is part of none.
  checkpointOf(block) {
    if (!this.cached[block] || !this.isState(this.groups[block])) return null;
    let [part, above] = [this.stateBlocks - 1, this._sealed(this.parentIds[block])]; // the head of the chain is the last
    for (; part > 0 && this.isState(this.groups[above]); part--) above = this._sealed(this.parentIds[above]);
    return { full: above, part };
  }

  // Tokens from the start to the end of a sealed block; null if the chain before it is not known.
  tokensUpTo(block) {
    let num = 1;
    for (; this.parentIds[block]; num++) block = this._sealed(this.parentIds[block]);
    return block ? num * this.blockSize : null;
  }

  // The block with a seal; 0: none.
  _sealed(sealId) {
    if (this.located !== this.version) {
      this.located = this.version;
      this.blockOf = new Map();
      for (let block = 1; block <= this.numBlocks; block++)
        if (this.sealIds[block]) this.blockOf.set(this.sealIds[block], block);
    }
    return this.blockOf.get(sealId) ?? 0;
  }

  // Slots of the sequences that have a block.
  ownersOf(block) {
    if (this.indexed !== this.version) {
      this.indexed = this.version;
      const owners = [...this.sequences.values()].filter((sequence) => !this.isSwapped(sequence));
      const size = owners.reduce((sum, sequence) => sum + sequence.blocks.length, 0);
      this.index = size > MAX_INDEXED ? null : new Map();
      if (this.index)
        for (const { blocks, slot } of owners)
          for (const each of blocks) if (each > 0) this.index.set(each, [...(this.index.get(each) ?? []), slot]);
    }
    return this.index?.get(block) ?? (this.owner[block] < 0 ? [] : [this.owner[block]]);
  }

  // The prefix tree, [{ block, children, isKept }]: children continue a block's content. isKept: there is a checkpoint of
  // the state after it. null: too large to draw.
  tree(maxNodes = 20_000) {
    const [nodes, kept] = [new Map(), new Set()];
    for (let block = 1; block <= this.numBlocks; block++) {
      if (!this.sealIds[block]) continue;
      if (this.isState(this.groups[block])) kept.add(this.parentIds[block]);
      if (this.groups[block]) continue; // found by the full ones
      if (nodes.size === maxNodes) return null;
      nodes.set(this.sealIds[block], { block, children: [] });
    }
    for (const [sealId, node] of nodes) node.isKept = kept.has(sealId);
    const roots = [];
    for (const node of nodes.values()) (nodes.get(this.parentIds[node.block])?.children ?? roots).push(node);
    return roots;
  }

  // The whole state, which tests compare with the real pool.
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
      groups: blocks.map((block) => (this._word(block) ? this.groups[block] : 0)),
      kinds: blocks.map((block) => this.kindOf(block)),
      checkpoints: blocks.flatMap((block) => {
        const { full, part } = this.checkpointOf(block) ?? {};
        return full == null ? [] : [[block, full, part, full ? this.tokensUpTo(full) : null]];
      }),
      tables,
      numTables: this.sequences.size,
      queues: this.queues,
      stats: this.stats,
    };
  }
}
