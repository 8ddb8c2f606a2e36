"""The block pool by hand: the engine's own core, worked action by action, each of which tells what it did and why.

A history is the session: `64x16;new,64;fork,A,3` names a pool and all that was done to it. A pool that is not at hand
is made again from its history, so nothing has to be kept, undo is a shorter history, and a link holds everything.

Tokens count as computed at once. What an engine's scheduler decides (who runs, who gives way) is here the visitor's.
"""

from __future__ import annotations

import inspect
import re
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from threading import Lock
from typing import Any, NamedTuple
from urllib.parse import unquote

import numpy as np

from octavo.core import events as ev
from octavo.core.kv_cache_manager import KVCacheManager
from octavo.core.plan import StepPlan
from octavo.core.request import Request, Sequence, Status
from octavo.errors import ParameterError
from octavo.params.sampling_params import SamplingParams
from octavo.view.live.messages import Counts, RequestView, Seals, SequenceView, Snapshot, Wait
from octavo.view.live.publisher import pack_words
from octavo.view.playground.contiguous import Contiguous

MAX_BLOCKS, MAX_BLOCK_SIZE = 4096, 256
MAX_TOKENS = 65_536
"""That a pool can hold, and that a history can make."""
MAX_SEQUENCES = 64
MAX_HELD_TOKENS = 4 * MAX_TOKENS
"""In all sequences of a pool together, each fork with its own list: eight bytes a token."""
MAX_WORK = 200_000
"""Block operations and tokens that a history may cost. A link is a stranger's, and opening it runs its history."""
MAX_BEAMS, MAX_BEAM_STEPS = 16, 100
MAX_ACTIONS, MAX_CHARS = 500, 16_384
MAX_WORDS, MAX_WORD_CHARS = 512, 32
MAX_PHASES = 200
MAX_TEXTS = 4096
NUM_KEPT = 16
"""Pools at hand. The one used longest ago goes; it comes back from its history."""
MAX_LEN = 1 << 30

POOL = re.compile(r"([0-9]{1,5})x([0-9]{1,4})(?:x([0-9]{1,6})(?:x([0-9]{1,5}))?)?")
NUMBER = re.compile(r"[0-9]{1,6}")


class Pool(NamedTuple):
    num_blocks: int
    block_size: int
    max_len: int
    num_host_blocks: int

    @classmethod
    def parse(cls, text: str) -> Pool:
        """Raises `ParameterError`."""
        found = POOL.fullmatch(text)
        if found is None:
            raise _bad(f"a history begins with its pool, such as 64x16, and not with {text[:40]!r}")
        num_blocks, size = int(found[1]), int(found[2])
        if not (1 <= num_blocks <= MAX_BLOCKS and 1 <= size <= MAX_BLOCK_SIZE and num_blocks * size <= MAX_TOKENS):
            raise _bad(
                f"a pool of {num_blocks} blocks of {size} tokens is not offered: 1 to {MAX_BLOCKS} blocks of 1 to "
                f"{MAX_BLOCK_SIZE}, for {MAX_TOKENS} tokens in all at most; take a smaller one"
            )
        num_slots = num_blocks * size
        max_len = int(found[3]) if found[3] else min(16 * size, num_slots)
        num_host = int(found[4]) if found[4] else num_blocks
        if not 1 <= max_len <= num_slots or num_host > num_blocks:
            raise _bad(
                f"of {num_slots} slots {max_len} are to be reserved for a sequence, and {num_host} blocks are on the "
                f"host; reserve 1 to {num_slots}, and have at most {num_blocks} on the host"
            )
        return cls(num_blocks, size, max_len, num_host)


class Told(NamedTuple):
    says: str
    why: str


@dataclass(frozen=True, slots=True)
class Phase:
    """One thing that happened to a block. `from_block_id` is what was copied, or pointed to before."""

    kind: str
    says: str
    sequence: str | None = None
    block_id: int | None = None
    from_block_id: int | None = None


