"""The schedule of decode attention, made on the device."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch

from octavo.kernels.metadata import RaggedBatch
from octavo.kernels.triton.attention.decode_schedule import (
    MAX_INLINE_MERGE,
    PROGRAM_BEGIN,
    SEGMENT_INDEX,
    DecodeTuning,
    make_decode_schedule,
)
from tests.kernels.triton.device import on_device


@pytest.mark.parametrize("seq_overhead", [0, 1, 3])
@pytest.mark.parametrize(("num_seqs", "programs_per_sm"), [(1, 4), (1, 16), (3, 40), (40, 4)])
def test_every_tile_belongs_to_one_program(num_seqs: int, programs_per_sm: int, seq_overhead: int) -> None:
    rnd = random.Random(num_seqs)
    for longest in (0, 20, 300, 3000):
        seq_lens = [rnd.choice([0, 1, rnd.randint(0, longest)]) if longest else 0 for _ in range(num_seqs)]
        batch = on_device(RaggedBatch.from_lists([1] * num_seqs, [1] * num_seqs, [[1]] * num_seqs, 16))
        batch.seq_lens[:] = torch.tensor(seq_lens)
        tuning = DecodeTuning(16, 1, 2, programs_per_sm, seq_overhead=seq_overhead)
        schedule = make_decode_schedule(batch, tuning, 0, num_kv_heads=3, group_size=1, head_dim=16, window=0)
        num_tiles, tiles_per_program = schedule.totals[:2].tolist()

        segments, end = [], 0
        for seq, n in enumerate(seq_lens):
            if n:
                first = end + seq_overhead
                end = first + math.ceil(n / 16)
                segments.append([first, end, n, seq, seq])
        assert num_tiles == end
        assert schedule.segments[: len(segments), :5].tolist() == segments

        starts = schedule.starts.tolist()
        begins = [row[PROGRAM_BEGIN.value] for row in starts]
        assert begins[-1] == 3 * num_tiles
        programs_of: dict[tuple[int, int], list[int]] = {}
        for program, (begin, end) in enumerate(itertools.pairwise(begins)):
            assert begin <= end <= begin + tiles_per_program + seq_overhead
            if begin < end:
                index = starts[program][SEGMENT_INDEX.value]
                assert starts[program][:5] == segments[index]
                assert segments[index][0] <= begin % num_tiles < segments[index][1]
            for head, (index, (first, last, *_)) in itertools.product(range(3), enumerate(segments)):
                if begin < head * num_tiles + last and end > head * num_tiles + first:
                    programs_of.setdefault((head, index), []).append(program)
        assert len(programs_of) == 3 * len(segments)
        merges = [
            [
                segments[index][3],
                head,
                programs[0],
                programs[-1],
                int(begins[programs[0]] != head * num_tiles + segments[index][0]),
            ]
            for (head, index), programs in programs_of.items()
            if len(programs) > 1
        ]
        found = [column for column in schedule.merges[:5].T.tolist() if column[0] >= 0]
        assert len(schedule.merges[0]) == (3 * num_seqs if schedule.num_sharers > MAX_INLINE_MERGE else 0)
        assert sorted(found) == (sorted(merges) if schedule.num_sharers > MAX_INLINE_MERGE else [])
