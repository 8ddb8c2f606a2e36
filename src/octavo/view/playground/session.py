"""The playground: the engine's own KV cache, driven by hand. Each action explains what it did and why.

A history is the session: `64x16;new,64;fork,A,3` has the pool and all actions. A pool that is not in memory is made
again from its history. So nothing has to be stored, undo is a shorter history, and a link holds everything.

Tokens count as computed at once. The user takes the scheduler's decisions: which sequences run, and which are
preempted.
"""

from __future__ import annotations

import inspect
import re
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from threading import Lock
from typing import Any, NamedTuple
from urllib.parse import unquote

import msgspec
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
"""In a pool, and made by a history, at most."""
MAX_SEQUENCES = 64
MAX_HELD_TOKENS = 4 * MAX_TOKENS
"""In all sequences of a pool together. Each fork has its own list: eight bytes per token."""
MAX_WORK = 200_000
"""Block operations and tokens of a history, at most. Opening a link runs its history, and links come from anywhere."""
MAX_BEAMS, MAX_BEAM_STEPS = 16, 100
MAX_ACTIONS, MAX_CHARS = 500, 16_384
MAX_WORDS, MAX_WORD_CHARS = 512, 32
MAX_PHASES = 200
MAX_TEXTS = 4096
MAX_POOLS = 16
"""Pools in memory. The least recently used one is dropped; it can be made again from its history."""
MAX_LEN = 1 << 30

POOL = re.compile(r"([0-9]{1,5})x([0-9]{1,4})(?:x([0-9]{1,6})(?:x([0-9]{1,5}))?)?")
NUMBER = re.compile(r"[0-9]{1,6}")


class Pool(NamedTuple):
    """The size of a pool."""

    num_blocks: int
    block_size: int
    max_len: int
    num_host_blocks: int

    @classmethod
    def parse(cls, text: str) -> Pool:
        """Parse NUM_BLOCKSxBLOCK_SIZE[xMAX_LEN[xNUM_HOST_BLOCKS]]. Raises `ParameterError`."""
        found = POOL.fullmatch(text)
        if found is None:
            raise _bad(f"a history begins with its pool, such as 64x16, not with {text[:40]!r}")
        num_blocks, size = int(found[1]), int(found[2])
        if not (1 <= num_blocks <= MAX_BLOCKS and 1 <= size <= MAX_BLOCK_SIZE and num_blocks * size <= MAX_TOKENS):
            raise _bad(
                f"a pool of {num_blocks} blocks of {size} tokens is not supported: 1 to {MAX_BLOCKS} blocks of 1 to "
                f"{MAX_BLOCK_SIZE} tokens, at most {MAX_TOKENS} tokens in all; use a smaller one"
            )
        num_slots = num_blocks * size
        max_len = int(found[3]) if found[3] else min(16 * size, num_slots)
        num_host = int(found[4]) if found[4] else num_blocks
        if not 1 <= max_len <= num_slots or num_host > num_blocks:
            raise _bad(
                f"the maximum length is {max_len} in {num_slots} slots, with {num_host} host blocks; reserve 1 to "
                f"{num_slots} slots per sequence, and use at most {num_blocks} host blocks"
            )
        return cls(num_blocks, size, max_len, num_host)


class Explanation(NamedTuple):
    """What an action did, and why."""

    text: str
    reason: str


class Phase(msgspec.Struct, frozen=True, rename={"text": "says"}):
    """One operation on a block. `from_block_id` is the block that was copied, or that the table pointed to before."""

    kind: str
    text: str
    sequence: str | None = None
    block_id: int | None = None
    from_block_id: int | None = None


class RefusedError(Exception):
    """An action cannot be done now. The pool may be inconsistent: make it again from its history."""

    def __init__(self, text: str, reason: str) -> None:
        super().__init__(text)
        self.explanation = Explanation(text, reason)


