"""Where sequences of a model with states leave checkpoints: copies of a state that later requests begin with.

A sequence can begin only where a state is kept, so these are positions where others are likely to begin:

    prompt                                                     output
    | system, tools | ... | question | generation prompt |  ....... | ....... | ...
                    ^ marks          ^                              ^ interval ^

They are the request's marks, the place where a sequence parts from another, and multiples of an interval in the output,
not close to its begin. Each is at the end of a block, and a slice ends there.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from typing import TYPE_CHECKING

from octavo.core.request import Request, Sequence
from octavo.core.types import NEVER

if TYPE_CHECKING:
    from octavo.core.cache.prefix_index import Prefix


class Checkpoints:
    """Positions of checkpoints, in blocks of `block_size` tokens.

    interval      tokens between two in an output. 0: there are none, for lack of states or of a prefix cache
    least_spared  tokens that one spares at least where sequences part
    """

    def __init__(self, block_size: int, interval: int) -> None:
        assert interval % block_size == 0, (block_size, interval)
        self.block_size, self.interval = block_size, interval
        self.least_spared = max(block_size, interval // 4)

    def marks(self, sequence: Sequence, prefix: Prefix) -> list[int]:
        """Return where a sequence that begins with a prefix leaves checkpoints, its output aside. It may have a mark by
        now, see `meet`."""
        if not self.interval:
            return []
        size, begin, run = self.block_size, prefix.num_positions, len(prefix.run) * self.block_size
        last = self._last_mark(sequence.request)
        marks = {last, *(min(mark // size * size, last) for mark in sequence.request.marks), *sequence.marks}
        # Keys and values without a state: others parted there. Or a turn goes on, and they are of the output before it.
        if run - begin >= (self.interval if begin else self.least_spared):
            marks.add(run)
        return sorted(mark for mark in marks if mark > begin)

    def _last_mark(self, request: Request) -> int:
        """Return the last mark of a prompt. One token is left after it, so that the same prompt can begin there."""
        end = len(request.prompt_token_ids) - 1
        return min(end, max(request.marks, default=end)) // self.block_size * self.block_size

    def is_own(self, sequence: Sequence, position: int) -> bool:
        """Whether a checkpoint serves the sequence's own continuation alone: the last mark, or one in its output."""
        return position == self._last_mark(sequence.request) or position not in sequence.marks

    def is_stop(self, sequence: Sequence) -> bool:
        """Whether a sequence leaves a checkpoint where it is."""
        position, request = sequence.num_computed, sequence.request
        if position in sequence.marks:
            return True
        in_output = request.is_single and position >= self._first_in_output(request)
        return self.interval > 0 and in_output and position % self.interval == 0

    def _first_in_output(self, request: Request) -> int:
        """Return the position from which on an output has checkpoints: its prompt has left one just before it."""
        return len(request.prompt_token_ids) + self.interval // 2

    def next_stop(self, sequence: Sequence) -> int:
        """Return the next position where the sequence leaves a checkpoint; `NEVER` if there is none."""
        position, request = sequence.num_computed, sequence.request
        if (i := bisect_right(sequence.marks, position)) < len(sequence.marks):
            return sequence.marks[i]
        if not self.interval or not request.is_single:
            return NEVER
        # An output that is computed again leaves one checkpoint, not all that it had.
        begin = max(position, self._first_in_output(request) - 1, len(sequence.token_ids) - self.interval)
        return (begin // self.interval + 1) * self.interval

    def cut(self, sequence: Sequence, num_steps: int) -> int:
        """Return a number of steps to decode, at most `num_steps`, so that one ends just before the next stop.

        The stop is then reached by a step of its own, and all tokens before it are known when the next step is planned.
        """
        left = self.next_stop(sequence) - sequence.num_computed
        if num_steps >= left:
            return max(1, left - 1)
        return num_steps - (num_steps > 1 and left % num_steps == 0 and self.interval > 0)

    def meet(self, sequence: Sequence, prefix: Prefix, writer: Sequence) -> bool:
        """Whether a sequence waits for another that computes what it lacks.

        With states it waits if the other will leave a checkpoint where the two part, which is made a mark of it. If the
        other is past that place, the sequence leaves one itself, for those that come after it.
        """
        if not self.interval:
            return True
        size, tokens, others = self.block_size, sequence.token_ids, writer.token_ids
        num, limit = len(prefix.run), (min(len(tokens), len(others) + 1) - 1) // size
        while num < limit and tokens[num * size : (num + 1) * size] == others[num * size : (num + 1) * size]:
            num += 1
        part = num * size
        if part - prefix.num_positions < self.least_spared:
            return False
        if part < writer.num_computed:
            sequence.marks = [part]
            return False
        if part not in writer.marks:
            insort(writer.marks, part)
        return True
