"""The playground: the engine's own KV cache, driven by hand. Each action explains what it did and why.

Tokens count as computed at once. The user takes the scheduler's decisions: which sequences run, and which are
preempted. `history` makes a playground from its actions, `picture` shows it.
"""

from __future__ import annotations

import inspect

from octavo.core.kv_cache_manager import KVCacheManager
from octavo.core.plan import StepPlan
from octavo.core.request import Request, Sequence, Status
from octavo.params.sampling_params import SamplingParams
from octavo.view.playground.contiguous import Contiguous
from octavo.view.playground.phases import Phases
from octavo.view.playground.pool import MAX_TOKENS, Explanation, Pool, RefusedError, count_of, invalid, list_of, number
from octavo.view.playground.tokens import TokenTexts

MAX_SEQUENCES = 64
MAX_HELD_TOKENS = 4 * MAX_TOKENS
"""In all sequences of a pool together. Each fork has its own list: eight bytes per token."""
MAX_BEAMS, MAX_BEAM_STEPS = 16, 100
MAX_LEN = 1 << 30
ACTIONS = tuple("new text share append type write fork beam free fill preempt resume forget".split())  # noqa: SIM905
"""Methods of `Playground` that a history may call."""


class Playground:
    """One pool, and its sequences by name."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.kv = KVCacheManager(pool.num_blocks, pool.block_size, pool.num_host_blocks)
        self.contiguous = Contiguous(pool.num_blocks * pool.block_size, pool.max_len)
        self.sequences: dict[str, Sequence] = {}
        self.phases = Phases()
        self.tokens = TokenTexts()
        self.names: dict[Sequence, str] = {}
        self.uids: dict[Sequence, int] = {}
        self._num_named = 0
        self._searched: set[Request] = set()  # groups that have done a step of beam search
        self.kv.events.subscribe(self.phases, blocks=True)

    def do(self, action: str) -> Explanation:
        """Do one action. Raises `ParameterError` for an invalid one, `RefusedError` for one that cannot be done now."""
        verb, *arguments = action.split(",")
        if verb not in ACTIONS:
            raise invalid(f"there is no action {verb[:40]!r}; the actions are {', '.join(ACTIONS)}")
        method = getattr(self, verb)
        try:
            inspect.signature(method).bind(*arguments)
        except TypeError:
            raise invalid(f"{verb} does not take {len(arguments)} arguments; see PROTOCOL.md") from None
        self.phases.latest.clear()
        explanation: Explanation = method(*arguments)
        return explanation

    # -- actions -------------------------------------------------------------------------------------------------------

    def new(self, count: str) -> Explanation:
        name = self._next_name()
        num = number(count)
        self._check_room(self.kv.blocks_for(num))
        return self._begin(name, self.tokens.new(name, 0, num))

    def text(self, words: str) -> Explanation:
        return self._begin(self._next_name(), self.tokens.typed(words))

    def share(self, count: str, num_own: str = "0") -> Explanation:
        name = self._next_name()
        num, num_new = number(count), number(num_own, min_value=0)
        self._check_room(self.kv.blocks_for(num + num_new) - self.tokens.num_shared // self.pool.block_size)
        return self._begin(name, self.tokens.shared(num) + self.tokens.new(name, num, num_new))

    def append(self, name: str, count: str) -> Explanation:
        sequence, num = self._running(name), number(count)
        self._check_room(self.kv.blocks_needed([(sequence, num)]))
        return self._extend(sequence, self.tokens.new(name, len(sequence.token_ids), num))

    def type(self, name: str, words: str) -> Explanation:
        return self._extend(self._running(name), self.tokens.typed(words))

    def write(self, name: str) -> Explanation:
        sequence = self._running(name)
        filled = len(sequence.token_ids) % self.pool.block_size
        tail = sequence.block_ids[-1]
        refs = self.kv.pool.refs[tail]
        self._extend(sequence, self.tokens.new(name, len(sequence.token_ids), 1))
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
        parent, num = self._running(name), number(count)
        children = [self._fork(parent) for _ in range(num)]
        num_blocks = len(parent.block_ids)
        return Explanation(
            f"{name} is forked: {list_of(children)} share{'s' * (num == 1)} its {count_of(num_blocks, 'block')}. "
            "No block is allocated.",
            "A fork copies the block table, not the blocks: each block gets one more reference. Memory is allocated "
            "when one of the sequences writes.",
        )

    def beam(self, name: str, width: str, num_steps: str = "1") -> Explanation:
        sequence, num = self._running(name), number(width, min_value=2)
        steps, group = number(num_steps), sequence.request
        if num > MAX_BEAMS or steps > MAX_BEAM_STEPS:
            raise invalid(f"a beam search has at most {MAX_BEAMS} beams, and {MAX_BEAM_STEPS} steps at once; use fewer")
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
            f"{count_of(steps, 'step')} of {num} beams: each has {count_of(steps, 'more token')}{dropped}; "
            f"{count_of(self.kv.num_copied - copied, 'block')} copied.",
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
            f"{name} is freed: {count_of(freed, 'block')} free again, {cached} kept in the prefix cache, "
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
            tokens = self.tokens.new(name, 0, min(chunk, left) * self.pool.block_size)
            self._begin(name, tokens)
            names.append(name)
        evicted = self.kv.pool.num_evicted - evicted
        return Explanation(
            f"{list_of(names)} take{'s' * (len(names) == 1)} all free blocks"
            + (f" and {count_of(evicted, 'cached block')}." if evicted else "."),
            "Free blocks are allocated first. Then cached blocks are evicted, least recently used first. A block in "
            "use is never taken.",
        )

    def preempt(self, name: str, how: str) -> Explanation:
        if how not in ("swap", "recompute"):
            raise invalid(f"preempt takes swap or recompute, not {how[:40]!r}")
        group = self._running(name).request
        names = list_of(self.names[s] for s in group.sequences)
        num_blocks, _ = self.kv.swapping.count_private_blocks(group)
        if how == "recompute":
            for sequence in group.sequences:
                self.kv.free(sequence)
            group.status = Status.WAITING
            explanation = Explanation(
                f"{names} freed {count_of(num_blocks, 'block')}; when there is room, their tokens are recomputed.",
                "The tokens are known, so one prefill recomputes their keys and values. Blocks that stay in the prefix "
                "cache meanwhile are not recomputed.",
            )
        else:
            if not self.kv.swapping.swap_out(group, StepPlan()):
                raise RefusedError(
                    f"The host has room for {count_of(self.kv.swap_space.num_free, 'block')}; {num_blocks} are needed.",
                    "A group is swapped out whole or not at all. Preempt by recompute, or use more host blocks.",
                )
            group.status = Status.SWAPPED
            self.phases.add("swap", f"{count_of(num_blocks, 'block')} copied to the host", name)
            kept = len(group.shared_on_device)
            explanation = Explanation(
                f"{names} swapped out with {count_of(num_blocks, 'block')}"
                + (f"; {kept} shared with others stayed." if kept else "."),
                "Each block moves once, however many of the sequences share it. A sequence and its forks are swapped "
                "together: they share blocks, and would wait for each other.",
            )
        for sequence in group.sequences:
            self.contiguous.remove(self.names[sequence])
        return explanation

    def resume(self, name: str) -> Explanation:
        group = self._sequence(name).request
        if group.status is Status.RUNNING:
            raise RefusedError(f"{name} is running.", "Only preempted sequences can be resumed.")
        names, size = list_of(self.names[s] for s in group.sequences), self.pool.block_size
        if group.status is Status.SWAPPED:
            if (found := self.kv.swapping.find_swap_in_blocks(group)) is not None:
                self._check_room(found.num_needed)
                self.kv.swapping.swap_in(group, found, StepPlan())
                explanation = Explanation(
                    f"{names} swapped in with {count_of(len(found.host_ids), 'block')}"
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
            found_here, at_sibling = self.kv.prefixes.lookup(sequence), self.kv.prefixes.sibling_prefix(sequence)
            prefix = max(found_here, at_sibling, key=lambda p: p.num_positions)
            self._check_room(self.kv.blocks_to_admit(sequence, prefix))
            self.kv.attach(sequence, prefix)
            num_found += len(prefix.block_ids)
            num_computed += len(sequence.token_ids) - sequence.num_computed
            self._compute(sequence, len(sequence.token_ids) - sequence.num_computed)
        self._set_running(group)
        return Explanation(
            f"{names} resumed: {count_of(num_found, 'block')} found, {count_of(num_computed, 'token')} recomputed.",
            f"Full blocks of {size} tokens that are still cached, or that the group shares, are found again. The rest "
            "is computed by a prefill, like a prompt.",
        )

    def forget(self) -> Explanation:
        num = self.kv.reset_prefix_cache()
        return Explanation(
            f"The prefix cache is empty: {count_of(num, 'block')} freed.",
            "Blocks in use stay, and can still be found. Cached blocks may be evicted at any time.",
        )

    # -- shared by actions ---------------------------------------------------------------------------------------------

    def _begin(self, name: str, tokens: list[int]) -> Explanation:
        self._check_num_tokens(len(tokens))
        request = Request(name, tokens, SamplingParams(max_tokens=MAX_LEN))
        request.begin(0, (0, 0), MAX_LEN)
        request.status = Status.RUNNING
        (sequence,) = request.sequences
        prefix = self.kv.prefixes.lookup(sequence)
        self._check_room(self.kv.blocks_to_admit(sequence, prefix))
        self._name(sequence, name)
        self._num_named += 1
        self.kv.prefixes.count_lookup(sequence, prefix)
        for block in prefix.block_ids:
            self.phases.add("hit", f"block {block} already holds these tokens", name, block)
        self.kv.attach(sequence, prefix)
        self._compute(sequence, len(tokens) - sequence.num_computed)
        num_found, num_blocks = len(prefix.block_ids), len(sequence.block_ids)
        held = list_of(sequence.block_ids)
        text = f"{name} has {count_of(len(tokens), 'token')} in {count_of(num_blocks, 'block')}: {held}"
        if num_found:
            return Explanation(
                f"{text}. {count_of(num_found, 'prefix cache hit')}.",
                "It has the same prefix as an earlier sequence, so those blocks are shared and not computed again. The "
                "last token is always computed, because its logits give the next one.",
            )
        unfilled = num_blocks * self.pool.block_size - len(tokens)
        return Explanation(
            f"{text}.",
            f"Blocks are allocated for its tokens only, nothing is reserved: {count_of(unfilled, 'slot')} of its last "
            f"block {'is' if unfilled == 1 else 'are'} empty, less than a block of {self.pool.block_size}.",
        )

    def _extend(self, sequence: Sequence, tokens: list[int]) -> Explanation:
        self._check_num_tokens(len(tokens))
        name, held, size = self.names[sequence], len(sequence.block_ids), self.pool.block_size
        self._check_room(self.kv.blocks_needed([(sequence, len(tokens))]))
        before, copied = len(sequence.token_ids), self.kv.num_copied
        sequence.token_ids.extend(tokens)
        self._compute(sequence, len(tokens))
        allocated, room = sequence.block_ids[held:], -before % size
        text = f"{name} has {count_of(len(tokens), 'more token')}"
        if self.kv.num_copied > copied:
            text += f"; its shared last block was copied to {sequence.block_ids[held - 1]} first"
        if allocated:
            return Explanation(
                f"{text} and {count_of(len(allocated), 'more block')}: {list_of(allocated)}.",
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
            self._extend(sequence, self.tokens.new(self.names[sequence], len(sequence.token_ids), 1))
        return num_dropped

    def _drop(self, sequence: Sequence) -> None:
        name = self.names.pop(sequence)
        self.kv.free(sequence)
        sequence.request.sequences.remove(sequence)
        del self.sequences[name]
        self.contiguous.remove(name)

    def _set_running(self, group: Request) -> None:
        group.status = Status.RUNNING
        for sequence in group.sequences:
            self.kv.prefixes.seal(sequence)
            self.contiguous.add(self.names[sequence])

    def _compute(self, sequence: Sequence, count: int) -> None:
        self.phases.spend(count)
        held, plan = len(sequence.block_ids), StepPlan()
        self.kv.grow(sequence, count, plan)
        name = self.names[sequence]
        for src, dst in plan.copies:
            self.phases.add("repoint", f"{name}'s table points to block {dst} instead of {src}", name, dst, src)
        for block in sequence.block_ids[held:]:
            self.phases.add("extend", f"{name}'s table ends with block {block}", name, block)
        sequence.num_computed += count
        if count:
            last = sequence.block_ids[-1]
            self.phases.add(
                "write", f"{name} writes {count_of(count, 'token')}, the last into block {last}", name, last
            )
        self.kv.prefixes.seal(sequence)

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
            f"No room: it needs {count_of(needs, 'block')}, {pool.num_free} are free and {pool.num_cached} cached.",
            "An engine lets the request wait, or preempts a later one. Preempt or free a sequence.",
        )

    # -- names ----------------------------------------------------------------------------------------------

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
        self.names[sequence] = name
        self.uids[sequence] = len(self.uids) + 1
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
