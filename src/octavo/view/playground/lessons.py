"""What the playground teaches, one idea a lesson. Every number that a lesson says is in its `expect`, which tests hold
against the core: names of `Playground.compare` and of `KVStats`, or `tables`, the block table of each sequence."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class LessonStep:
    """`text` says what is done and why, `look` where to look. `done` is whether the last action can be done."""

    text: str
    history: str
    look: str
    expect: dict[str, Any] = field(default_factory=dict)
    action: str | None = None
    """Tried after the history, and refused."""


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
        "A model's keys and values grow by a slot a token, and nobody knows how many there will be. One piece of "
        "memory for each sequence must be as long as the longest there can be; blocks are taken as they are needed.",
        (
            LessonStep(
                "A sequence of 80 tokens, where the longest there can be has 2,048. There are 2,048 slots in all.",
                "128x16x2048;new,80",
                "The second grid: 2,048 slots are reserved, and 1,968 of them, 96 %, will perhaps never be used. In "
                "blocks of 16 it takes 5.",
                {"num_used": 5, "paged_waste_slots": 0, "contiguous_waste_slots": 1968, "contiguous_refused": 0},
            ),
            LessonStep(
                "A second one comes, and two more.",
                "128x16x2048;new,80;new,80;new,80;new,80",
                "Three of four find no room where pieces are reserved. Here the four take 20 blocks of 128.",
                {"num_used": 20, "contiguous_refused": 3, "num_free": 108},
            ),
            LessonStep(
                "Lengths that are no multiple of 16: the last block of each sequence is partly empty.",
                "128x16x2048;new,81;new,95",
                "81 tokens waste 15 slots, 95 waste 1. It is never as much as a block.",
                {"num_used": 12, "paged_waste_slots": 16},
            ),
            LessonStep(
                "Pieces of 300 in 1,024 slots: three fit, and 124 slots are left over, too few for anybody.",
                "64x16x300;new,40;new,40;new,40;new,40",
                "External fragmentation: 124 slots are free, and the fourth waits. Blocks are all the same, so none is "
                "ever too small.",
                {"contiguous_external_slots": 124, "contiguous_refused": 1, "num_used": 12, "paged_waste_slots": 32},
            ),
        ),
    ),
    Lesson(
        "block-tables",
        "Block tables",
        "A sequence's tokens are in order; its blocks lie wherever one was free. The block table leads from one to the "
        "other: token t is in block table[t // block size], slot t % block size.",
        (
            LessonStep(
                "Seven tokens of prompt, in blocks of 4. Some blocks are in use, so the free ones are 7, 1 and 3.",
                f"{_FIGURE};text,Four%20score%20and%20seven%20years%20ago%20our",
                "The table is 7, 1: block 7 is full, block 1 holds three tokens.",
                {"tables": {"H": [7, 1]}, "num_tokens": {"H": 7}},
            ),
            LessonStep(
                "The first word that the model says goes into the slot that is left.",
                f"{_FIGURE};text,Four%20score%20and%20seven%20years%20ago%20our;type,H,fathers",
                "No block is taken: block 1 is full now.",
                {"tables": {"H": [7, 1]}, "num_tokens": {"H": 8}},
            ),
            LessonStep(
                "The second one needs a block, and gets 3.",
                f"{_FIGURE};text,Four%20score%20and%20seven%20years%20ago%20our;type,H,fathers;type,H,brought",
                "The table is 7, 1, 3. Attention reads the three blocks through it, as if they lay side by side.",
                {"tables": {"H": [7, 1, 3]}, "num_tokens": {"H": 9}},
            ),
        ),
    ),
    Lesson(
        "copy-on-write",
        "Copy-on-write",
        "A fork has the same past, so it shares all blocks, each of which counts its references. Only who writes into "
        "a block that others share needs a copy; and only a last block is ever written.",
        (
            LessonStep(
                "A prompt of 7 tokens in blocks of 4, and a fork of it.",
                "8x4;new,7;fork,A",
                "Both tables are 1, 2. Each block has 2 references, and 2 blocks are used instead of 4.",
                {"num_used": 2, "unshared_blocks": 4, "tables": {"A": [1, 2], "B": [1, 2]}, "num_copied": 0},
            ),
            LessonStep(
                "A writes its next token.",
                "8x4;new,7;fork,A;write,A",
                "Allocate 3, copy 2 to 3, take a reference off 2, point A's table at 3. Block 1 stays shared.",
                {"num_used": 3, "tables": {"A": [1, 3], "B": [1, 2]}, "num_copied": 1},
            ),
            LessonStep(
                "B writes.",
                "8x4;new,7;fork,A;write,A;write,B",
                "Nothing is copied: B is the last that points to block 2. Two sharers make one copy.",
                {"num_used": 3, "tables": {"A": [1, 3], "B": [1, 2]}, "num_copied": 1},
            ),
            LessonStep(
                "A prompt of 8 tokens fills its 2 blocks. Its fork writes.",
                "8x4;new,8;fork,A;write,B",
                "Nothing is copied: a full block is never written again. The token begins a block of B's own.",
                {"num_used": 3, "tables": {"A": [1, 2], "B": [1, 2, 3]}, "num_copied": 0},
            ),
        ),
    ),
    Lesson(
        "beam-search",
        "Beam search",
        "Beams have their prompt in common, and often much of what follows. How much sharing saves depends on what it "
        "is compared with: the fair number is what as many separate sequences of the same length take.",
        (
            LessonStep(
                "A prompt of 64 tokens, and 4 beams of it, in blocks of 16.",
                _FOUR_BEAMS,
                "4 blocks with 4 references each. Four separate sequences would have 16.",
                {"num_used": 4, "unshared_blocks": 16},
            ),
            LessonStep(
                "Each beam gets 10 tokens. 64 is a multiple of 16, so each begins a block of its own.",
                f"{_FOUR_BEAMS};append,A,10;append,B,10;append,C,10;append,D,10",
                "4 shared blocks and 4 own ones: 8. Separate sequences of 74 tokens have 5 each: 20, not the 16 of "
                "their prompts alone.",
                {"num_used": 8, "unshared_blocks": 20, "num_copied": 0},
            ),
            LessonStep(
                "The same as a search: after each token the last beam falls, and the first goes on twice.",
                "64x16;new,64;beam,A,4,10",
                "8 blocks again. Nine times a beam that was chosen twice parted within a block: 9 copies of one block "
                "each, and never one of a whole beam.",
                {"num_used": 8, "unshared_blocks": 20, "num_copied": 9},
            ),
            LessonStep(
                "A prompt of 256 tokens, 4 beams.",
                "128x16;new,256;fork,A,3",
                "16 blocks instead of 64. The longer the prompt, the nearer to a fourth.",
                {"num_used": 16, "unshared_blocks": 64},
            ),
        ),
    ),
    Lesson(
        "prefix-caching",
        "Prefix caching and eviction",
        "Requests often begin alike. A full block can be found by its tokens and all before them, while it is in use "
        "and also after: it stays cached until its room is needed.",
        (
            LessonStep(
                "A request begins with 12 tokens of a shared prompt, and has 3 of its own.",
                "12x4;share,12,3",
                "4 blocks. 3 of them are full, and can be found.",
                {"num_used": 4, "num_hits": 0, "num_sealed": 3},
            ),
            LessonStep(
                "Another one begins with the same 12.",
                "12x4;share,12,3;share,12,2",
                "3 blocks are found and shared, and 1 is new: 5 blocks instead of 8, and 2 tokens to compute instead "
                "of 14.",
                {"num_used": 5, "unshared_blocks": 8, "num_hits": 3, "num_hit_tokens": 12},
            ),
            LessonStep(
                "Both end.",
                "12x4;share,12,3;share,12,2;free,A;free,B",
                "The 3 blocks of the prompt have no references, and stay cached. Their partly filled ends are free.",
                {"num_used": 0, "num_cached": 3, "num_free": 9},
            ),
            LessonStep(
                "A third one comes.",
                "12x4;share,12,3;share,12,2;free,A;free,B;share,12,1",
                "It finds all 3.",
                {"num_used": 4, "num_cached": 0, "num_hits": 6},
            ),
            LessonStep(
                "Back to where both had ended: 10 blocks are needed now, and 9 are free.",
                "12x4;share,12,3;share,12,2;free,A;free,B;new,40",
                "One is evicted: the last block of the prompt. Its head stays, which is of use without it, as the end "
                "without the head is not.",
                {"num_used": 10, "num_cached": 2, "num_free": 0, "num_evicted": 1},
            ),
            LessonStep(
                "The prompt comes once more.",
                "12x4;share,12,3;share,12,2;free,A;free,B;new,40;free,C;share,12,1",
                "2 blocks are found. The third is computed again.",
                {"num_hits": 5, "num_used": 4},
            ),
        ),
    ),
    Lesson(
        "preemption",
        "Preemption",
        "Memory can run out while sequences grow. Then the one that came last gives way, with all its forks: its "
        "blocks are copied to the host, or given up and computed again.",
        (
            LessonStep(
                "Two sequences in 8 blocks of 4: A has 3 blocks, B and its fork C share 4 and write.",
                "8x4;new,12;new,14;fork,B;write,C",
                "All 8 blocks are used: C has its own copy of the last.",
                {"num_used": 8, "num_free": 0, "num_copied": 1},
            ),
            LessonStep(
                "A needs a block for its next token, and there is none.",
                "8x4;new,12;new,14;fork,B;write,C",
                "No room: 1 block is needed, 0 are free and 0 cached. Nothing has changed.",
                {"num_used": 8},
                action="append,A,1",
            ),
            LessonStep(
                "B and C go to the host, together.",
                "8x4;new,12;new,14;fork,B;write,C;preempt,B,swap",
                "5 blocks move, each once, though 3 of them belong to both. On the device 3 of the prompt's stay "
                "cached until somebody needs the room.",
                {"num_used": 3, "num_host_used": 5, "num_swapped_out": 5, "num_cached": 3},
            ),
            LessonStep(
                "A grows, and ends. B and C come back.",
                "8x4;new,12;new,14;fork,B;write,C;preempt,B,swap;append,A,9;free,A;resume,B",
                "5 blocks again, others than before, and shared as before.",
                {"num_used": 5, "num_host_used": 0, "num_swapped_in": 5, "unshared_blocks": 8},
            ),
            LessonStep(
                "The other way: B and C give up their blocks, and are computed again.",
                "8x4;new,12;new,14;fork,B;write,C;preempt,B,recompute;append,A,1;free,A;resume,B",
                "What was still cached was found: of 29 tokens in two sequences, 5 were computed again.",
                {"num_used": 5, "num_swapped_out": 0, "unshared_blocks": 8},
            ),
        ),
    ),
)
