"""What the page shows of a playground after an action."""

from __future__ import annotations

from typing import Any

import numpy as np

from octavo.core.request import Request, Status
from octavo.view.live.messages import Counts, RequestView, Seals, SequenceView, Snapshot, Wait
from octavo.view.live.publisher import pack_words, places_of
from octavo.view.playground.session import Playground

MAX_TEXTS = 4096


def picture_of(play: Playground) -> dict[str, Any]:
    """The state of the pool, as in PROTOCOL.md's reply."""
    uids, texts, contiguous, max_len = play.uids, play.tokens.texts, play.contiguous, play.pool.max_len
    return {
        "phases": list(play.phases.latest),
        "picture": _snapshot(play),
        "names": {str(uids[s]): name for name, s in play.sequences.items()},
        "tokens": {str(uids[s]): [texts[t] for t in s.token_ids[:MAX_TEXTS]] for s in play.sequences.values()},
        "compare": compare(play),
        "contiguous": {
            "num_slots": contiguous.num_slots,
            "max_len": max_len,
            "pieces": [
                {"name": name, "start": start, "reserved": max_len, "filled": _filled(play, name)}
                for name, start in contiguous.starts.items()
            ],
            "refused": list(contiguous.waiting),
        },
    }


def compare(play: Playground) -> dict[str, int]:
    """Blocks and slots of this pool, and of the same sequences without sharing and with contiguous reservation."""
    kv, contiguous, max_len = play.kv, play.contiguous, play.pool.max_len
    stats, running = kv.stats(), [s for s in play.sequences.values() if s.request.status is Status.RUNNING]
    return {
        "paged_blocks": stats.num_used,
        "unshared_blocks": sum(kv.blocks_for(s.num_computed) for s in running),
        "contiguous_blocks": kv.blocks_for(max_len) * len(contiguous.starts),
        "contiguous_refused": len(contiguous.waiting),
        "paged_waste_slots": stats.num_unfilled_slots,
        "contiguous_waste_slots": sum(max_len - _filled(play, name) for name in contiguous.starts),
        "contiguous_external_slots": contiguous.num_external_slots,
    }


def _filled(play: Playground, name: str) -> int:
    return min(len(play.sequences[name].token_ids), play.pool.max_len)


def _snapshot(play: Playground) -> Snapshot:
    kv, uids = play.kv, play.uids
    refs, seals = np.frombuffer(kv.pool.refs, np.int32), np.frombuffer(kv.pool.seal_id, np.int64)
    sealed = np.nonzero(seals)[0]
    nodes = Seals.of(sealed, seals[sealed], *places_of(kv.pool, sealed.tolist()))
    groups = dict.fromkeys(s.request for s in play.sequences.values())
    nums = [sum(g.status is status for g in groups) for status in (Status.RUNNING, Status.WAITING, Status.SWAPPED)]
    sizes = kv.pool.num_blocks, kv.block_size, kv.swap_space.num_blocks
    sequences = [
        SequenceView(uids[s], s.index, len(s.token_ids), s.num_computed, np.array(s.block_ids, "<i4").tobytes())
        for s in play.sequences.values()
    ]
    words, requests = pack_words(refs[1:], seals[1:]), [_request(play, group) for group in groups]
    counts = Counts(nums[0], nums[1], nums[2], len(play.tokens.texts))
    return Snapshot("", 0, 0.0, 0, *sizes, words, nodes, requests, sequences, kv.stats().as_dict(), counts)


def _request(play: Playground, group: Request) -> RequestView:
    wait = None if group.status is Status.RUNNING else Wait("preempted")
    name, uids = play.names[group.sequences[0]], tuple(play.uids[s] for s in group.sequences)
    num_prompt, num_cached = len(group.prompt_token_ids), max(0, group.num_cached_tokens)
    return RequestView(name, group.status.value, num_prompt, 0, len(uids), 0, num_cached, 0, wait, uids)
