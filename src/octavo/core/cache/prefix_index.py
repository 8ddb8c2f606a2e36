"""The prefix index of sequences: which computed blocks one may begin with, and the seals of those that it fills.

Full blocks are found by their content in the pool's index, as a run from the start. A pin is found by its prompt. A
prefix ends where each window group has what the next query attends to:

    full      | 0 | 1 | 2 | 3 | 4 | 5 |      a run of six blocks; the prefix ends at p = 5 blocks, because of the window
    window          | 2 | 3 | 4 |            group, which needs ceil((window - 1) / block_size) blocks before p
                                  p
    state                     ^              with states, at p = 4 blocks: only there is a checkpoint
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from typing import NamedTuple

from octavo.core.block_pool import BlockPool, Key, group_key
from octavo.core.cache.checkpoints import Checkpoints
from octavo.core.request import Request, Sequence, Status, WindowTable
from octavo.core.snapshot import Fields
from octavo.core.types import NEVER, NULL_BLOCK, BlockId, SealId
from octavo.integers import cdiv


class Prefix(NamedTuple):
    """A computed prefix of a sequence: its blocks, the seal ids of the sealed ones, its length, its window tables and
    its state.

    The last block is full, except where the prefix comes from a pin.

    run  with states: seal ids of all full blocks that were found, also after the prefix
    """

    block_ids: list[BlockId]
    seal_ids: list[SealId]
    num_positions: int
    windows: Seq[WindowTable] = ()
    state: Seq[BlockId] = ()
    run: Seq[SealId] = ()

    @property
    def held(self) -> Iterator[BlockId]:
        """The blocks of all groups and of the state."""
        yield from self.block_ids
        for table in self.windows:
            yield from table.block_ids[table.num_dropped :]
        yield from self.state


def common_prefix_length(a: array[int], b: array[int]) -> int:
    """Return the number of equal tokens at the start of `a` and `b`."""
    num = min(len(a), len(b))
    if a[:num] == b[:num]:
        return num
    return next(i for i in range(num) if a[i] != b[i])


class PrefixIndex:
    """Finds and seals the prefixes of sequences, whose blocks of `block_size` tokens are in `pool`.

    enabled  prefixes are looked up and sealed; pins are found in any case
    windows  of the window groups, in tokens
    pins     pinned prompts by name: computed, blocks kept
    checkpoints  where states are kept; the pool has their size
    """

    SAVED = Fields("num_hits num_misses num_hit_tokens num_queried_tokens")

    def __init__(
        self, pool: BlockPool, block_size: int, checkpoints: Checkpoints, *, enabled: bool, windows: Seq[int] = ()
    ) -> None:
        self.pool = pool
        self.checkpoints = checkpoints
        self.windows = windows
        self.block_size = block_size
        self.enabled = enabled
        self.pins: dict[str, Sequence] = {}
        self.num_hits = self.num_misses = 0
        self.num_hit_tokens = self.num_queried_tokens = 0

    # -- finding -------------------------------------------------------------------------------------------------------

    def lookup(self, sequence: Sequence) -> Prefix:
        """Return the longest cached prefix: a run of sealed blocks from the start, or a pin's if that is longer.

        It excludes the last token, which must be computed for its logits.
        """
        length, states = len(sequence.token_ids) - 1, self.pool.state_blocks > 0
        if (self.windows or states) and len(sequence.request.sequences) > 1:  # siblings begin with its blocks, too
            length = len(sequence.request.prompt_token_ids) // self.block_size * self.block_size
        found = Prefix([], [], 0)
        if self._uses_prefix_cache(sequence):
            found = self._find_sealed_prefix(sequence, length // self.block_size)
        if states:
            found = self._trim_to_checkpoint(found, sequence.request)
        elif self.windows:
            found = self._trim_to_windows(found)
        return self._extend_by_pin(sequence, found, length)

    def _find_sealed_prefix(self, sequence: Sequence, num_blocks: int) -> Prefix:
        """Return the longest run of sealed blocks from the start, at most `num_blocks`."""
        block_ids: list[BlockId] = []
        seal_ids: list[SealId] = []
        find, seal_id = self.pool.find, self.pool.seal_id
        parent: SealId | bytes = sequence.request.salt
        for i in range(num_blocks):
            block = find((parent, self._tokens_of(sequence, i)))
            if not block:
                break
            parent = seal_id[block]
            block_ids.append(block)
            seal_ids.append(seal_id[block])
        return Prefix(block_ids, seal_ids, len(block_ids) * self.block_size)

    def first_in_window(self, group: int, num_positions: int) -> int:
        """Return the first block that a query at `num_positions`, or a later one, attends to."""
        return max(0, num_positions - self.windows[group] + 1) // self.block_size

    def _trim_to_windows(self, run: Prefix) -> Prefix:
        """Return the longest part of a run of full blocks for which the window groups' blocks are there, too."""
        size, find, groups = self.block_size, self.pool.find, range(len(self.windows))
        num = i = len(run.block_ids)  # blocks of the prefix; those from i on were looked up
        tables: list[list[BlockId]] = [[] for _ in groups]  # from the last block on
        while i > min((firsts := [self.first_in_window(group, num * size) for group in groups]), default=num):
            i -= 1
            found = [find(group_key(run.seal_ids[i], group)) if i >= firsts[group] else -1 for group in groups]
            if NULL_BLOCK in found:
                num, tables = i, [[] for _ in groups]
                continue
            for table, block in zip(tables, found, strict=True):
                if block > 0:
                    table.append(block)
        windows = [WindowTable([NULL_BLOCK] * (num - len(t)) + t[::-1], num - len(t), num) for t in tables]
        return Prefix(run.block_ids[:num], run.seal_ids[:num], num * size, windows)

    def _trim_to_checkpoint(self, run: Prefix, request: Request) -> Prefix:
        """Return the longest part of a run of full blocks that ends at a checkpoint, with what windows need there.

        A rebuilt group begins with no checkpoint in use: it may have no slice yet in the step in which another sequence
        writes that state in place.
        """
        pool, num = self.pool, len(run.block_ids)
        while num:
            head = pool.find(group_key(run.seal_ids[num - 1], len(self.windows)))
            if not head or (len(request.sequences) > 1 and pool.refs[head]):
                num -= 1
                continue
            part = Prefix(run.block_ids[:num], run.seal_ids[:num], num * self.block_size)
            part = self._trim_to_windows(part)
            if len(part.block_ids) == num:
                return part._replace(state=pool.find_state(run.seal_ids[num - 1]), run=run.seal_ids)
            num = len(part.block_ids)
        return Prefix([], [], 0, self.empty_tables(), run=run.seal_ids)

    def _extend_by_pin(self, sequence: Sequence, found: Prefix, length: int) -> Prefix:
        """Return the prefix that a pin has of the sequence, partial tail included, or `found` if no pin has more.

        It has at most `length` positions.

        pin       | full | full | tail . . |      Where they differ within the tail, the sequence gets a copy of the
        sequence  | same | same | same x y | ...  tail to continue from. A full block is not copied but recomputed.
        """
        size, request, best = self.block_size, sequence.request, found
        if request.sampling_params.skip_reading_prefix_cache:
            return found
        for pin in self.pins.values():
            if pin.request.salt == request.salt:
                num = common_prefix_length(pin.request.prompt_token_ids, sequence.token_ids)
                num = min(num, length)
                if num < pin.num_computed // size * size:
                    num = num // size * size
                if pin.state and num < pin.num_computed:  # the state is of all its positions
                    continue
                if num > best.num_positions and self._has_windows_at(pin, num):
                    best = self._prefix_of(pin, num)
        return best

    def _has_windows_at(self, sequence: Sequence, num: int) -> bool:
        """False if a query at `num` attends to what the sequence never had: it began with a prefix itself."""
        tables = enumerate(sequence.windows)
        return all(table.num_dropped <= self.first_in_window(group, num) for group, table in tables)

    def _prefix_of(self, sequence: Sequence, num: int) -> Prefix:
        """Return the first `num` positions of a sequence, whose window groups have what the next query attends to. A
        sequence with a state has computed no more."""
        end, windows = cdiv(num, self.block_size), []
        for group, table in enumerate(sequence.windows):
            first = self.first_in_window(group, num)
            windows.append(WindowTable([NULL_BLOCK] * first + table.block_ids[first:end], first))
        return Prefix(
            sequence.block_ids[:end], sequence.seal_ids[: num // self.block_size], num, windows, sequence.state
        )

    def _uses_prefix_cache(self, sequence: Sequence) -> bool:
        """True if the sequence may begin with blocks found in the index."""
        return self.enabled and not sequence.request.sampling_params.skip_reading_prefix_cache

    def next_key(self, sequence: Sequence, seal_ids: Seq[SealId]) -> Key:
        """Return the key of the block after those of `seal_ids`. The known tokens must fill it."""
        parent = seal_ids[-1] if seal_ids else sequence.request.salt
        return parent, self._tokens_of(sequence, len(seal_ids))

    def is_in_flight(self, writes: Mapping[Key, Sequence], sequence: Sequence, prefix: Prefix) -> bool:
        """True if a sequence waits for another, which computes the next block, or one that was found without a state.

        writes  the next block of each of the others
        """
        found, size = prefix.run or prefix.seal_ids, self.block_size
        end = min(len(found) + 1, (len(sequence.token_ids) - 1) // size)
        for num in range(len(prefix.seal_ids), end if self._uses_prefix_cache(sequence) else 0):
            if writer := writes.get((found[num - 1] if num else sequence.request.salt, self._tokens_of(sequence, num))):
                return self.checkpoints.meet(sequence, prefix, writer)
        return False

    def sibling_prefix(self, sequence: Sequence) -> Prefix:
        """Return the longest run of full blocks that an earlier sequence of the same request has in common with this.

        A preempted group is recomputed one sequence at a time and takes these blocks from the sibling itself. The index
        has none of them when prefix caching is off, or where an equal block elsewhere is the canonical one. With states
        it has no such run: see `common_prefix`.
        """
        size, tokens = self.block_size, sequence.token_ids
        best, longest = Prefix([], [], 0, self.empty_tables()), 0
        for sibling in sequence.request.sequences:
            if sibling is sequence or self.pool.state_blocks:
                break
            max_blocks = min(sibling.num_computed, len(tokens) - 1) // size
            n = 0
            while n < max_blocks and sibling.token_ids[n * size : (n + 1) * size] == tokens[n * size : (n + 1) * size]:
                n += 1
            if n > longest:
                best, longest = self._prefix_of(sibling, n * size), n
        return best

    def common_length(self, request: Request) -> int:
        """Return the positions that all sequences of a request have in common: whole blocks, less than any has."""
        size, first = self.block_size, request.sequences[0].token_ids
        num = (min(len(seq.token_ids) for seq in request.sequences) - 1) // size * size
        for seq in request.sequences[1:]:
            num = min(num, common_prefix_length(first, seq.token_ids)) // size * size
        return num

    def common_prefix(self, request: Request) -> Prefix:
        """Return what all sequences of a request have in common; the first one has computed no more."""
        return self._prefix_of(request.sequences[0], self.common_length(request))

    def empty_tables(self) -> list[WindowTable]:
        return [WindowTable([]) for _ in self.windows]

    def count_lookup(self, sequence: Sequence, prefix: Prefix) -> None:
        self.num_hits += len(prefix.block_ids)
        self.num_misses += cdiv(len(sequence.token_ids), self.block_size) - len(prefix.block_ids)
        self.num_hit_tokens += prefix.num_positions
        self.num_queried_tokens += len(sequence.token_ids)

    # -- sealing -------------------------------------------------------------------------------------------------------

    def seal(self, sequence: Sequence) -> None:
        """Seal the leading blocks whose tokens are all known to the host and computed or planned on the device.

        A stop token does not count: the device may have stopped before it wrote that position.
        """
        if not self.enabled:
            return
        known = len(sequence.token_ids) - (sequence.stop_token is not None)
        num_full = min(known, sequence.num_computed) // self.block_size
        seal_ids, seal = sequence.seal_ids, self.pool.seal
        for i in range(len(seal_ids), num_full):
            seal_ids.append(seal(sequence.block_ids[i], self.next_key(sequence, seal_ids)))
            for group, table in enumerate(sequence.windows):
                if block := table.block_ids[i]:
                    seal(block, group_key(seal_ids[i], group))
        self.set_seals(sequence, seal_ids)
        if (
            sequence.state
            and self.checkpoints.is_stop(sequence)
            and len(seal_ids) * self.block_size == sequence.num_computed
        ):
            self._leave_checkpoint(sequence)

    def _leave_checkpoint(self, sequence: Sequence) -> None:
        """Seal a state where it stands. Its next slice writes a new one.

        The checkpoint before it has served its purpose. But the next turn of a session may begin at the end of a prompt
        or in the output, so these two are mates, and a later prompt passes both.
        """
        pool, position = self.pool, sequence.num_computed
        pool.seal_state(sequence.state, sequence.seal_ids[-1], parts=not self.checkpoints.is_own(sequence, position))
        head = pool.find(group_key(sequence.seal_ids[-1], pool.num_windows))
        begin, before, seal_id = sequence.checkpoint
        if seal_id and pool.seal_id[before] == seal_id and before != head:
            num_prompt, mate = len(sequence.request.prompt_token_ids), pool.mates[before]
            if num_prompt <= position and begin < num_prompt:
                pool.mate(head, before)
            else:
                pool.pass_state(before)
                if mate and position < num_prompt:
                    pool.pass_state(mate)
                elif mate:
                    pool.mate(head, mate)
        sequence.checkpoint = position, head, pool.seal_id[head]

    def set_seals(self, sequence: Sequence, seal_ids: list[SealId]) -> None:
        sequence.seal_ids = seal_ids
        sequence.seal_at = (len(seal_ids) + 1) * self.block_size if self.enabled else NEVER

    def discard(self, sequence: Sequence) -> None:
        """Unseal the blocks of a sequence with invalid values, both those it uses alone and those it left in the cache.

        Cached ones are all of its blocks after a preemption, and those it dropped from the attention window while it
        runs. Unlike `lookup`, the search ignores `skip_reading_prefix_cache` and includes the last full block.
        """
        pool = self.pool
        held: dict[BlockId, None] = {}
        if sequence.request.status is Status.RUNNING:
            held = dict.fromkeys(block for block_ids, _ in sequence.tables for block in block_ids)
            held |= dict.fromkeys(sequence.state[-1:])
        run = self._find_sealed_prefix(sequence, len(sequence.token_ids) // self.block_size)
        below = [pool.find(group_key(seal, g)) for g in range(len(self.windows)) for seal in run.seal_ids]
        if pool.state_blocks:
            below += [pool.find(group_key(seal, pool.num_windows)) for seal in run.seal_ids]
        for block in held | dict.fromkeys(below) | dict.fromkeys(run.block_ids):
            if pool.refs[block] == (block in held) and pool.seal_id[block]:
                pool.unseal(block)

    def _tokens_of(self, sequence: Sequence, index: int) -> bytes:
        size = self.block_size
        return sequence.token_ids[index * size : (index + 1) * size].tobytes()
