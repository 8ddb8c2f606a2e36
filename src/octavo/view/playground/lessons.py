"""The playground's lessons, one idea each. Every number in a lesson's text is in a step's `expect`, which the tests
compare with the core: names of `Playground.compare` and of `KVStats`, or `tables`, the block table of each sequence."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from itertools import accumulate
from math import exp
from typing import Any

from octavo.view.playground.core_lines import LINES


@dataclass(frozen=True, slots=True)
class LessonStep:
    """`text` is the step's explanation or a question. `look` describes what to look at, or explains the answer."""

    text: str
    history: str
    look: str
    expect: dict[str, Any] = field(default_factory=dict)
    action: str | None = None
    """An action after the history, which is refused."""
    rows: tuple[tuple[str, ...], ...] = ()
    """A table below the text; its first row is the head."""
    choices: tuple[str, ...] = ()
    """Answers to the text, which is a question. The last action of `history` is done after the right one."""
    answer: int = 0
    block: int = 0
    """Selected in the grid."""
    lines: tuple[int, ...] = ()
    """Current lines of the lesson's code, from 0."""
    stops: tuple[str, ...] = ()
    """Histories that a slider chooses from, one a row of `rows`; `history` is one of them."""


@dataclass(frozen=True, slots=True)
class Lesson:
    id: str
    title: str
    text: str
    steps: tuple[LessonStep, ...]
    colour: str = "state"
    """What the grid's colours show: sharing is seen best by owner."""
    unit: int = 0
    """Bytes of a token in which the counters show the pool; 0: blocks."""
    code: tuple[str, ...] = ()
    """If it is `core_lines.LINES`, its current lines are those of each action's phases."""

    def as_dict(self) -> dict[str, Any]:
        """Without empty fields."""
        steps = [_filled(step) for step in self.steps]
        return {**_filled(self), "steps": [{k: v for k, v in step.items() if k != "expect"} for step in steps]}


def _filled(item: Lesson | LessonStep) -> dict[str, Any]:
    values = {each.name: getattr(item, each.name) for each in fields(item)}
    return {name: value for name, value in values.items() if value or (name == "answer" and values["choices"])}


_FOUR_BEAMS = "64x16;new,64;fork,A,3"
_FIGURE = "8x4;new,1;new,1;new,1;new,1;new,1;new,1;new,1;free,C;free,A;free,G"

_NINE = f"{_FIGURE};text,Four%20score%20and%20seven%20years%20ago%20our;type,H,fathers;type,H,brought"
_PAGES = "12x4x16;new,6;new,6;free,A;new,14"
_SAMPLES = "64x16;new,60;fork,A,3"
_WRITTEN = f"{_SAMPLES};write,A;write,B;write,C;write,D"
_USERS = ";share,4096,16"

_KERNEL = (
    "top, total, out = -inf, 0, 0",
    "for i in range(len(table)):",
    "  b = table[i]",
    "  for slot in range(filled(i)):",
    "    score = scale * q @ K[b][slot]",
    "    new_top = max(top, score)",
    "    old = exp(top - new_top)",
    "    now = exp(score - new_top)",
    "    total = old*total + now",
    "    out = old*out + now*V[b][slot]",
    "    top = new_top",
    "return out / total",
)
_SCORES = (1, 0, 3, 2, 0, 1, 4, 2, 3)


