"""A scheduler and its memory as plain data, and back: where a recording begins.

`freeze` copies what there is between two calls of the scheduler, in a millisecond or so; `thaw` makes a scheduler of it
that decides from there on as the first one did. The fields are listed here by name. A test compares the lists with the
core's classes, so that nothing new there is forgotten.

There is no token in the data. What a sequence holds is told as a number of its request, its index and its length, and
what a block holds as the name of its content; who thaws says which tokens to take for these.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from typing import Any

from octavo.core.block_pool import BlockPool
from octavo.core.kv_cache_manager import KVCacheManager
from octavo.core.plan import StepPlan
from octavo.core.policy import Policy, PreemptionMode, VictimPolicy
from octavo.core.request import Request, Sequence, Status
from octavo.core.scheduler import Scheduler
from octavo.core.tenants import Tenant
from octavo.params.sampling_params import SamplingParams

State = dict[str, Any]

POOL_ARRAYS = ("refs", "seal_id", "_prev", "_next")
POOL = ("_untouched", "num_free", "num_cached", "num_refs", "last_seal_id", "num_sealed", "num_evicted")
HOST = ("_untouched", "num_free")
CACHE = (
    "num_hits",
    "num_misses",
    "num_hit_tokens",
    "num_queried_tokens",
    "num_copied",
    "num_dropped",
    "num_swapped_out",
    "num_swapped_in",
    "num_corrupt",
    "num_pinned",
)
SCHEDULER = ("num_rows_taken", "num_steps", "num_preemptions", "_num_arrivals", "max_num_scheduled_tokens")
COSTS = ("token_s", "move_s", "step_s", "kept")
REQUEST = (
    "arrival",
    "use_structured_output",
    "forked",
    "max_tokens",
    "needs_result",
    "num_cached_tokens",
    "num_samples",
    "num_preemptions",
    "newest_prefix_seal",
    "pin",
    "priority",
    "index_in_call",
    "tenant",
    "wait_reason",
    "width",
)
SEQUENCE = (
    "finish_reason",
    "index",
    "max_length",
    "num_computed",
    "num_dropped",
    "num_pending",
    "room",
    "row",
    "row_has_last",
    "seal_at",
)
PLAN = ("step", "rows", "starts", "counts", "num_sampled", "bitmask_slices", "seal_mark")
"""Of a plan in flight: what is to come of it. Its work on memory is done, as far as the host is concerned."""
SAVED_AS = {
    "use_structured_output": "constrained",
    "needs_result": "must_wait",
    "num_samples": "num_draws",
    "newest_prefix_seal": "newest_found",
    "index_in_call": "rank",
    "wait_reason": "waits_for",
    "max_length": "limit",
    "max_num_scheduled_tokens": "step_limit",
    "num_sampled": "samples",
    "bitmask_slices": "masked",
}
"""Attributes whose key in recordings differs from their name."""


def _save(owner: object, names: Iterable[str]) -> State:
    return {SAVED_AS.get(name, name): getattr(owner, name) for name in names}


def _load(owner: object, names: Iterable[str], state: State) -> None:
    for name in names:
        setattr(owner, name, state[SAVED_AS.get(name, name)])


def freeze(
    scheduler: Scheduler, number_of: Callable[[Request], int], said_by: Callable[[Sequence], bytes | None]
) -> State:
    """All that decisions depend on, but tokens. `keys` has the content of each sealed block, as the pool packs it: it
    is for the recorder, who puts names in its place before anything is written.

    said_by   the names of a sequence's blocks and of the tokens behind them, where its request will not tell them: in a
              beam search
    """
    cache = scheduler.cache
    pool, host = cache.pool, cache.swap_space
    plans = list(scheduler.in_flight)
    requests = dict.fromkeys(scheduler.requests.values())
    requests |= dict.fromkeys(seq.request for plan in plans for seq in plan.sequences)
    requests |= dict.fromkeys(request for plan in plans for request in plan.swapped_requests)
    requests |= dict.fromkeys(seq.request for seq in cache.pins.values())
    sequences = dict.fromkeys(seq for request in requests for seq in (*request.sequences, *request.finished_sequences))
    sequences |= dict.fromkeys(seq for plan in plans for seq in plan.sequences)
    sequences |= dict.fromkeys(cache.pins.values())
    place = {request: i for i, request in enumerate(requests)}
    seat = {seq: i for i, seq in enumerate(sequences)}
    return {
        "pool": {
            **{name: getattr(pool, name).tobytes() for name in POOL_ARRAYS},
            **_save(pool, POOL),
            "freed": list(pool._freed),
        },
        "keys": list(pool._packed_of),
        "host": {
            **_save(host, HOST),
            "refs": host.refs.tobytes(),
            "freed": list(host._freed),
        },
        "free_rows": list(cache.rows._free),
        "cache": _save(cache, CACHE),
        "scheduler": _save(scheduler, SCHEDULER),
        "counted": list(scheduler._counted),
        "served": [(tenant.number, tenant.served) for tenant in scheduler.tenants.present.values()],
        "costs": _save(scheduler.policy.costs, COSTS),
        "requests": [_frozen_request(request, number_of(request), seat) for request in requests],
        "sequences": [_frozen_sequence(seq, place) | {"said": said_by(seq)} for seq in sequences],
        "known": [place[request] for request in scheduler.requests.values()],
        "running": [place[request] for request in scheduler.running],
        "swapped": [place[request] for request in scheduler.swapped],
        "waiting": [place[request] for request in scheduler.waiting],
        "holders": [seat[seq] for seq in cache._holders],
        "pins": [seat[seq] for seq in cache.pins.values()],
        "in_flight": [_frozen_plan(plan, place, seat) for plan in plans],
    }


def _frozen_request(request: Request, number: int, seat: dict[Sequence, int]) -> State:
    return {
        **_save(request, REQUEST),
        "number": number,
        "order": list(request.order),
        "status": request.status.value,
        "decides": request.select_beams is not None,
        "num_prompt": len(request.prompt_token_ids),
        "skips": request.sampling_params.skip_reading_prefix_cache,
        "sequences": [seat[seq] for seq in request.sequences],
        "done": [seat[seq] for seq in request.finished_sequences],
        "solo": -1 if request.only_sequence is None else seat[request.only_sequence],
        "left_behind": list(request.shared_on_device.items()),
    }


def _frozen_sequence(seq: Sequence, place: dict[Request, int]) -> State:
    return {
        **_save(seq, SEQUENCE),
        "request": place[seq.request],
        "num_tokens": len(seq.token_ids),
        "stopped": seq.stop_token is not None,
        "block_ids": list(seq.block_ids),
        "seal_ids": list(seq.seal_ids),
    }


def _frozen_plan(plan: StepPlan, place: dict[Request, int], seat: dict[Sequence, int]) -> State:
    return {
        **_save(plan, PLAN),
        "outstanding": None if plan.num_outstanding is None else list(plan.num_outstanding),
        "draws": list(plan.num_samples.items()),
        "given": list(plan.host_tokens),
        "sequences": [seat[seq] for seq in plan.sequences],
        "swapped": [place[request] for request in plan.swapped_requests],
        "returning": [(block, place[request]) for block, request in plan.swap_in_requests.items()],
        "void": sorted(plan.void_slices),
    }


def settings_of(scheduler: Scheduler) -> State:
    """What a scheduler is made with."""
    cache, policy = scheduler.cache, scheduler.policy
    return {
        "num_blocks": cache.pool.num_blocks,
        "block_size": cache.block_size,
        "num_host_blocks": cache.swap_space.num_blocks,
        "num_rows": cache.rows.num_rows,
        "enable_prefix_caching": cache.enable_prefix_caching,
        "attention_window": cache.attention_window,
        "max_num_batched_tokens": scheduler.max_num_batched_tokens,
        "decode_window": scheduler.decode_window,
        "num_watermark_blocks": scheduler.num_watermark_blocks,
        "by_priority": policy.by_priority,
        "ageing": policy.ageing,
        "mode": None if policy.mode is None else policy.mode.value,
        "victims": policy.victims.value,
        "long_prefill_token_threshold": policy.long_prefill_token_threshold,
        "max_long_partial_prefills": policy.max_long_partial_prefills,
    }


def new_scheduler(settings: State) -> Scheduler:
    """An empty one of such settings."""
    cache = KVCacheManager(
        settings["num_blocks"],
        settings["block_size"],
        settings["num_host_blocks"],
        num_rows=settings["num_rows"],
        enable_prefix_caching=settings["enable_prefix_caching"],
        attention_window=settings["attention_window"],
    )
    mode = settings["mode"]
    return Scheduler(
        cache,
        max_num_batched_tokens=settings["max_num_batched_tokens"],
        decode_window=settings["decode_window"],
        num_watermark_blocks=settings["num_watermark_blocks"],
        policy=Policy(
            by_priority=settings["by_priority"],
            ageing=settings["ageing"],
            mode=None if mode is None else PreemptionMode(mode),
            victims=VictimPolicy(settings["victims"]),
            long_prefill_token_threshold=settings["long_prefill_token_threshold"],
            max_long_partial_prefills=settings["max_long_partial_prefills"],
        ),
    )


def thaw(
    settings: State,
    state: State,
    make_request: Callable[[State], Request],
    tokens_of: Callable[[State, State], array[int]],
) -> Scheduler:
    """A scheduler that goes on from a frozen state; `keys` are those that the pool shall have.

    make_request  a request that has not begun, of what was frozen of one
    tokens_of     the tokens of a sequence, of what was frozen of its request and of itself
    """
    scheduler = new_scheduler(settings)
    cache = scheduler.cache
    requests = [make_request(said) for said in state["requests"]]
    sequences = []
    for said in state["sequences"]:
        request = requests[said["request"]]
        tokens = tokens_of(state["requests"][said["request"]], said)
        seq = Sequence(request, said["index"], tokens, said["limit"])
        _load(seq, SEQUENCE, said)
        seq.block_ids, seq.seal_ids = list(said["block_ids"]), list(said["seal_ids"])
        seq.stop_token = next(iter(request.stop_ids)) if said["stopped"] else None
        sequences.append(seq)
    for request, said in zip(requests, state["requests"], strict=True):
        _load(request, REQUEST, said)
        first, second = said["order"]
        request.order, request.status = (first, second), Status(said["status"])
        request.sequences = [sequences[i] for i in said["sequences"]]
        request.finished_sequences = [sequences[i] for i in said["done"]]
        request.only_sequence = None if said["solo"] < 0 else sequences[said["solo"]]
        request.shared_on_device = dict(said["left_behind"])
    _fill_pool(cache.pool, state)
    host = cache.swap_space
    _load(host, HOST, state["host"])
    host.refs, host._freed = array("i", state["host"]["refs"]), list(state["host"]["freed"])
    cache.rows._free = list(state["free_rows"])
    _load(cache, CACHE, state["cache"])
    cache._holders = dict.fromkeys(sequences[i] for i in state["holders"])
    cache.pins = {sequences[i].request.request_id: sequences[i] for i in state["pins"]}
    _load(scheduler, SCHEDULER, state["scheduler"])
    _load(scheduler.policy.costs, COSTS, state["costs"])
    hits, misses, evicted, copied, swapped_out, swapped_in, sealed = state["counted"]
    scheduler._counted = hits, misses, evicted, copied, swapped_out, swapped_in, sealed
    scheduler.requests = {requests[i].request_id: requests[i] for i in state["known"]}
    scheduler.running = [requests[i] for i in state["running"]]
    scheduler.swapped = [requests[i] for i in state["swapped"]]
    scheduler.waiting = [requests[i] for i in state["waiting"]]
    tenants = scheduler.tenants
    tenants.present = {number: Tenant(number, served) for number, served in state["served"]}
    for request in scheduler.requests.values():
        tenants.enter(request)
    for request in scheduler.waiting:
        tenants.wait(request)
    for said in state["in_flight"]:
        plan = StepPlan()
        _load(plan, PLAN, said)
        plan.num_outstanding = said["outstanding"]
        plan.num_samples = dict(said["draws"])
        plan.host_tokens = {i: array("i") for i in said["given"]}
        plan.sequences = [sequences[i] for i in said["sequences"]]
        plan.swapped_requests = [requests[i] for i in said["swapped"]]
        plan.swap_in_requests = {block: requests[i] for block, i in said["returning"]}
        plan.void_slices = frozenset(said["void"])
        scheduler.in_flight.append(plan)
    return scheduler


def _fill_pool(pool: BlockPool, state: State) -> None:
    for name in POOL_ARRAYS:
        setattr(pool, name, array(getattr(pool, name).typecode, state["pool"][name]))
    _load(pool, POOL, state["pool"])
    pool._freed = list(state["pool"]["freed"])
    pool._packed_of = list(state["keys"])
    for block, packed in enumerate(pool._packed_of):
        if packed is not None:
            pool._shard(packed)[packed] = block


def bare_request(
    request_id: str, prompt: array[int], said: State, *, stop: int, salt: bytes, select_beams: Any
) -> Request:
    """A request of what was told of one, whether frozen or on its arrival."""
    return Request(
        request_id,
        prompt,
        SamplingParams(max_tokens=said["max_tokens"], skip_reading_prefix_cache=said["skips"], detokenize=False),
        max_tokens=said["max_tokens"],
        stop_ids=(stop,),
        priority=said["priority"],
        salt=salt,
        width=said["width"],
        num_samples=said["num_draws"],
        select_beams=select_beams,
        use_structured_output=said["constrained"],
        pin=said["pin"],
        tenant=said["tenant"],
        index_in_call=said["rank"],
    )
