"""A scheduler and its KV memory as plain data: the state at which a recording begins.

`snapshot_scheduler` copies the state between two calls of the scheduler, in about a millisecond. `restore_scheduler`
makes a scheduler of it that takes the same decisions from there on. The fields are listed here by name. A test compares
the lists with the core's classes, so that a new field cannot be forgotten.

A snapshot holds no tokens. Of a sequence it has the number of its request, its index and its length; of a block the
digest of its content. The caller of `restore_scheduler` supplies tokens for these.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from typing import Any

from octavo.core.block_pool import BlockPool
from octavo.core.in_flight import InFlightStep
from octavo.core.kv_cache_manager import KVCacheManager
from octavo.core.plan import StepPlan
from octavo.core.policy import Policy, PreemptionMode, VictimPolicy
from octavo.core.request import Request, Sequence, Status
from octavo.core.scheduler import Scheduler
from octavo.core.tenants import Tenant
from octavo.params.sampling_params import SamplingParams

SchedulerState = dict[str, Any]

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
PLAN = ("step", "bitmask_slices")
COLUMNS = ("rows", "starts", "counts", "num_sampled")
"""Fields of a plan in flight that its result needs. For the host, its work on memory is done."""
KEYS = {
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
"""Attributes whose key in a snapshot differs from their name."""


def _fields(owner: object, names: Iterable[str]) -> SchedulerState:
    return {KEYS.get(name, name): getattr(owner, name) for name in names}


def _set_fields(owner: object, names: Iterable[str], state: SchedulerState) -> None:
    for name in names:
        setattr(owner, name, state[KEYS.get(name, name)])


def snapshot_scheduler(
    scheduler: Scheduler, number_of: Callable[[Request], int], beam_digests: Callable[[Sequence], bytes | None]
) -> SchedulerState:
    """Everything that decisions depend on, except tokens. `keys` has the content of each sealed block, as the pool
    packs it: the recorder replaces it with digests before it writes anything.

    number_of      a request's number in the recording
    beam_digests   the digests of a beam's blocks and of the tokens after them; None for other sequences, whose digests
                   are stored with their request
    """
    cache = scheduler.cache
    pool, host = cache.pool, cache.swap_space
    steps = list(scheduler.in_flight)
    requests = dict.fromkeys(scheduler.requests.values())
    requests |= dict.fromkeys(seq.request for step in steps for seq in step.sequences)
    requests |= dict.fromkeys(request for step in steps for request in step.swapped_requests)
    requests |= dict.fromkeys(seq.request for seq in cache.pins.values())
    sequences = dict.fromkeys(seq for request in requests for seq in (*request.sequences, *request.finished_sequences))
    sequences |= dict.fromkeys(seq for step in steps for seq in step.sequences)
    sequences |= dict.fromkeys(cache.pins.values())
    request_index = {request: i for i, request in enumerate(requests)}
    sequence_index = {seq: i for i, seq in enumerate(sequences)}
    return {
        "pool": {
            **{name: getattr(pool, name).tobytes() for name in POOL_ARRAYS},
            **_fields(pool, POOL),
            "freed": list(pool._freed),
        },
        "keys": list(pool._packed_of),
        "host": {
            **_fields(host, HOST),
            "refs": host.refs.tobytes(),
            "freed": list(host._freed),
        },
        "free_rows": list(cache.rows._free),
        "cache": _fields(cache, CACHE),
        "scheduler": _fields(scheduler, SCHEDULER),
        "counted": list(scheduler._counted),
        "served": [(tenant.number, tenant.served) for tenant in scheduler.tenants.present.values()],
        "costs": _fields(scheduler.policy.costs, COSTS),
        "requests": [_request_state(request, number_of(request), sequence_index) for request in requests],
        "sequences": [_sequence_state(seq, request_index) | {"beam_digests": beam_digests(seq)} for seq in sequences],
        "scheduled": [request_index[request] for request in scheduler.requests.values()],
        "running": [request_index[request] for request in scheduler.running],
        "swapped": [request_index[request] for request in scheduler.swapped],
        "waiting": [request_index[request] for request in scheduler.waiting],
        "holders": [sequence_index[seq] for seq in cache._holders],
        "pins": [sequence_index[seq] for seq in cache.pins.values()],
        "in_flight": [_step_state(step, request_index, sequence_index) for step in steps],
    }


def _request_state(request: Request, number: int, sequence_index: dict[Sequence, int]) -> SchedulerState:
    return {
        **_fields(request, REQUEST),
        "number": number,
        "order": list(request.order),
        "status": request.status.value,
        "beam_search": request.select_beams is not None,
        "num_prompt": len(request.prompt_token_ids),
        "skip_prefix_cache": request.sampling_params.skip_reading_prefix_cache,
        "sequences": [sequence_index[seq] for seq in request.sequences],
        "done": [sequence_index[seq] for seq in request.finished_sequences],
        "solo": -1 if request.only_sequence is None else sequence_index[request.only_sequence],
        "left_behind": list(request.shared_on_device.items()),
    }


def _sequence_state(seq: Sequence, request_index: dict[Request, int]) -> SchedulerState:
    return {
        **_fields(seq, SEQUENCE),
        "request": request_index[seq.request],
        "num_tokens": len(seq.token_ids),
        "stopped": seq.stop_token is not None,
        "block_ids": list(seq.block_ids),
        "seal_ids": list(seq.seal_ids),
    }


def _step_state(
    step: InFlightStep, request_index: dict[Request, int], sequence_index: dict[Sequence, int]
) -> SchedulerState:
    plan = step.plan
    return {
        **_fields(plan, PLAN),
        **{KEYS.get(name, name): getattr(plan, name).tolist() for name in COLUMNS},
        "seal_mark": step.seal_mark,
        "outstanding": None if step.num_outstanding is None else list(step.num_outstanding),
        "draws": list(plan.num_samples.items()),
        "host_tokens": list(plan.host_tokens),
        "sequences": [sequence_index[seq] for seq in step.sequences],
        "swapped": [request_index[request] for request in step.swapped_requests],
        "returning": [(block, request_index[request]) for block, request in step.swap_in_requests.items()],
        "void": sorted(step.void_slices),
    }


def scheduler_settings(scheduler: Scheduler) -> SchedulerState:
    """The arguments that a scheduler is made with."""
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


def new_scheduler(settings: SchedulerState) -> Scheduler:
    """An empty scheduler with these settings."""
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


def restore_scheduler(
    settings: SchedulerState,
    state: SchedulerState,
    make_request: Callable[[SchedulerState], Request],
    tokens_of: Callable[[SchedulerState, SchedulerState], array[int]],
) -> Scheduler:
    """A scheduler that goes on from a snapshot, whose `keys` are those of the pool to make.

    make_request  makes a request that has not begun, from the snapshot's entry of it
    tokens_of     returns the tokens of a sequence, from the snapshot's entries of its request and of itself
    """
    scheduler = new_scheduler(settings)
    cache = scheduler.cache
    requests = [make_request(entry) for entry in state["requests"]]
    sequences = []
    for entry in state["sequences"]:
        request = requests[entry["request"]]
        tokens = tokens_of(state["requests"][entry["request"]], entry)
        seq = Sequence(request, entry["index"], tokens, entry["limit"])
        _set_fields(seq, SEQUENCE, entry)
        seq.block_ids, seq.seal_ids = list(entry["block_ids"]), list(entry["seal_ids"])
        seq.stop_token = next(iter(request.stop_ids)) if entry["stopped"] else None
        sequences.append(seq)
    for request, entry in zip(requests, state["requests"], strict=True):
        _set_fields(request, REQUEST, entry)
        first, second = entry["order"]
        request.order, request.status = (first, second), Status(entry["status"])
        request.sequences = [sequences[i] for i in entry["sequences"]]
        request.finished_sequences = [sequences[i] for i in entry["done"]]
        request.only_sequence = None if entry["solo"] < 0 else sequences[entry["solo"]]
        request.shared_on_device = dict(entry["left_behind"])
    _fill_pool(cache.pool, state)
    host = cache.swap_space
    _set_fields(host, HOST, state["host"])
    host.refs, host._freed = array("i", state["host"]["refs"]), list(state["host"]["freed"])
    cache.rows._free = list(state["free_rows"])
    _set_fields(cache, CACHE, state["cache"])
    cache._holders = dict.fromkeys(sequences[i] for i in state["holders"])
    cache.pins = {sequences[i].request.request_id: sequences[i] for i in state["pins"]}
    _set_fields(scheduler, SCHEDULER, state["scheduler"])
    _set_fields(scheduler.policy.costs, COSTS, state["costs"])
    hits, misses, evicted, copied, swapped_out, swapped_in, sealed = state["counted"]
    scheduler._counted = hits, misses, evicted, copied, swapped_out, swapped_in, sealed
    scheduler.requests = {requests[i].request_id: requests[i] for i in state["scheduled"]}
    scheduler.running = [requests[i] for i in state["running"]]
    scheduler.swapped = [requests[i] for i in state["swapped"]]
    scheduler.waiting = [requests[i] for i in state["waiting"]]
    tenants = scheduler.tenants
    tenants.present = {number: Tenant(number, served) for number, served in state["served"]}
    for request in scheduler.requests.values():
        tenants.enter(request)
    for request in scheduler.waiting:
        tenants.wait(request)
    for entry in state["in_flight"]:
        plan = StepPlan()
        _set_fields(plan, PLAN, entry)
        plan.set_slices(*(entry[KEYS.get(name, name)] for name in COLUMNS))
        plan.num_samples = dict(entry["draws"])
        plan.host_tokens = {i: array("i") for i in entry["host_tokens"]}
        step = InFlightStep(plan, entry["seal_mark"])
        step.num_outstanding = entry["outstanding"]
        step.sequences = [sequences[i] for i in entry["sequences"]]
        step.swapped_requests = [requests[i] for i in entry["swapped"]]
        step.swap_in_requests = {block: requests[i] for block, i in entry["returning"]}
        step.void_slices = frozenset(entry["void"])
        scheduler.in_flight.append(step)
    return scheduler


def _fill_pool(pool: BlockPool, state: SchedulerState) -> None:
    for name in POOL_ARRAYS:
        setattr(pool, name, array(getattr(pool, name).typecode, state["pool"][name]))
    _set_fields(pool, POOL, state["pool"])
    pool._freed = list(state["pool"]["freed"])
    pool._packed_of = list(state["keys"])
    for block, packed in enumerate(pool._packed_of):
        if packed is not None:
            pool._shard(packed)[packed] = block


def new_request(
    request_id: str, prompt: array[int], entry: SchedulerState, *, stop: int, salt: bytes, select_beams: Any
) -> Request:
    """A request from the fields of a snapshot's entry or of a `RecordedRequest`."""
    return Request(
        request_id,
        prompt,
        SamplingParams(
            max_tokens=entry["max_tokens"], skip_reading_prefix_cache=entry["skip_prefix_cache"], detokenize=False
        ),
        max_tokens=entry["max_tokens"],
        stop_ids=(stop,),
        priority=entry["priority"],
        salt=salt,
        width=entry["width"],
        num_samples=entry["num_draws"],
        select_beams=select_beams,
        use_structured_output=entry["constrained"],
        pin=entry["pin"],
        tenant=entry["tenant"],
        index_in_call=entry["rank"],
    )
