"""The playground's lessons, one idea each. Every number in a lesson's text is in a step's `expect`, which the tests
compare with the core: names of `Playground.compare` and of `KVStats`, or `tables`, the block table of each sequence."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class LessonStep:
    """`text` is the step's explanation, `look` describes what to look at."""

    text: str
    history: str
    look: str
    expect: dict[str, Any] = field(default_factory=dict)
    action: str | None = None
    """An action after the history, which is refused."""


@dataclass(frozen=True, slots=True)
class Lesson:
    id: str
    title: str
    text: str
    steps: tuple[LessonStep, ...]

    def as_dict(self) -> dict[str, Any]:
        steps = [
            {"text": s.text, "history": s.history, "look": s.look} | ({"action": s.action} if s.action else {})
            for s in self.steps
        ]
        return {"id": self.id, "title": self.title, "text": self.text, "steps": steps}


_FOUR_BEAMS = "64x16;new,64;fork,A,3"
_FIGURE = "8x4;new,1;new,1;new,1;new,1;new,1;new,1;new,1;free,C;free,A;free,G"

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
                "A prompt of 256 tokens, 4 beams.",
                "128x16;new,256;fork,A,3",
                "16 blocks instead of 64. The longer the prompt, the closer to one fourth.",
                {"num_used": 16, "unshared_blocks": 64},
            ),
        ),
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
)