def _kernel_steps() -> tuple[LessonStep, ...]:
    """One step per slot of H, whose 9 tokens are in blocks 7, 1 and 3."""
    table, tops = (7, 1, 3), tuple(accumulate(_SCORES, max))
    seen = {"tables": {"H": [*table]}, "num_tokens": {"H": 9}}
    steps = [
        LessonStep(
            "A query reads all keys and values of H: 9 tokens in three blocks. One program does it per sequence and "
            "head.",
            _NINE,
            "The kernel reads a block's number once, not once per token. It computes whole blocks at a time; here it "
            "goes slot by slot.",
            seen,
            lines=(0,),
        )
    ]
    for position, score in enumerate(_SCORES):
        i, slot = divmod(position, 4)
        top, total = tops[position], sum(exp(each - tops[position]) for each in _SCORES[: position + 1])
        if slot == 0:
            text = f"Entry {i} of the table is {table[i]}. Slot 0 of block {table[i]} holds position {position}."
        else:
            text = f"Slot {slot} of block {table[i]}: position {position}."
        if position == 8:
            look = "Only 1 slot of block 3 is filled. The loop ends here: the empty slots are never read."
        elif position and top > tops[position - 1]:
            look = "A new maximum. The sum and the output so far are scaled down, so exp never overflows."
        elif position:
            look = "The maximum stays. The slot adds its weight to the sum, and its weighted value to the output."
        else:
            look = "The first score is the maximum, so its weight is exp(0) = 1."
        steps.append(
            LessonStep(
                text,
                _NINE,
                look,
                seen,
                rows=(("score", "maximum", "sum of weights"), (str(score), str(top), f"{total:.3f}")),
                block=table[i],
                lines=tuple(range(1 if slot == 0 else 3, 11)),
            )
        )
    steps.append(
        LessonStep(
            "All slots are read. The output is divided by the sum: this is exact softmax attention.",
            _NINE,
            "The order of the blocks in memory changed nothing. The table costs one more read per block. The paper "
            "measured its attention kernel as 20 to 26 % slower than a contiguous one.",
            seen,
            lines=(11,),
        )
    )
    return tuple(steps)


_LENGTHS = (1000, 700, 500, 300, 200, 100, 50, 20)
_KERNEL_MS = {1: 112.0, 2: 58.0, 4: 34.4, 8: 26.8, 16: 24.1, 32: 24.4, 64: 24.0, 128: 24.0, 256: 23.6}
"""By block size: a decode step's attention over sequences of these lengths. docs/view.md says how it was measured."""