class RefusedError(Exception):
    """It cannot be done now. What the pool looks like is not to be trusted any more: make it anew from its history."""

    def __init__(self, says: str, why: str) -> None:
        super().__init__(says)
        self.told = Told(says, why)


class Playground:
    """One pool, and the sequences in it by name."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.kv = KVCacheManager(pool.num_blocks, pool.block_size, pool.num_host_blocks)
        self.contiguous = Contiguous(pool.num_blocks * pool.block_size, pool.max_len)
        self.sequences: dict[str, Sequence] = {}
        self.phases: deque[Phase] = deque(maxlen=MAX_PHASES)
        self._work = 0
        self._texts: list[str] = []  # of each token
        self._typed: dict[str, int] = {}  # word -> token
        self._prompt: list[int] = []  # tokens of the prompt that is shared
        self._names: dict[Sequence, str] = {}
        self._uids: dict[Sequence, int] = {}
        self._num_named = 0
        self._searched: set[Request] = set()  # groups that have made a step of beam search
        self._actions: dict[str, Callable[..., Told]] = {
            "new": self.new,
            "text": self.text,
            "share": self.share,
            "append": self.append,
            "type": self.type_in,
            "write": self.write,
            "fork": self.fork,
            "beam": self.beam,
            "free": self.free,
            "fill": self.fill,
            "preempt": self.preempt,
            "resume": self.resume,
            "forget": self.forget,
        }
        self.kv.events.subscribe(self._listen, blocks=True)

    def do(self, action: str) -> Told:
        """Carry out one action. Raises `ParameterError` for what is none, `RefusedError` for what cannot be done."""
        verb, *arguments = action.split(",")
        method = self._actions.get(verb)
        if method is None:
            raise _bad(f"there is no action {verb[:40]!r}; there are {', '.join(self._actions)}")
        try:
            inspect.signature(method).bind(*arguments)
        except TypeError:
            raise _bad(f"{verb} does not take {len(arguments)} arguments; see PROTOCOL.md") from None
        self.phases.clear()
        return method(*arguments)

    # -- actions -------------------------------------------------------------------------------------------------------

    def new(self, count: str) -> Told:
        name = self._next_name()
        num = self._number(count)
        self._check_room(self.kv.blocks_for(num))
        return self._begin(name, self._own(name, 0, num))

    def text(self, words: str) -> Told:
        return self._begin(self._next_name(), self._tokens_of(words))

    def share(self, count: str, own: str = "0") -> Told:
        name = self._next_name()
        num, num_own = self._number(count), self._number(own, least=0)
        self._check_room(self.kv.blocks_for(num + num_own) - len(self._prompt) // self.pool.block_size)
        while len(self._prompt) < num:
            self._prompt.append(self._make(f"p{len(self._prompt) + 1}"))
        return self._begin(name, self._prompt[:num] + self._own(name, num, num_own))

    def append(self, name: str, count: str) -> Told:
        sequence, num = self._on_device(name), self._number(count)
        self._check_room(self.kv.blocks_needed([(sequence, num)]))
        return self._extend(sequence, self._own(name, len(sequence.token_ids), num))

    def type_in(self, name: str, words: str) -> Told:
        return self._extend(self._on_device(name), self._tokens_of(words))

    def write(self, name: str) -> Told:
        sequence = self._on_device(name)
        filled = len(sequence.token_ids) % self.pool.block_size
        tail = sequence.block_ids[-1]
        refs = self.kv.pool.refs[tail]
        self._extend(sequence, self._own(name, len(sequence.token_ids), 1))
        now = sequence.block_ids[-1]
        if not filled:
            return Told(
                f"{name}'s last block {tail} is full, so the token begins a new block, {now}. Nothing is copied.",
                "A full block is never written again, however many share it. Only a last block with room left is "
                "written, and only that can need a copy.",
            )
        if refs == 1:
            return Told(
                f"{name} writes into block {tail}, in place: it has 1 reference. Nothing is copied.",
                "Nobody else points to this block, so nobody can notice. Of k sequences that share a last block, k - 1 "
                "copy it, and the last one finds it its own.",
            )
        return Told(
            f"{name} shares block {tail} with {refs - 1} other{'s' * (refs > 2)}, so it gets a copy, block {now}, and "
            f"writes there: block {tail} goes from {refs} references to {refs - 1}.",
            "Copy-on-write: allocate a block, copy the shared one into it, take one reference off the shared one, and "
            "point the table's entry at the copy. One block is copied, whatever the length of the sequence.",
        )

    def fork(self, name: str, count: str = "1") -> Told:
        parent, num = self._on_device(name), self._number(count)
        children = [self._fork(parent) for _ in range(num)]
        num_blocks = len(parent.block_ids)
        whose = f"{_list(children)} share{'s' * (num == 1)}"
        return Told(
            f"{name} is forked: {whose} its {_count(num_blocks, 'block')}, and none is taken.",
            "A fork copies the block table, and not the blocks: each of them gets a reference more. Memory is taken "
            "when somebody writes something of its own.",
        )

    def beam(self, name: str, width: str, num_steps: str = "1") -> Told:
        sequence, num = self._on_device(name), self._number(width, least=2)
        steps, group = self._number(num_steps), sequence.request
        if num > MAX_BEAMS or steps > MAX_BEAM_STEPS:
            raise _bad(f"a beam search has at most {MAX_BEAMS} beams, and {MAX_BEAM_STEPS} steps at once; take fewer")
        if len(group.sequences) > num:
            raise RefusedError(
                f"{group.request_id} and its forks are {len(group.sequences)} sequences already.",
                f"A search of {num} beams keeps {num}; free some of them, or take more beams.",
            )
        copied, fallen = self.kv.num_copied, 0
        for _ in range(steps):
            fallen += self._beam_step(group, sequence, num)
            sequence = group.sequences[0]
        fell = f", {fallen} fell and were replaced by forks of the best" if fallen else ""
        return Told(
            f"{_count(steps, 'step')} of {num} beams: each has {_count(steps, 'token')} more{fell}; "
            f"{_count(self.kv.num_copied - copied, 'block')} copied.",
            "Beams are forks that are chosen anew after each token (here the last falls, and the first goes on twice). "
            "What they have in common is there once; a beam that falls gives back what was its alone.",
        )

    def free(self, name: str) -> Told:
        sequence = self._sequence(name)
        before = self.kv.stats()
        self._drop(sequence)
        after = self.kv.stats()
        freed, cached = after.num_free - before.num_free, after.num_cached - before.num_cached
        return Told(
            f"{name} is gone: {_count(freed, 'block')} free again, {cached} kept in the cache, "
            f"{after.num_used} still in use.",
            "Each of its blocks loses a reference. At 0 a block whose content is known stays, findable, until room is "
            "needed; one that was not full is free.",
        )

    def fill(self) -> Told:
        chunk, names, evicted = max(1, self.pool.num_blocks // 8), [], self.kv.pool.num_evicted
        self._next_name()
        self._check_room(1)
        while (left := self.kv.pool.num_available) and len(self.sequences) < MAX_SEQUENCES:
            name = self._next_name()
            tokens = self._own(name, 0, min(chunk, left) * self.pool.block_size)
            self._begin(name, tokens)
            names.append(name)
        evicted = self.kv.pool.num_evicted - evicted
        return Told(
            f"{_list(names)} take{'s' * (len(names) == 1)} all that was left"
            + (f", {_count(evicted, 'cached block')} among it." if evicted else "."),
            "Free blocks go first; then cached ones are evicted, the one used longest ago before the others. No block "
            "that is in use is ever taken.",
        )

    def preempt(self, name: str, how: str) -> Told:
        if how not in ("swap", "recompute"):
            raise _bad(f"preempt takes swap or recompute, and not {how[:40]!r}")
        group = self._on_device(name).request
        names, num_blocks = _list(self._names[s] for s in group.sequences), self.kv.count_private_blocks(group)[0]
        if how == "recompute":
            for sequence in group.sequences:
                self.kv.free(sequence)
            group.status = Status.WAITING
            told = Told(
                f"{names} gave up {_count(num_blocks, 'block')}; when there is room, their tokens are computed again.",
                "Tokens are known, so keys and values can be made anew, in one go and for all positions at once. What "
                "stays in the cache meanwhile need not be.",
            )
        else:
            if not self.kv.swap_out(group, StepPlan()):
                raise RefusedError(
                    f"the host has room for {self.kv.swap_space.num_free} blocks, and {num_blocks} would go there.",
                    "What is swapped out goes whole or not at all. Preempt by recompute, or make more room there.",
                )
            group.status = Status.SWAPPED
            self._say("swap", f"{_count(num_blocks, 'block')} copied to the host", name)
            kept = len(group.shared_on_device)
            told = Told(
                f"{names} went to the host with {_count(num_blocks, 'block')}"
                + (f"; {kept} that others use stayed." if kept else "."),
                "Each block moves once, however many of the sequences share it. A sequence and its forks go together: "
                "they share blocks, and would wait for each other.",
            )
        for sequence in group.sequences:
            self.contiguous.remove(self._names[sequence])
        return told

    def resume(self, name: str) -> Told:
        group = self._sequence(name).request
        if group.status is Status.RUNNING:
            raise RefusedError(f"{name} is on the device.", "Only what was preempted comes back.")
        names, size = _list(self._names[s] for s in group.sequences), self.pool.block_size
        if group.status is Status.SWAPPED:
            if (found := self.kv.find_swap_in_blocks(group)) is not None:
                self._check_room(found.num_needed)
                self.kv.swap_in(group, found, StepPlan())
                told = Told(
                    f"{names} came back from the host with {_count(len(found.host_ids), 'block')}"
                    + (f", and share {len(found.shared_on_device)} again." if found.shared_on_device else "."),
                    "They get other blocks than before: a table may point anywhere, so nobody has to make room at any "
                    "particular place.",
                )
                self._return(group)
                return told
            for sequence in group.sequences:
                self.kv.free(sequence)
            group.status, group.shared_on_device = Status.WAITING, {}
        num_found = num_computed = 0
        for sequence in group.sequences:
            prefix = max(self.kv.lookup(sequence), self.kv.sibling_prefix(sequence), key=lambda p: p.num_positions)
            self._check_room(self.kv.blocks_to_admit(sequence, prefix))
            self.kv.attach(sequence, prefix)
            num_found += len(prefix.block_ids)
            num_computed += len(sequence.token_ids) - sequence.num_computed
            self._compute(sequence, len(sequence.token_ids) - sequence.num_computed)
        self._return(group)
        return Told(
            f"{names} came back: {_count(num_found, 'block')} found, {_count(num_computed, 'token')} computed again.",
            f"Full blocks of {size} that are still there, in the cache or with one another, are shared; the rest is "
            "computed as if it were a prompt.",
        )

    def forget(self) -> Told:
        num = self.kv.reset_prefix_cache()
        return Told(
            f"The cache is empty: {_count(num, 'block')} forgotten.",
            "What is in use stays, and stays findable. A cached block is an offer, and never a promise.",
        )

    # -- the same for several actions ----------------------------------------------------------------------------------

    def _begin(self, name: str, tokens: list[int]) -> Told:
        self._check_held(len(tokens))
        request = Request(name, tokens, SamplingParams(max_tokens=MAX_LEN))
        request.begin(0, (0, 0), MAX_LEN)
        request.status = Status.RUNNING
        (sequence,) = request.sequences
        prefix = self.kv.lookup(sequence)
        self._check_room(self.kv.blocks_to_admit(sequence, prefix))
        self._name(sequence, name)
        self._num_named += 1
        self.kv.count_lookup(sequence, prefix)
        for block in prefix.block_ids:
            self._say("hit", f"block {block} holds these tokens already", name, block)
        self.kv.attach(sequence, prefix)
        self._compute(sequence, len(tokens) - sequence.num_computed)
        num_found, num_blocks = len(prefix.block_ids), len(sequence.block_ids)
        says = (
            f"{name} has {_count(len(tokens), 'token')} in {_count(num_blocks, 'block')}: {_list(sequence.block_ids)}"
        )
        if num_found:
            return Told(
                f"{says}. {num_found} of them {'was' if num_found == 1 else 'were'} found in the cache.",
                "Its beginning is that of an earlier sequence, block by block, so those blocks are shared and not "
                "computed again. The last token always is computed: the next one comes of it.",
            )
        unfilled = num_blocks * self.pool.block_size - len(tokens)
        return Told(
            f"{says}.",
            f"It takes what its tokens need and reserves nothing: {_count(unfilled, 'slot')} of its last block "
            f"{'is' if unfilled == 1 else 'are'} empty, fewer than a block of {self.pool.block_size}.",
        )

    def _extend(self, sequence: Sequence, tokens: list[int]) -> Told:
        self._check_held(len(tokens))
        name, held, size = self._names[sequence], len(sequence.block_ids), self.pool.block_size
        self._check_room(self.kv.blocks_needed([(sequence, len(tokens))]))
        before, copied = len(sequence.token_ids), self.kv.num_copied
        sequence.token_ids.extend(tokens)
        self._compute(sequence, len(tokens))
        taken, room = sequence.block_ids[held:], -before % size
        says = f"{name} has {_count(len(tokens), 'token')} more"
        if self.kv.num_copied > copied:
            says += f"; its shared last block was copied to {sequence.block_ids[held - 1]} first"
        if taken:
            return Told(
                f"{says}, and {_count(len(taken), 'block')} more: {_list(taken)}.",
                (f"The last block had room for {room}. " if room else "The last block was full. ")
                + "A block is taken when the one before it is full, wherever one is free: it need not lie beside it.",
            )
        return Told(f"{says}, and no block more.", f"The last block had room for {room}.")

    def _fork(self, parent: Sequence) -> str:
        name, group = self._next_name(), parent.request
        self._check_held(len(parent.token_ids))
        child = Sequence(group, len(group.sequences), parent.token_ids[:], parent.max_length)
        group.sequences.append(child)
        self._name(child, name)
        self._num_named += 1
        self.kv.fork(parent, child)
        return name

    def _beam_step(self, group: Request, best: Sequence, width: int) -> int:
        """Returns how many beams fell."""
        fallen = 0
        if group in self._searched and len(group.sequences) == width:
            worst = group.sequences[-1]
            self._fork(group.sequences[0])  # heirs come before the others go, or what they share would be lost
            self._drop(worst)
            fallen = 1
        while len(group.sequences) < width:
            self._fork(best)
        self._searched.add(group)
        for sequence in group.sequences:
            self._extend(sequence, self._own(self._names[sequence], len(sequence.token_ids), 1))
        return fallen

    def _drop(self, sequence: Sequence) -> None:
        name = self._names.pop(sequence)
        self.kv.free(sequence)
        sequence.request.sequences.remove(sequence)
        del self.sequences[name]
        self.contiguous.remove(name)

    def _return(self, group: Request) -> None:
        group.status = Status.RUNNING
        for sequence in group.sequences:
            self.kv.seal(sequence)
            self.contiguous.add(self._names[sequence])

    def _compute(self, sequence: Sequence, count: int) -> None:
        self._spend(count)
        held, plan = len(sequence.block_ids), StepPlan()
        self.kv.grow(sequence, count, plan)
        name = self._names[sequence]
        for src, dst in plan.copies:
            self._say("repoint", f"{name}'s table points to block {dst} instead of {src}", name, dst, src)
        for block in sequence.block_ids[held:]:
            self._say("repoint", f"{name}'s table ends with block {block}", name, block)
        sequence.num_computed += count
        if count:
            last = sequence.block_ids[-1]
            self._say("write", f"{name} writes {_count(count, 'token')}, the last into block {last}", name, last)
        self.kv.seal(sequence)

    def _check_held(self, num_more: int) -> None:
        num_held = sum(len(sequence.token_ids) for sequence in self.sequences.values()) + num_more
        if num_held > MAX_HELD_TOKENS:
            raise RefusedError(
                f"The sequences would hold {num_held:,} tokens; {MAX_HELD_TOKENS:,} is the limit.",
                "Free some of them, or take a shorter one.",
            )

    def _check_room(self, needs: int) -> None:
        pool = self.kv.pool
        if needs <= pool.num_available:
            return
        raise RefusedError(
            f"No room: it needs {_count(needs, 'block')}, {pool.num_free} are free and {pool.num_cached} cached.",
            "An engine lets the request wait, or takes the blocks of another that came later: preempt one, or free it.",
        )

    # -- names and tokens ----------------------------------------------------------------------------------------------

    def _next_name(self) -> str:
        if len(self.sequences) >= MAX_SEQUENCES:
            raise RefusedError(f"There are {MAX_SEQUENCES} sequences, the most there can be here.", "Free some.")
        number, name = self._num_named, ""
        while number >= 0:
            name = chr(ord("A") + number % 26) + name
            number = number // 26 - 1
        return name

    def _name(self, sequence: Sequence, name: str) -> None:
        self.sequences[name] = sequence
        self._names[sequence] = name
        self._uids[sequence] = len(self._uids) + 1
        self.contiguous.add(name)

    def _sequence(self, name: str) -> Sequence:
        if name not in self.sequences:
            there = ", ".join(self.sequences) or "none"
            raise RefusedError(f"There is no sequence {name[:40]!r}; there is {there}.", "It may have been freed.")
        return self.sequences[name]

    def _on_device(self, name: str) -> Sequence:
        sequence = self._sequence(name)
        if sequence.request.status is not Status.RUNNING:
            raise RefusedError(f"{name} is off the device.", "It was preempted: resume it first.")
        return sequence

    def _number(self, text: str, least: int = 1) -> int:
        if NUMBER.fullmatch(text) is None or not least <= int(text) <= MAX_TOKENS:
            raise _bad(f"{text[:40]!r} is no number from {least} to {MAX_TOKENS}")
        return int(text)

    def _own(self, name: str, begin: int, count: int) -> list[int]:
        """Tokens that nobody else has, named for their place."""
        return [self._make(f"{name.lower()}{i + 1}") for i in range(begin, begin + count)]

    def _make(self, text: str) -> int:
        if len(self._texts) >= MAX_TOKENS:
            raise RefusedError(
                f"This history has made {MAX_TOKENS} tokens, the most that one can.", "Reset, and begin another."
            )
        self._texts.append(text)
        return len(self._texts) - 1

    def _tokens_of(self, words: str) -> list[int]:
        texts = unquote(words).split()
        if not 1 <= len(texts) <= MAX_WORDS or any(len(text) > MAX_WORD_CHARS for text in texts):
            raise _bad(f"a text has 1 to {MAX_WORDS} words of at most {MAX_WORD_CHARS} characters; shorten it")
        for text in texts:
            if text not in self._typed:
                self._typed[text] = self._make(text)
        return [self._typed[text] for text in texts]

    # -- telling -------------------------------------------------------------------------------------------------------

    def _say(
        self, kind: str, says: str, sequence: str | None = None, block: int | None = None, source: int | None = None
    ) -> None:
        self._spend(1)
        self.phases.append(Phase(kind, says, sequence, block, source))

    def _spend(self, amount: int) -> None:
        self._work += amount
        if self._work > MAX_WORK:
            raise RefusedError(
                f"This history takes more than {MAX_WORK:,} block operations and tokens, the limit.",
                "Reset, and begin a shorter one, or one with a smaller pool.",
            )

    def _listen(self, event: ev.Event) -> None:
        if isinstance(event, ev.Allocated):
            self._say("allocate", f"block {event.block_id} is taken", block=event.block_id)
        elif isinstance(event, ev.Shared):
            self._say("share", f"block {event.block_id} has {_count(event.refs, 'reference')}", block=event.block_id)
        elif isinstance(event, ev.Released):
            left = _count(event.refs, "reference") if event.refs else "the cache" if event.cached else "the free blocks"
            kind, text = ("decrement", "has {} left") if event.refs else ("release", "goes to {}")
            self._say(kind, f"block {event.block_id} {text.format(left)}", block=event.block_id)
        elif isinstance(event, ev.Copied):
            # The pool counts first and the device copies later; the protocol reads better in the order of its reasons.
            released = self.phases.pop()
            text = f"block {event.src} is copied to {event.dst}"
            self._say("copy", text, block=event.dst, source=event.src)
            self.phases.append(released)
        elif isinstance(event, ev.Sealed):
            self._say("seal", f"block {event.block_id} is full, and can be found", block=event.block_id)
        elif isinstance(event, ev.Evicted):
            self._say("evict", f"block {event.block_id} was cached, and is not found any more", block=event.block_id)

    def answer(self) -> dict[str, Any]:
        """What it looks like: the part of PROTOCOL.md's answer that is the pool's."""
        return {
            "phases": [asdict(phase) for phase in self.phases],
            "picture": self._picture(),
            "names": {str(self._uids[s]): name for name, s in self.sequences.items()},
            "tokens": {
                str(self._uids[s]): [self._texts[t] for t in s.token_ids[:MAX_TEXTS]] for s in self.sequences.values()
            },
            "compare": self.compare(),
            "contiguous": {
                "num_slots": self.contiguous.num_slots,
                "max_len": self.pool.max_len,
                "pieces": [
                    {"name": name, "start": start, "reserved": self.pool.max_len, "filled": self._filled(name)}
                    for name, start in self.contiguous.starts.items()
                ],
                "refused": list(self.contiguous.waiting),
            },
        }

    def compare(self) -> dict[str, int]:
        """This memory, and the same sequences in others': blocks and slots."""
        stats, kv = self.kv.stats(), self.kv
        running = [s for s in self.sequences.values() if s.request.status is Status.RUNNING]
        return {
            "paged_blocks": stats.num_used,
            "unshared_blocks": sum(kv.blocks_for(s.num_computed) for s in running),
            "contiguous_blocks": kv.blocks_for(self.pool.max_len) * len(running),
            "contiguous_refused": len(self.contiguous.waiting),
            "paged_waste_slots": stats.num_unfilled_slots,
            "contiguous_waste_slots": sum(self.pool.max_len - self._filled(name) for name in self.contiguous.starts),
            "contiguous_external_slots": self.contiguous.num_external_slots,
        }

    def _filled(self, name: str) -> int:
        return min(len(self.sequences[name].token_ids), self.pool.max_len)

    def _picture(self) -> Snapshot:
        kv, uids = self.kv, self._uids
        refs, seals = np.frombuffer(kv.pool.refs, np.int32), np.frombuffer(kv.pool.seal_id, np.int64)
        sealed = np.nonzero(seals)[0]
        keys = [kv.pool.key_of(block) for block in sealed.tolist()]
        parents = [0 if key is None or isinstance(key[0], bytes) else key[0] for key in keys]
        groups = dict.fromkeys(s.request for s in self.sequences.values())
        lines = [sum(g.status is status for g in groups) for status in (Status.RUNNING, Status.WAITING, Status.SWAPPED)]
        return Snapshot(
            "",
            0,
            0.0,
            0,
            kv.pool.num_blocks,
            kv.block_size,
            kv.swap_space.num_blocks,
            pack_words(refs[1:], seals[1:]),
            Seals(
                sealed.astype("<u4").tobytes(),
                seals[sealed].astype("<f8").tobytes(),
                np.array(parents, "<f8").tobytes(),
            ),
            [self._view(group) for group in groups],
            [
                SequenceView(
                    uids[s], s.index, len(s.token_ids), s.num_computed, np.array(s.block_ids, dtype="<i4").tobytes()
                )
                for s in self.sequences.values()
            ],
            kv.stats().as_dict(),
            Counts(lines[0], lines[1], lines[2], len(self._texts)),
        )

    def _view(self, group: Request) -> RequestView:
        waits = None if group.status is Status.RUNNING else Wait("preempted")
        first = group.sequences[0]
        num_prompt, uids = len(group.prompt_token_ids), tuple(self._uids[s] for s in group.sequences)
        name = self._names[first]
        return RequestView(
            name, group.status.value, num_prompt, 0, len(uids), 0, max(0, group.num_cached_tokens), 0, waits, uids
        )