class Playground:
    """One pool, and its sequences by name."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.kv = KVCacheManager(pool.num_blocks, pool.block_size, pool.num_host_blocks)
        self.contiguous = Contiguous(pool.num_blocks * pool.block_size, pool.max_len)
        self.sequences: dict[str, Sequence] = {}
        self.phases: deque[Phase] = deque(maxlen=MAX_PHASES)
        self._work = 0
        self._texts: list[str] = []  # by token
        self._typed: dict[str, int] = {}  # word -> token
        self._prompt: list[int] = []  # tokens of the shared prompt
        self._names: dict[Sequence, str] = {}
        self._uids: dict[Sequence, int] = {}
        self._num_named = 0
        self._searched: set[Request] = set()  # groups that have done a step of beam search
        self._actions: dict[str, Callable[..., Explanation]] = {
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

    def do(self, action: str) -> Explanation:
        """Do one action. Raises `ParameterError` for an invalid one, `RefusedError` for one that cannot be done now."""
        verb, *arguments = action.split(",")
        method = self._actions.get(verb)
        if method is None:
            raise _bad(f"there is no action {verb[:40]!r}; the actions are {', '.join(self._actions)}")
        try:
            inspect.signature(method).bind(*arguments)
        except TypeError:
            raise _bad(f"{verb} does not take {len(arguments)} arguments; see PROTOCOL.md") from None
        self.phases.clear()
        return method(*arguments)

    # -- actions -------------------------------------------------------------------------------------------------------

    def new(self, count: str) -> Explanation:
        name = self._next_name()
        num = self._number(count)
        self._check_room(self.kv.blocks_for(num))
        return self._begin(name, self._new_tokens(name, 0, num))

    def text(self, words: str) -> Explanation:
        return self._begin(self._next_name(), self._typed_tokens(words))

    def share(self, count: str, num_own: str = "0") -> Explanation:
        name = self._next_name()
        num, num_new = self._number(count), self._number(num_own, min_value=0)
        self._check_room(self.kv.blocks_for(num + num_new) - len(self._prompt) // self.pool.block_size)
        while len(self._prompt) < num:
            self._prompt.append(self._new_token(f"p{len(self._prompt) + 1}"))
        return self._begin(name, self._prompt[:num] + self._new_tokens(name, num, num_new))

    def append(self, name: str, count: str) -> Explanation:
        sequence, num = self._running(name), self._number(count)
        self._check_room(self.kv.blocks_needed([(sequence, num)]))
        return self._extend(sequence, self._new_tokens(name, len(sequence.token_ids), num))

    def type_in(self, name: str, words: str) -> Explanation:
        return self._extend(self._running(name), self._typed_tokens(words))

    def write(self, name: str) -> Explanation:
        sequence = self._running(name)
        filled = len(sequence.token_ids) % self.pool.block_size
        tail = sequence.block_ids[-1]
        refs = self.kv.pool.refs[tail]
        self._extend(sequence, self._new_tokens(name, len(sequence.token_ids), 1))
        now = sequence.block_ids[-1]
        if not filled:
            return Explanation(
                f"{name}'s last block {tail} is full, so the token goes into a new block, {now}. Nothing is copied.",
                "A full block is never written again, however many sequences share it. Only a last block with free "
                "slots is written, so only that one may have to be copied.",
            )
        if refs == 1:
            return Explanation(
                f"{name} writes into block {tail} in place: it has 1 reference. Nothing is copied.",
                "No other sequence has this block. Of k sequences that share a last block, k - 1 copy it, and the last "
                "one writes in place.",
            )
        return Explanation(
            f"{name} shares block {tail} with {refs - 1} other{'s' * (refs > 2)}, so it writes into a copy, "
            f"block {now}: block {tail} goes from {refs} references to {refs - 1}.",
            "Copy-on-write: allocate a block, copy the shared one to it, decrement its reference count, and point the "
            "table entry at the copy. One block is copied, however long the sequence is.",
        )

    def fork(self, name: str, count: str = "1") -> Explanation:
        parent, num = self._running(name), self._number(count)
        children = [self._fork(parent) for _ in range(num)]
        num_blocks = len(parent.block_ids)
        return Explanation(
            f"{name} is forked: {_list(children)} share{'s' * (num == 1)} its {_count(num_blocks, 'block')}. "
            "No block is allocated.",
            "A fork copies the block table, not the blocks: each block gets one more reference. Memory is allocated "
            "when one of the sequences writes.",
        )

    def beam(self, name: str, width: str, num_steps: str = "1") -> Explanation:
        sequence, num = self._running(name), self._number(width, min_value=2)
        steps, group = self._number(num_steps), sequence.request
        if num > MAX_BEAMS or steps > MAX_BEAM_STEPS:
            raise _bad(f"a beam search has at most {MAX_BEAMS} beams, and {MAX_BEAM_STEPS} steps at once; use fewer")
        if len(group.sequences) > num:
            raise RefusedError(
                f"{group.request_id} and its forks are already {len(group.sequences)} sequences.",
                f"A search of {num} beams has {num} sequences. Free some of them, or use more beams.",
            )
        copied, num_dropped = self.kv.num_copied, 0
        for _ in range(steps):
            num_dropped += self._beam_step(group, sequence, num)
            sequence = group.sequences[0]
        dropped = f", {num_dropped} dropped and replaced by forks of the best" if num_dropped else ""
        return Explanation(
            f"{_count(steps, 'step')} of {num} beams: each has {_count(steps, 'more token')}{dropped}; "
            f"{_count(self.kv.num_copied - copied, 'block')} copied.",
            "After each token, beam search keeps the best continuations (here it drops the last beam and forks the "
            "first). Shared blocks are stored once. A dropped beam frees the blocks that only it had.",
        )

    def free(self, name: str) -> Explanation:
        sequence = self._sequence(name)
        before = self.kv.stats()
        self._drop(sequence)
        after = self.kv.stats()
        freed, cached = after.num_free - before.num_free, after.num_cached - before.num_cached
        return Explanation(
            f"{name} is freed: {_count(freed, 'block')} free again, {cached} kept in the prefix cache, "
            f"{after.num_used} still in use.",
            "Each of its blocks loses a reference. At 0 references, a full block stays in the prefix cache until its "
            "memory is needed; a partly filled block is free.",
        )

    def fill(self) -> Explanation:
        chunk, names, evicted = max(1, self.pool.num_blocks // 8), [], self.kv.pool.num_evicted
        self._next_name()
        self._check_room(1)
        while (left := self.kv.pool.num_available) and len(self.sequences) < MAX_SEQUENCES:
            name = self._next_name()
            tokens = self._new_tokens(name, 0, min(chunk, left) * self.pool.block_size)
            self._begin(name, tokens)
            names.append(name)
        evicted = self.kv.pool.num_evicted - evicted
        return Explanation(
            f"{_list(names)} take{'s' * (len(names) == 1)} all free blocks"
            + (f" and {_count(evicted, 'cached block')}." if evicted else "."),
            "Free blocks are allocated first. Then cached blocks are evicted, least recently used first. A block in "
            "use is never taken.",
        )

    def preempt(self, name: str, how: str) -> Explanation:
        if how not in ("swap", "recompute"):
            raise _bad(f"preempt takes swap or recompute, not {how[:40]!r}")
        group = self._running(name).request
        names, num_blocks = _list(self._names[s] for s in group.sequences), self.kv.count_private_blocks(group)[0]
        if how == "recompute":
            for sequence in group.sequences:
                self.kv.free(sequence)
            group.status = Status.WAITING
            explanation = Explanation(
                f"{names} freed {_count(num_blocks, 'block')}; when there is room, their tokens are recomputed.",
                "The tokens are known, so one prefill recomputes their keys and values. Blocks that stay in the prefix "
                "cache meanwhile are not recomputed.",
            )
        else:
            if not self.kv.swap_out(group, StepPlan()):
                raise RefusedError(
                    f"The host has room for {_count(self.kv.swap_space.num_free, 'block')}; {num_blocks} are needed.",
                    "A group is swapped out whole or not at all. Preempt by recompute, or use more host blocks.",
                )
            group.status = Status.SWAPPED
            self._add_phase("swap", f"{_count(num_blocks, 'block')} copied to the host", name)
            kept = len(group.shared_on_device)
            explanation = Explanation(
                f"{names} swapped out with {_count(num_blocks, 'block')}"
                + (f"; {kept} shared with others stayed." if kept else "."),
                "Each block moves once, however many of the sequences share it. A sequence and its forks are swapped "
                "together: they share blocks, and would wait for each other.",
            )
        for sequence in group.sequences:
            self.contiguous.remove(self._names[sequence])
        return explanation

    def resume(self, name: str) -> Explanation:
        group = self._sequence(name).request
        if group.status is Status.RUNNING:
            raise RefusedError(f"{name} is running.", "Only preempted sequences can be resumed.")
        names, size = _list(self._names[s] for s in group.sequences), self.pool.block_size
        if group.status is Status.SWAPPED:
            if (found := self.kv.find_swap_in_blocks(group)) is not None:
                self._check_room(found.num_needed)
                self.kv.swap_in(group, found, StepPlan())
                explanation = Explanation(
                    f"{names} swapped in with {_count(len(found.host_ids), 'block')}"
                    + (f", and share {len(found.shared_on_device)} again." if found.shared_on_device else "."),
                    "They get other blocks than before. A block table can point anywhere, so any free blocks will do.",
                )
                self._set_running(group)
                return explanation
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
        self._set_running(group)
        return Explanation(
            f"{names} resumed: {_count(num_found, 'block')} found, {_count(num_computed, 'token')} recomputed.",
            f"Full blocks of {size} tokens that are still cached, or that the group shares, are found again. The rest "
            "is computed by a prefill, like a prompt.",
        )

    def forget(self) -> Explanation:
        num = self.kv.reset_prefix_cache()
        return Explanation(
            f"The prefix cache is empty: {_count(num, 'block')} freed.",
            "Blocks in use stay, and can still be found. Cached blocks may be evicted at any time.",
        )

    # -- shared by actions ---------------------------------------------------------------------------------------------

    def _begin(self, name: str, tokens: list[int]) -> Explanation:
        self._check_num_tokens(len(tokens))
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
            self._add_phase("hit", f"block {block} already holds these tokens", name, block)
        self.kv.attach(sequence, prefix)
        self._compute(sequence, len(tokens) - sequence.num_computed)
        num_found, num_blocks = len(prefix.block_ids), len(sequence.block_ids)
        text = (
            f"{name} has {_count(len(tokens), 'token')} in {_count(num_blocks, 'block')}: {_list(sequence.block_ids)}"
        )
        if num_found:
            return Explanation(
                f"{text}. {_count(num_found, 'prefix cache hit')}.",
                "It has the same prefix as an earlier sequence, so those blocks are shared and not computed again. The "
                "last token is always computed, because its logits give the next one.",
            )
        unfilled = num_blocks * self.pool.block_size - len(tokens)
        return Explanation(
            f"{text}.",
            f"Blocks are allocated for its tokens only, nothing is reserved: {_count(unfilled, 'slot')} of its last "
            f"block {'is' if unfilled == 1 else 'are'} empty, less than a block of {self.pool.block_size}.",
        )

    def _extend(self, sequence: Sequence, tokens: list[int]) -> Explanation:
        self._check_num_tokens(len(tokens))
        name, held, size = self._names[sequence], len(sequence.block_ids), self.pool.block_size
        self._check_room(self.kv.blocks_needed([(sequence, len(tokens))]))
        before, copied = len(sequence.token_ids), self.kv.num_copied
        sequence.token_ids.extend(tokens)
        self._compute(sequence, len(tokens))
        allocated, room = sequence.block_ids[held:], -before % size
        text = f"{name} has {_count(len(tokens), 'more token')}"
        if self.kv.num_copied > copied:
            text += f"; its shared last block was copied to {sequence.block_ids[held - 1]} first"
        if allocated:
            return Explanation(
                f"{text} and {_count(len(allocated), 'more block')}: {_list(allocated)}.",
                (f"The last block had room for {room}. " if room else "The last block was full. ")
                + "A block is allocated when the one before it is full. It can be any free block of the pool.",
            )
        return Explanation(f"{text}, and no more blocks.", f"The last block had room for {room}.")

    def _fork(self, parent: Sequence) -> str:
        name, group = self._next_name(), parent.request
        self._check_num_tokens(len(parent.token_ids))
        child = Sequence(group, len(group.sequences), parent.token_ids[:], parent.max_length)
        group.sequences.append(child)
        self._name(child, name)
        self._num_named += 1
        self.kv.fork(parent, child)
        return name

    def _beam_step(self, group: Request, best: Sequence, width: int) -> int:
        """One step of beam search; returns the number of beams dropped."""
        num_dropped = 0
        if group in self._searched and len(group.sequences) == width:
            worst = group.sequences[-1]
            self._fork(group.sequences[0])  # fork before dropping, or blocks they share would be freed
            self._drop(worst)
            num_dropped = 1
        while len(group.sequences) < width:
            self._fork(best)
        self._searched.add(group)
        for sequence in group.sequences:
            self._extend(sequence, self._new_tokens(self._names[sequence], len(sequence.token_ids), 1))
        return num_dropped

    def _drop(self, sequence: Sequence) -> None:
        name = self._names.pop(sequence)
        self.kv.free(sequence)
        sequence.request.sequences.remove(sequence)
        del self.sequences[name]
        self.contiguous.remove(name)

    def _set_running(self, group: Request) -> None:
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
            self._add_phase("repoint", f"{name}'s table points to block {dst} instead of {src}", name, dst, src)
        for block in sequence.block_ids[held:]:
            self._add_phase("repoint", f"{name}'s table ends with block {block}", name, block)
        sequence.num_computed += count
        if count:
            last = sequence.block_ids[-1]
            self._add_phase("write", f"{name} writes {_count(count, 'token')}, the last into block {last}", name, last)
        self.kv.seal(sequence)

    def _check_num_tokens(self, num_more: int) -> None:
        num_held = sum(len(sequence.token_ids) for sequence in self.sequences.values()) + num_more
        if num_held > MAX_HELD_TOKENS:
            raise RefusedError(
                f"The sequences would hold {num_held:,} tokens; {MAX_HELD_TOKENS:,} is the limit.",
                "Free some of them, or use a shorter one.",
            )

    def _check_room(self, needs: int) -> None:
        pool = self.kv.pool
        if needs <= pool.num_available:
            return
        raise RefusedError(
            f"No room: it needs {_count(needs, 'block')}, {pool.num_free} are free and {pool.num_cached} cached.",
            "An engine lets the request wait, or preempts a later one. Preempt or free a sequence.",
        )

    # -- names and tokens ----------------------------------------------------------------------------------------------

    def _next_name(self) -> str:
        if len(self.sequences) >= MAX_SEQUENCES:
            raise RefusedError(f"There are {MAX_SEQUENCES} sequences, the limit.", "Free some of them.")
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
            names = ", ".join(self.sequences) or "none"
            raise RefusedError(f"There is no sequence {name[:40]!r}; there is {names}.", "It may have been freed.")
        return self.sequences[name]

    def _running(self, name: str) -> Sequence:
        sequence = self._sequence(name)
        if sequence.request.status is not Status.RUNNING:
            raise RefusedError(f"{name} is not running.", "It was preempted. Resume it first.")
        return sequence

    def _number(self, text: str, min_value: int = 1) -> int:
        if NUMBER.fullmatch(text) is None or not min_value <= int(text) <= MAX_TOKENS:
            raise _bad(f"{text[:40]!r} is not a number from {min_value} to {MAX_TOKENS}")
        return int(text)

    def _new_tokens(self, name: str, begin: int, count: int) -> list[int]:
        """New tokens, named after their position."""
        return [self._new_token(f"{name.lower()}{i + 1}") for i in range(begin, begin + count)]

    def _new_token(self, text: str) -> int:
        if len(self._texts) >= MAX_TOKENS:
            raise RefusedError(f"This history has made {MAX_TOKENS} tokens, the limit.", "Reset the pool.")
        self._texts.append(text)
        return len(self._texts) - 1

    def _typed_tokens(self, words: str) -> list[int]:
        texts = unquote(words).split()
        if not 1 <= len(texts) <= MAX_WORDS or any(len(text) > MAX_WORD_CHARS for text in texts):
            raise _bad(f"a text has 1 to {MAX_WORDS} words of at most {MAX_WORD_CHARS} characters; shorten it")
        for text in texts:
            if text not in self._typed:
                self._typed[text] = self._new_token(text)
        return [self._typed[text] for text in texts]

    # -- phases --------------------------------------------------------------------------------------------------------

    def _add_phase(
        self, kind: str, text: str, sequence: str | None = None, block: int | None = None, source: int | None = None
    ) -> None:
        self._spend(1)
        self.phases.append(Phase(kind, text, sequence, block, source))

    def _spend(self, amount: int) -> None:
        self._work += amount
        if self._work > MAX_WORK:
            raise RefusedError(
                f"This history takes more than {MAX_WORK:,} block operations and tokens, the limit.",
                "Reset the pool, or use a smaller one.",
            )

    def _listen(self, event: ev.Event) -> None:
        if isinstance(event, ev.Allocated):
            self._add_phase("allocate", f"block {event.block_id} is allocated", block=event.block_id)
        elif isinstance(event, ev.Shared):
            text = f"block {event.block_id} has {_count(event.refs, 'reference')}"
            self._add_phase("share", text, block=event.block_id)
        elif isinstance(event, ev.Released):
            left, place = _count(event.refs, "reference"), "the prefix cache" if event.cached else "the free blocks"
            kind, text = ("decrement", f"has {left} left") if event.refs else ("release", f"returns to {place}")
            self._add_phase(kind, f"block {event.block_id} {text}", block=event.block_id)
        elif isinstance(event, ev.Copied):
            # The pool decrements the count before the device copies; the other order explains it better.
            released = self.phases.pop()
            text = f"block {event.src} is copied to {event.dst}"
            self._add_phase("copy", text, block=event.dst, source=event.src)
            self.phases.append(released)
        elif isinstance(event, ev.Sealed):
            self._add_phase("seal", f"block {event.block_id} is full and sealed: it can be found", block=event.block_id)
        elif isinstance(event, ev.Evicted):
            self._add_phase("evict", f"block {event.block_id} is evicted from the prefix cache", block=event.block_id)

    def answer(self) -> dict[str, Any]:
        """The state of the pool, as in PROTOCOL.md's reply."""
        return {
            "phases": list(self.phases),
            "picture": self._snapshot(),
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
        """Blocks and slots of this pool, and of the same sequences without sharing and with contiguous reservation."""
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

    def _snapshot(self) -> Snapshot:
        kv, uids = self.kv, self._uids
        refs, seals = np.frombuffer(kv.pool.refs, np.int32), np.frombuffer(kv.pool.seal_id, np.int64)
        sealed = np.nonzero(seals)[0]
        keys = [kv.pool.key_of(block) for block in sealed.tolist()]
        parents = [0 if key is None or isinstance(key[0], bytes) else key[0] for key in keys]
        groups = dict.fromkeys(s.request for s in self.sequences.values())
        nums = [sum(g.status is status for g in groups) for status in (Status.RUNNING, Status.WAITING, Status.SWAPPED)]
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
            Counts(nums[0], nums[1], nums[2], len(self._texts)),
        )

    def _view(self, group: Request) -> RequestView:
        wait = None if group.status is Status.RUNNING else Wait("preempted")
        first = group.sequences[0]
        num_prompt, uids = len(group.prompt_token_ids), tuple(self._uids[s] for s in group.sequences)
        name = self._names[first]
        return RequestView(
            name, group.status.value, num_prompt, 0, len(uids), 0, max(0, group.num_cached_tokens), 0, wait, uids
        )