def _block_size_rows() -> Iterator[tuple[str, ...]]:
    yield "block", "empty slots", "table entries", "attention, ms"
    for size, time_ms in _KERNEL_MS.items():
        num_entries = sum(-(-length // size) for length in _LENGTHS)
        yield str(size), f"{num_entries * size - sum(_LENGTHS):,}", f"{num_entries:,}", f"{time_ms:.1f}"


_BLOCK_SIZES = tuple(f"{4096 // size}x{size}" + "".join(f";new,{n}" for n in _LENGTHS) for size in _KERNEL_MS)
_MANAGER = "4x4;new,6"
_COPIED = f"{_MANAGER};append,A,1;fork,A;write,A"
_FREED = f"{_COPIED};free,B;append,A,1;free,A"

LESSONS = (
    Lesson(
        "fragmentation",
        "Fragmentation",
        "A sequence needs one slot of KV cache per token, and its final length is not known in advance. With "
        "contiguous reservation, each sequence must reserve the maximum length. Blocks are allocated as needed.",
        (
            LessonStep(
                "A sequence of 80 tokens. The maximum length is 2,048 tokens, and there are 2,048 slots in all.",
                "128x16x2048;new,80",
                "The second grid: all 2,048 slots are reserved, and 1,968 of them (96 %) may never be used. With "
                "blocks of 16 tokens, the sequence takes 5 blocks.",
                {"num_used": 5, "paged_waste_slots": 0, "contiguous_waste_slots": 1968, "contiguous_refused": 0},
            ),
            LessonStep(
                "Three more sequences of 80 tokens.",
                "128x16x2048;new,80;new,80;new,80;new,80",
                "With contiguous reservation, three of the four find no room. With blocks, all four take 20 of 128.",
                {"num_used": 20, "contiguous_refused": 3, "num_free": 108},
            ),
            LessonStep(
                "Lengths that are not multiples of 16: the last block of each sequence is partly empty.",
                "128x16x2048;new,81;new,95",
                "81 tokens waste 15 slots, 95 tokens waste 1. The waste is always less than one block.",
                {"num_used": 12, "paged_waste_slots": 16},
            ),
            LessonStep(
                "Reservations of 300 slots in 1,024: three fit. The 124 slots left over are too few for a fourth.",
                "64x16x300;new,40;new,40;new,40;new,40",
                "External fragmentation: 124 slots are free, but the fourth sequence waits. Blocks have one size, so "
                "every free block can be used.",
                {"contiguous_external_slots": 124, "contiguous_refused": 1, "num_used": 12, "paged_waste_slots": 32},
            ),
        ),
    ),
    Lesson(
        "bytes",
        "Bytes and waste",
        "A token's keys and values take 2 x layers x KV heads x head size x 2 bytes in bfloat16. The counters show the "
        "pool in bytes of Llama 2 7B here; choose another unit there.",
        (
            LessonStep(
                "64 blocks of 16 tokens, and a prompt of 64 tokens.",
                "64x16;new,64",
                "A block of Llama 2 7B has 8 MiB. The pool has 512 MiB, and the prompt takes 32 MiB.",
                {"num_used": 4, "num_free": 60},
                rows=(
                    ("model", "sizes", "token", "block"),
                    ("Llama 2 7B", "32 x 32 x 128", "512 KiB", "8 MiB"),
                    ("Llama 3.1 8B", "32 x 8 x 128", "128 KiB", "2 MiB"),
                ),
            ),
            LessonStep(
                "A prompt of 4,096 tokens, and 16 tokens of one user.",
                f"512x16{_USERS}",
                "256 blocks hold the prompt: 2 GiB. One more holds the user's tokens.",
                {"num_used": 257},
            ),
            LessonStep(
                "Three more users with the same prompt.",
                f"512x16{4 * _USERS}",
                "260 blocks: 2,080 MiB. Without sharing, 1,028 blocks would take 8,224 MiB, more than 8 GiB.",
                {"num_used": 260, "unshared_blocks": 1028, "num_hits": 768},
            ),
            LessonStep(
                "Waste of contiguous memory: (reserved - filled) slots of each sequence, and (sharers - 1) x the "
                "prefix. Four sequences share 64 tokens and have 10 of their own; each reserves 512 slots.",
                "128x16x512" + 4 * ";share,64,10",
                "Reserved and empty: 1,752 slots, 876 MiB. Copies of the prefix: 3 x 64 slots, 96 MiB. In blocks: 24 "
                "slots, 12 MiB.",
                {"contiguous_waste_slots": 1752, "paged_waste_slots": 24, "num_hit_tokens": 192, "num_used": 8},
            ),
        ),
        unit=524_288,
    ),
    Lesson(
        "block-tables",
        "Block tables",
        "A sequence's tokens are in order, but its blocks can be anywhere in the pool. The block table maps positions "
        "to blocks: token t is in block table[t // block size], slot t % block size.",
        (
            LessonStep(
                "A prompt of 7 tokens, in blocks of 4. Other blocks are in use; the next free ones are 7, 1 and 3.",
                f"{_FIGURE};text,Four%20score%20and%20seven%20years%20ago%20our",
                "The block table is 7, 1. Block 7 is full, block 1 holds three tokens.",
                {"tables": {"H": [7, 1]}, "num_tokens": {"H": 7}},
            ),
            LessonStep(
                "The first decoded token goes into the last free slot of block 1.",
                f"{_FIGURE};text,Four%20score%20and%20seven%20years%20ago%20our;type,H,fathers",
                "No block is allocated. Block 1 is full now.",
                {"tables": {"H": [7, 1]}, "num_tokens": {"H": 8}},
            ),
            LessonStep(
                "The second decoded token needs a new block and gets block 3.",
                f"{_FIGURE};text,Four%20score%20and%20seven%20years%20ago%20our;type,H,fathers;type,H,brought",
                "The block table is 7, 1, 3. Attention reads the blocks through the table, as if they were contiguous.",
                {"tables": {"H": [7, 1, 3]}, "num_tokens": {"H": 9}},
            ),
        ),
        colour="owner",
    ),
    Lesson(
        "virtual-memory",
        "Virtual memory",
        "An operating system gives a process pages of one size, and a page table finds them. The engine does the same "
        "for a sequence, with blocks.",
        (
            LessonStep(
                "A process sees its pages in order. A sequence sees its logical blocks in order.",
                _PAGES,
                "C's four logical blocks are in blocks 2, 5, 6 and 7 of the pool. Block 2 was another sequence's "
                "before.",
                {"tables": {"C": [2, 5, 6, 7], "B": [3, 4]}, "num_tokens": {"C": 14}},
                rows=(
                    ("operating system", "engine", "here"),
                    ("process", "sequence", "C"),
                    ("virtual page", "logical block", "0, 1, 2, 3"),
                    ("physical frame", "block of the pool", "2, 5, 6, 7"),
                    ("page table", "block table", "0→2, 1→5, …"),
                ),
            ),
            LessonStep(
                "An address is a page and an offset. A position is a logical block and a slot. Find position 9 of C.",
                _PAGES,
                "Logical block 2 is in block 6 of the pool, so position 9 is in slot 1 of block 6.",
                {"tables": {"C": [2, 5, 6, 7]}},
                rows=(
                    ("position", "logical block", "slot", "block"),
                    ("9", "9 // 4 = 2", "9 % 4 = 1", "table[2] = 6"),
                ),
                block=6,
            ),
            LessonStep(
                "A page gets a frame when it is first touched. C grows by 3 tokens.",
                f"{_PAGES};append,C,3",
                "Two tokens fill block 7. The third touches logical block 4, which gets block 8.",
                {"tables": {"C": [2, 5, 6, 7, 8]}, "num_tokens": {"C": 17}},
                block=8,
            ),
            LessonStep(
                "Frames have one size, so no hole has the wrong one. B ends, and D needs 7 blocks.",
                f"{_PAGES};append,C,3;free,B;new,25",
                "D takes every block that C does not hold: 4, 9 to 12, 1 and 3. The pool is full, with no fragment "
                "left.",
                {"num_used": 12, "num_free": 0, "tables": {"D": [4, 9, 10, 11, 12, 1, 3]}},
            ),
            LessonStep(
                "fork() copies the page table, not the pages. C is forked instead.",
                f"{_PAGES};append,C,3;fork,C",
                "Two tables have the same 5 blocks. Each block has 2 references.",
                {"num_used": 7, "unshared_blocks": 12, "tables": {"C": [2, 5, 6, 7, 8], "D": [2, 5, 6, 7, 8]}},
            ),
            LessonStep(
                "The first write to a shared page copies it. D writes a token.",
                f"{_PAGES};append,C,3;fork,C;write,D",
                "Block 8 is copied to block 9, and D's last entry changes. C sees nothing of it.",
                {"num_copied": 1, "tables": {"C": [2, 5, 6, 7, 8], "D": [2, 5, 6, 7, 9]}},
            ),
            LessonStep(
                "Pages are swapped out one by one. Sequences are swapped out as a whole, with their forks.",
                f"{_PAGES};append,C,3;fork,C;write,D;preempt,C,swap",
                "Attention reads all blocks for every token, so a sequence without one block cannot run. All 6 blocks "
                "are on the host.",
                {"num_swapped_out": 6, "num_host_used": 6, "num_used": 2},
                rows=(
                    ("no room", "process", "sequence"),
                    ("swapped", "cold pages", "all blocks"),
                    ("or else", "nothing", "freed, computed again"),
                ),
            ),
            LessonStep(
                "A page table has levels, and the processor caches its entries. A block table is one list of numbers.",
                "160x16;new,2048",
                "2,048 tokens have 128 entries of 4 bytes: 512 bytes. Their keys and values take 256 MiB in Llama 3.1 "
                "8B.",
                {"num_used": 128},
            ),
        ),
        colour="owner",
    ),
    Lesson(
        "copy-on-write",
        "Copy-on-write",
        "A fork has the same tokens, so it shares all blocks. Each block has a reference count. A sequence that writes "
        "into a shared block copies it first, and only last blocks are ever written.",
        (
            LessonStep(
                "A prompt of 7 tokens in blocks of 4, and a fork of it.",
                "8x4;new,7;fork,A",
                "Both block tables are 1, 2. Each block has 2 references, and 2 blocks are used instead of 4.",
                {"num_used": 2, "unshared_blocks": 4, "tables": {"A": [1, 2], "B": [1, 2]}, "num_copied": 0},
            ),
            LessonStep(
                "A writes its next token.",
                "8x4;new,7;fork,A;write,A",
                "Allocate block 3, copy block 2 to it, decrement the reference count of block 2, and point A's table "
                "at block 3. Block 1 stays shared.",
                {"num_used": 3, "tables": {"A": [1, 3], "B": [1, 2]}, "num_copied": 1},
            ),
            LessonStep(
                "B writes its next token.",
                "8x4;new,7;fork,A;write,A;write,B",
                "Nothing is copied: B has the only reference to block 2. Two sequences cost one copy.",
                {"num_used": 3, "tables": {"A": [1, 3], "B": [1, 2]}, "num_copied": 1},
            ),
            LessonStep(
                "A prompt of 8 tokens fills its 2 blocks. Its fork writes.",
                "8x4;new,8;fork,A;write,B",
                "Nothing is copied: a full block is never written again. The token goes into a new block of B.",
                {"num_used": 3, "tables": {"A": [1, 2], "B": [1, 2, 3]}, "num_copied": 0},
            ),
        ),
        colour="owner",
    ),
    Lesson(
        "parallel-samples",
        "Parallel samples",
        "One prompt, several answers (n = 4). The prompt is computed once; then the sequence is forked. The samples "
        "diverge at once, since each draws its own tokens.",
        (
            LessonStep(
                "A prompt of 60 tokens in blocks of 16, and four samples of it.",
                _SAMPLES,
                "4 blocks with 4 references each, instead of 16 blocks. The last block has 12 tokens and 4 empty "
                "slots.",
                {"num_used": 4, "unshared_blocks": 16, "paged_waste_slots": 4},
            ),
            LessonStep(
                "A, B, C and D draw their first tokens, one after the other.",
                _WRITTEN,
                "A, B and C copy the last block. D has the only reference left, and writes in place: 3 copies for 4 "
                "samples.",
                {
                    "num_copied": 3,
                    "num_used": 7,
                    "tables": {"A": [1, 2, 3, 5], "B": [1, 2, 3, 6], "C": [1, 2, 3, 7], "D": [1, 2, 3, 4]},
                },
            ),
            LessonStep(
                "The samples have different lengths: 40 more tokens for A, 10 for B, 25 for C.",
                f"{_WRITTEN};append,A,40;append,B,10;append,C,25",
                "Each takes blocks of its own as it grows. 13 blocks instead of 22; the 3 full blocks of the prompt "
                "stay shared.",
                {"num_used": 13, "unshared_blocks": 22, "num_copied": 3},
            ),
            LessonStep(
                "D ends first.",
                f"{_WRITTEN};append,A,40;append,B,10;append,C,25;free,D",
                "Only block 4 is free again. The prompt's blocks go from 4 references to 3.",
                {"num_used": 12, "num_free": 52},
            ),
            LessonStep(
                "B and C end, too.",
                f"{_WRITTEN};append,A,40;append,B,10;append,C,25;free,D;free,B;free,C",
                "A keeps its 7 blocks. No prompt block was ever moved or copied as a whole.",
                {"num_used": 7, "num_copied": 3, "tables": {"A": [1, 2, 3, 5, 8, 9, 10]}},
            ),
        ),
        colour="owner",
    ),
    Lesson(
        "beam-search",
        "Beam search",
        "Beams share their prompt, and often much of their output. To measure what sharing saves, compare with the "
        "same number of separate sequences of the same length.",
        (
            LessonStep(
                "A prompt of 64 tokens, and 4 beams of it, in blocks of 16.",
                _FOUR_BEAMS,
                "4 blocks with 4 references each. Four separate sequences would take 16.",
                {"num_used": 4, "unshared_blocks": 16},
            ),
            LessonStep(
                "Each beam gets 10 tokens. 64 is a multiple of 16, so each beam begins a new block.",
                f"{_FOUR_BEAMS};append,A,10;append,B,10;append,C,10;append,D,10",
                "4 shared blocks and 1 more for each beam: 8. Separate sequences of 74 tokens take 5 each: 20, not the "
                "16 of their prompts alone.",
                {"num_used": 8, "unshared_blocks": 20, "num_copied": 0},
            ),
            LessonStep(
                "The same as a beam search: after each token the worst beam is dropped and the best one is forked.",
                "64x16;new,64;beam,A,4,10",
                "8 blocks again. Nine times a forked beam diverged within a block. Each time one block was copied, "
                "never a whole beam: 9 copies.",
                {"num_used": 8, "unshared_blocks": 20, "num_copied": 9},
            ),
            LessonStep(
                "After 40 tokens of such a search.",
                "64x16;new,64;beam,A,4,40",
                "The best beam and its fork share 2 blocks of output, too: 14 blocks, not 16. Separate sequences would "
                "take 28. A dropped beam frees the blocks that only it had.",
                {"num_used": 14, "unshared_blocks": 28, "num_cached": 2},
            ),
            LessonStep(
                "A prompt of 256 tokens, 4 beams.",
                "128x16;new,256;fork,A,3",
                "16 blocks instead of 64. The longer the prompt, the closer to one fourth.",
                {"num_used": 16, "unshared_blocks": 64},
            ),
        ),
        colour="owner",
    ),
    Lesson(
        "prefix-caching",
        "Prefix caching and eviction",
        "Requests often share a prefix. A full block is found by its tokens and all tokens before them. It stays in "
        "the prefix cache after its last reference is gone, until its memory is needed.",
        (
            LessonStep(
                "A request has a shared prefix of 12 tokens, and 3 tokens of its own.",
                "12x4;share,12,3",
                "4 blocks. 3 of them are full and in the prefix cache.",
                {"num_used": 4, "num_hits": 0, "num_sealed": 3},
            ),
            LessonStep(
                "A second request has the same prefix of 12 tokens.",
                "12x4;share,12,3;share,12,2",
                "3 blocks are prefix cache hits and are shared, 1 is new: 5 blocks instead of 8. Its prefill computes "
                "2 tokens instead of 14.",
                {"num_used": 5, "unshared_blocks": 8, "num_hits": 3, "num_hit_tokens": 12},
            ),
            LessonStep(
                "Both requests finish.",
                "12x4;share,12,3;share,12,2;free,A;free,B",
                "The 3 blocks of the prefix have no references and stay cached. The partly filled blocks are free.",
                {"num_used": 0, "num_cached": 3, "num_free": 9},
            ),
            LessonStep(
                "A third request with the same prefix.",
                "12x4;share,12,3;share,12,2;free,A;free,B;share,12,1",
                "All 3 blocks are hits.",
                {"num_used": 4, "num_cached": 0, "num_hits": 6},
            ),
            LessonStep(
                "Again from where both had finished: a request needs 10 blocks, and 9 are free.",
                "12x4;share,12,3;share,12,2;free,A;free,B;new,40",
                "One block is evicted: the last of the prefix. The blocks before it are useful without it; it would "
                "be useless without them.",
                {"num_used": 10, "num_cached": 2, "num_free": 0, "num_evicted": 1},
            ),
            LessonStep(
                "A last request with the prefix.",
                "12x4;share,12,3;share,12,2;free,A;free,B;new,40;free,C;share,12,1",
                "2 blocks are hits. The third is computed again.",
                {"num_hits": 5, "num_used": 4},
            ),
        ),
    ),
    Lesson(
        "preemption",
        "Preemption",
        "Memory can run out while sequences grow. Then the latest request is preempted, with all its forks. Its blocks "
        "are swapped out to host memory, or freed and recomputed later.",
        (
            LessonStep(
                "8 blocks of 4 tokens: A has 3 blocks. B and its fork C share 4, and C writes.",
                "8x4;new,12;new,14;fork,B;write,C",
                "All 8 blocks are used: C has its own copy of the last one.",
                {"num_used": 8, "num_free": 0, "num_copied": 1},
            ),
            LessonStep(
                "A needs a block for its next token, but none is left.",
                "8x4;new,12;new,14;fork,B;write,C",
                "No room: 1 block is needed, 0 are free and 0 are cached. Nothing has changed.",
                {"num_used": 8},
                action="append,A,1",
            ),
            LessonStep(
                "B and C are swapped out together.",
                "8x4;new,12;new,14;fork,B;write,C;preempt,B,swap",
                "5 blocks move, each once, though 3 of them are shared. On the device, 3 blocks of the prompt stay in "
                "the prefix cache until their memory is needed.",
                {"num_used": 3, "num_host_used": 5, "num_swapped_out": 5, "num_cached": 3},
            ),
            LessonStep(
                "A grows and finishes. B and C are swapped in.",
                "8x4;new,12;new,14;fork,B;write,C;preempt,B,swap;append,A,9;free,A;resume,B",
                "5 blocks again: other ones than before, shared as before.",
                {"num_used": 5, "num_host_used": 0, "num_swapped_in": 5, "unshared_blocks": 8},
            ),
            LessonStep(
                "The alternative: B and C free their blocks and are recomputed.",
                "8x4;new,12;new,14;fork,B;write,C;preempt,B,recompute;append,A,1;free,A;resume,B",
                "Blocks that were still cached are hits: of 29 tokens in two sequences, 5 were recomputed.",
                {"num_used": 5, "num_swapped_out": 0, "unshared_blocks": 8},
            ),
        ),
    ),
    Lesson(
        "kernel",
        "The kernel",
        "Attention reads keys and values through the block table. Its running maximum and sum need no second pass.",
        _kernel_steps(),
        colour="owner",
        code=_KERNEL,
    ),
    Lesson(
        "block-size",
        "The block size",
        "Small blocks waste fewer slots. Large blocks need shorter tables and fewer lookups. Eight sequences of 20 to "
        "1,000 tokens are in 4,096 slots here; the slider sets the block size.",
        (
            LessonStep(
                "Move the slider from 16 to 256, and then to 1.",
                _BLOCK_SIZES[4],
                "A sequence wastes less than one block: half a block on average. In blocks of 16 that is 74 slots of "
                "2,944, in blocks of 256 a quarter of all. Blocks of 1 waste none, but the tables have 2,870 entries.",
                {"num_used": 184, "paged_waste_slots": 74},
                rows=(*_block_size_rows(),),
                stops=_BLOCK_SIZES,
            ),
            LessonStep(
                "The times were measured on one of 2 cores of an AMD EPYC (AVX2), not on this machine: attention of a "
                "decode step over these sequences, for 30 layers of SmolLM2-135M's shape in float32.",
                _BLOCK_SIZES[0],
                "Blocks of 1 take over four times as long as blocks of 16: each token is looked up by itself. From "
                "16 on, the size hardly matters. So 16 wastes little and costs little; another processor or a GPU has "
                "other times.",
                {"num_used": 2870, "paged_waste_slots": 0},
                rows=(*_block_size_rows(),),
                stops=_BLOCK_SIZES,
            ),
        ),
    ),
    Lesson(
        "block-manager",
        "The block manager",
        "The code is the core's own, from core/kv_cache_manager.py and core/block_pool.py, without docstrings, "
        "assertions and events. Lit lines are those that just ran.",
        (
            LessonStep(
                "A prompt of 6 tokens, in blocks of 4.",
                _MANAGER,
                "grow finds that 2 blocks are missing. allocate runs twice. No block was ever freed, so it takes the "
                "untouched ones, 1 and 2.",
                {"num_used": 2, "tables": {"A": [1, 2]}},
            ),
            LessonStep(
                "One more token.",
                f"{_MANAGER};append,A,1",
                "Block 2 has room, so num_new is 0. No line of the pool runs: most tokens cost nothing more.",
                {"num_used": 2, "num_tokens": {"A": 7}},
            ),
            LessonStep(
                "A is forked.",
                f"{_MANAGER};append,A,1;fork,A",
                "share runs once a block. Its whole work is a reference count of 2 instead of 1.",
                {"num_used": 2, "tables": {"A": [1, 2], "B": [1, 2]}, "num_saved_by_sharing": 2},
            ),
            LessonStep(
                "A writes. Block 2 has 2 references.",
                _COPIED,
                "grow sees the references and calls _copy_on_write. It allocates block 3, releases block 2 and notes "
                "the copy for the device. One reference is left, so release returns early.",
                {"num_copied": 1, "tables": {"A": [1, 3], "B": [1, 2]}},
            ),
            LessonStep(
                "B ends.",
                f"{_COPIED};free,B",
                "Block 2 loses its last reference. It was never full and has no seal, so it goes onto the stack of "
                "freed blocks. Block 1 is still A's.",
                {"num_used": 2, "num_free": 2, "num_cached": 0},
            ),
            LessonStep(
                "A grows into a third block.",
                f"{_COPIED};free,B;append,A,1",
                "allocate pops block 2: the block that was freed last is used first.",
                {"num_used": 3, "tables": {"A": [1, 3, 2]}},
            ),
            LessonStep(
                "A ends.",
                _FREED,
                "Its last block goes first. Block 2 is freed; blocks 3 and 1 are full and sealed, so release links "
                "them into the queue of cached blocks.",
                {"num_used": 0, "num_free": 2, "num_cached": 2},
            ),
            LessonStep(
                "A prompt of 12 tokens needs 3 blocks, and 2 are free.",
                f"{_FREED};new,12",
                "allocate pops block 2, takes the untouched block 4, and then evicts block 3, which was cached first.",
                {"num_evicted": 1, "num_cached": 1, "tables": {"C": [2, 4, 3]}},
            ),
        ),
        colour="references",
        code=tuple(LINES),
    ),
    Lesson(
        "questions",
        "Five questions",
        "Each can be answered from what the lessons showed. A right answer is then shown by the engine.",
        (
            LessonStep(
                "A's 80 tokens fill 5 blocks of 16. How many slots are empty after its 81st token?",
                "64x16;new,80;append,A,1",
                "A sixth block is allocated for one token, so 15 of its slots are empty. A sequence never wastes more.",
                {"num_used": 6, "paged_waste_slots": 15},
                choices=("none", "15", "16", "all of a reservation"),
                answer=1,
            ),
            LessonStep(
                "H's table is 7, 1, and blocks have 4 slots. Where does position 8 go?",
                _NINE,
                "8 // 4 = 2 and 8 % 4 = 0. Entry 2 does not exist yet, so a block is allocated: the next free one, 3.",
                {"tables": {"H": [7, 1, 3]}},
                choices=("slot 4 of block 1", "slot 0 of block 8", "slot 0 of a new block"),
                answer=2,
            ),
            LessonStep(
                "A, B and C share a last block that is partly filled. All three write. How many blocks are copied?",
                "8x4;new,7;fork,A,2;beam,A,3",
                "The first two copy it. The third has the only reference left, and writes in place.",
                {"num_copied": 2, "num_used": 4},
                choices=("none", "1", "2", "3"),
                answer=2,
            ),
            LessonStep(
                "Four beams share 64 tokens in blocks of 16. Each gets 10 more. How many blocks are used?",
                "64x16;new,64;fork,A,3;beam,A,4,10",
                "4 shared blocks and 1 for each beam. 20 would be separate sequences; 12 would need more than 16 "
                "tokens each.",
                {"num_used": 8, "unshared_blocks": 20},
                choices=("8", "12", "16", "20"),
                answer=0,
            ),
            LessonStep(
                "A had a prefix of 12 tokens in blocks of 4, and has ended. B has the prefix and 2 tokens of its own. "
                "How many tokens are computed?",
                "12x4;share,12,2;free,A;share,12,2",
                "The 3 full blocks of the prefix are still cached. Only B's own 2 tokens are computed.",
                {"num_hits": 3, "num_hit_tokens": 12, "num_used": 4},
                choices=("14", "12", "2", "none"),
                answer=2,
            ),
        ),
        colour="owner",
    ),
)
