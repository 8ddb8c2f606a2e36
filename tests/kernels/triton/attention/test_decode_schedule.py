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


@pytest.mark.parametrize("gap", [0, 1, 3])
@pytest.mark.parametrize(("num_seqs", "programs"), [(1, 4), (1, 16), (3, 40), (40, 4)])
def test_programs_share_out_every_tile_once(num_seqs: int, programs: int, gap: int) -> None:
    rnd = random.Random(num_seqs)
    for longest in (0, 20, 300, 3000):
        seq_lens = [rnd.choice([0, 1, rnd.randint(0, longest)]) if longest else 0 for _ in range(num_seqs)]
        batch = on_device(RaggedBatch.from_lists([1] * num_seqs, [1] * num_seqs, [[1]] * num_seqs, 16))
        batch.seq_lens[:] = torch.tensor(seq_lens)
        tuning = DecodeTuning(16, 1, 2, programs, seq_overhead=gap)
        schedule = make_decode_schedule(batch, tuning, 0, num_kv_heads=3, group_size=1, head_dim=16, window=0)
        num_tiles, stretch = schedule.totals[:2].tolist()

        segments, place = [], 0
        for seq, n in enumerate(seq_lens):
            if n:
                first = place + gap
                place = first + math.ceil(n / 16)
                segments.append([first, place, n, seq, seq])
        assert num_tiles == place
        assert schedule.segments[: len(segments), :5].tolist() == segments

        starts = schedule.starts.tolist()
        begins = [line[PROGRAM_BEGIN.value] for line in starts]
        assert begins[-1] == 3 * num_tiles
        owners: dict[tuple[int, int], list[int]] = {}
        for program, (begin, end) in enumerate(itertools.pairwise(begins)):
            assert begin <= end <= begin + stretch + gap
            if begin < end:
                number = starts[program][SEGMENT_INDEX.value]
                assert starts[program][:5] == segments[number]
                assert segments[number][0] <= begin % num_tiles < segments[number][1]
            for head, (number, (first, last, *_)) in itertools.product(range(3), enumerate(segments)):
                if begin < head * num_tiles + last and end > head * num_tiles + first:
                    owners.setdefault((head, number), []).append(program)
        assert len(owners) == 3 * len(segments)
        merges = [
            [segments[number][3], head, own[0], own[-1], int(begins[own[0]] != head * num_tiles + segments[number][0])]
            for (head, number), own in owners.items()
            if len(own) > 1
        ]
        found = [column for column in schedule.merges.T.tolist() if column[0] >= 0]
        assert len(schedule.merges[0]) == (3 * num_seqs if schedule.programs_per_segment > MAX_INLINE_MERGE else 0)
        assert sorted(found) == (sorted(merges) if schedule.programs_per_segment > MAX_INLINE_MERGE else [])