class Playgrounds:
    """Playgrounds by their histories. Thread-safe: one action at a time."""

    def __init__(self) -> None:
        self._playgrounds: OrderedDict[str, Playground] = OrderedDict()
        self._lock = Lock()

    def answer(self, history: str, action: str | None = None) -> dict[str, Any]:
        """PROTOCOL.md's reply after one more action, or without one. Raises `ParameterError` for an invalid history.

        An action that cannot be done changes nothing, and is not in the history of the reply.
        """
        actions = check_history(history, action)
        with self._lock:
            playground = self._playgrounds.pop(history, None)
            explanation, done = Explanation("", ""), True
            if playground is None or not action:  # without an action, the reply explains the last one
                playground, explanation = self._replay(actions)
            before = ";".join(actions[:-1]) if len(actions) > 1 else history
            if action:
                before = history
                try:
                    explanation = playground.do(action)
                    history = f"{history};{action}"
                except RefusedError as refused:
                    (playground, _), explanation, done = self._replay(actions), refused.explanation, False
                    playground.phases.clear()
                    playground.phases.append(Phase("refuse", explanation.text))
            self._store(history, playground)
            return {
                "history": history,
                "before": before,
                "pool": actions[0],
                "done": done,
                "says": explanation.text,
                "why": explanation.reason,
                **playground.answer(),
            }

    def _replay(self, actions: list[str]) -> tuple[Playground, Explanation]:
        playground = Playground(Pool.parse(actions[0]))
        pool = playground.pool
        explanation = Explanation(
            f"{_count(pool.num_blocks, 'block')} of {_count(pool.block_size, 'token')}, all free.",
            "A block holds the keys and values of that many tokens. A sequence's block table lists its blocks.",
        )
        for number, action in enumerate(actions[1:], 1):
            try:
                explanation = playground.do(action)
            except RefusedError as refused:
                raise _bad(f"action {number} of the history, {action[:40]}, cannot be done: {refused}") from None
        return playground, explanation

    def _store(self, history: str, playground: Playground) -> None:
        self._playgrounds[history] = playground
        while len(self._playgrounds) > MAX_POOLS:
            self._playgrounds.popitem(last=False)


def check_history(history: str, action: str | None) -> list[str]:
    """Split a history into the pool and the actions. Raises `ParameterError`."""
    actions = history.split(";")
    if len(history) + len(action or "") > MAX_CHARS or len(actions) > MAX_ACTIONS:
        raise _bad(f"a history has at most {MAX_ACTIONS} actions and {MAX_CHARS} characters; reset the pool")
    if action is not None and ";" in action:
        raise _bad("send one action at a time, without a semicolon")
    return actions


def _bad(message: str) -> ParameterError:
    return ParameterError(message, param="history")


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def _list(items: Iterable[Any]) -> str:
    """A, B and C; if there are many, the first ones and the last."""
    texts = [str(item) for item in items]
    if len(texts) > 12:
        return f"{', '.join(texts[:6])}, ... and {texts[-1]}"
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} and {texts[-1]}"