class Playgrounds:
    """Pools by their histories. Thread-safe, one action at a time."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, Playground] = OrderedDict()
        self._lock = Lock()

    def answer(self, history: str, action: str | None = None) -> dict[str, Any]:
        """What comes of one more action, or what there is without it. Raises `ParameterError` for what is no history.

        An action that cannot be done has changed nothing, and is not in the history that comes back.
        """
        actions = check_history(history, action)
        with self._lock:
            playground = self._kept.pop(history, None)
            told = Told("", "")
            done = True
            if playground is None or not action:  # what is asked for is how it came to this
                playground, told = self._make(actions)
            before = ";".join(actions[:-1]) if len(actions) > 1 else history
            if action:
                before = history
                try:
                    told = playground.do(action)
                    history = f"{history};{action}"
                except RefusedError as refused:
                    (playground, _), told, done = self._make(actions), refused.told, False
                    playground.phases.clear()
                    playground.phases.append(Phase("refuse", told.says))
            self._keep(history, playground)
            return {
                "history": history,
                "before": before,
                "pool": actions[0],
                "done": done,
                "says": told.says,
                "why": told.why,
                **playground.answer(),
            }

    def _make(self, actions: list[str]) -> tuple[Playground, Told]:
        playground = Playground(Pool.parse(actions[0]))
        pool = playground.pool
        told = Told(
            f"{_count(pool.num_blocks, 'block')} of {_count(pool.block_size, 'token')}, all of them free.",
            "A block holds the keys and values of so many tokens. Which sequence has which blocks stands in its table.",
        )
        for number, action in enumerate(actions[1:], 1):
            try:
                told = playground.do(action)
            except RefusedError as refused:
                raise _bad(f"action {number} of the history, {action[:40]}, cannot be done: {refused}") from None
        return playground, told

    def _keep(self, history: str, playground: Playground) -> None:
        self._kept[history] = playground
        while len(self._kept) > NUM_KEPT:
            self._kept.popitem(last=False)


def check_history(history: str, action: str | None) -> list[str]:
    """The pool and the actions. Raises `ParameterError`."""
    actions = history.split(";")
    if len(history) + len(action or "") > MAX_CHARS or len(actions) > MAX_ACTIONS:
        raise _bad(f"a history has at most {MAX_ACTIONS} actions and {MAX_CHARS} characters; reset, and begin another")
    if action is not None and ";" in action:
        raise _bad("one action at a time, without a semicolon")
    return actions


def _bad(message: str) -> ParameterError:
    return ParameterError(message, param="history")


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def _list(items: Iterable[Any]) -> str:
    """A, B and C; of many, the first and the last."""
    texts = [str(item) for item in items]
    if len(texts) > 12:
        return f"{', '.join(texts[:6])}, ... and {texts[-1]}"
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} and {texts[-1]}"
