"""Where requests go, and what the router knows of each replica's load."""

from __future__ import annotations

import pytest

from octavo.core.types import block_hashes, block_key
from octavo.router.router import (
    DECAY,
    DECODE_TOKENS,
    NUM_DECISIONS,
    STEP_TOKENS,
    UNCACHED_WEIGHT,
    UNLIKE,
    Router,
    RouterPolicy,
)

BOTH = 0b11
PROMPT = list(range(1000))


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def router(clock: Clock) -> Router:
    return Router("affinity", 16, clock)


def send(router: Router, name: str, prompt: list[int] = PROMPT, among: int = BOTH, salt: bytes = b"") -> int:
    return router.route(name, len(prompt), router.hashes(prompt, salt), among).replica


def warm_up(router: Router, clock: Clock, ratio: float, num: int = 50) -> None:
    """Replica 0 takes `ratio` times as long as replica 1, which takes 1 ms a token."""
    for i in range(num):
        for replica, seconds in ((0, ratio), (1, 1.0)):
            router.route(f"warm-{i}-{replica}", 1000, [], 1 << replica)
            clock.now += seconds
            router.start(f"warm-{i}-{replica}")
            router.finish(f"warm-{i}-{replica}")


def test_hashes_are_those_of_the_engines_cache() -> None:
    router = Router("affinity", 16)
    expected = [block_key(digest) for digest in block_hashes(PROMPT, 16, salt=b"a")]
    assert router.hashes(PROMPT, b"a") == expected != router.hashes(PROMPT, b"b")
    assert Router("least-loaded", 16).hashes(PROMPT) == Router("affinity", 0).hashes(PROMPT) == []


def test_prompt_goes_where_its_prefix_is_cached(router: Router) -> None:
    router.index.store(1, router.hashes(PROMPT[:800]))
    decision = router.route("a", len(PROMPT), router.hashes(PROMPT), BOTH)
    assert (decision.replica, decision.why, decision.chosen.num_hit_tokens) == (1, "least cost", 800)
    assert [option.num_hit_tokens for option in decision.options] == [0, 800]


def test_salts_share_no_prefix(router: Router) -> None:
    router.index.store(1, router.hashes(PROMPT, b"tenant"))
    assert send(router, "a", salt=b"other") == 0
    assert send(router, "b", salt=b"tenant") == 1


def test_prefix_counts_while_it_is_being_computed(router: Router) -> None:
    first = send(router, "a")
    (option,) = router.route("b", len(PROMPT), router.hashes(PROMPT), 1 << first).options
    assert (option.num_hit_tokens, option.num_queued_tokens) == (992, 1000)


def test_queued_prefix_is_better_than_an_empty_replica(router: Router) -> None:
    first = send(router, "a")
    decision = router.route("b", len(PROMPT), router.hashes(PROMPT), BOTH)
    assert (decision.replica, decision.why) == (first, "least cost")


def test_cost_weighs_the_tokens_to_compute(router: Router) -> None:
    router.index.store(0, router.hashes(PROMPT[:160]))
    router.route("queued", 500, [], 0b01)
    (option,) = router.route("a", len(PROMPT), router.hashes(PROMPT), 0b01).options
    assert option.predicted_s == STEP_TOKENS + 500 + 840
    assert option.cost_s == STEP_TOKENS + 500 + UNCACHED_WEIGHT * 840 + DECODE_TOKENS


def test_queue_outweighs_a_short_prefix(router: Router) -> None:
    router.index.store(0, router.hashes(PROMPT[:160]))
    assert send(router, "long", list(range(5000, 9000)), among=0b01) == 0
    assert send(router, "a") == 1


def test_slower_replica_gets_less(router: Router, clock: Clock) -> None:
    warm_up(router, clock, 10.0)
    router.index.store(0, router.hashes(PROMPT[:480]))
    assert send(router, "a") == 1  # 520 tokens at 10 ms each against 1,000 at 1 ms


def test_unmeasured_replica_counts_as_the_others(router: Router, clock: Clock) -> None:
    router.route("warm", 1000, [], 0b01)
    clock.now = 2.0
    router.start("warm")
    decision = router.route("a", 1000, [], BOTH)
    assert [option.predicted_s for option in decision.options] == pytest.approx([2.0, 2.0])


@pytest.mark.parametrize(("ratio", "is_as_fast"), [(0.9 * UNLIKE, True), (4 * UNLIKE, False)])
def test_small_differences_of_speed_do_not_count(router: Router, clock: Clock, ratio: float, is_as_fast: bool) -> None:
    warm_up(router, clock, ratio)
    fast, slow = sorted(option.predicted_s for option in router.route("a", 1000, [], BOTH).options)
    assert (fast == slow) == is_as_fast


def test_measured_speed_forgets_the_past(router: Router, clock: Clock) -> None:
    for name, seconds in (("slow", 9.0), ("fast", 1.0)):
        router.route(name, 1000, [], 0b01)
        clock.now += seconds
        router.start(name)
        router.finish(name)
    (option,) = router.route("a", 1000, [], 0b01).options
    assert option.predicted_s == pytest.approx((9.0 * DECAY + 1.0) / (DECAY + 1))


def test_equal_times_go_to_the_least_loaded(router: Router) -> None:
    router.route("busy", 10, [], 0b01)
    router.start("busy")
    decision = router.route("a", 10_000, [], BOTH)
    assert (decision.replica, decision.why) == (1, "least loaded")
    assert router.route("b", 10, [], 0b01).why == "only one"


@pytest.mark.parametrize("policy", ["least-loaded", "round-robin"])
def test_other_policies_ignore_prefixes(policy: RouterPolicy) -> None:
    router = Router(policy, 16)
    router.index.store(1, Router("affinity", 16).hashes(PROMPT))
    assert [send(router, str(i)) for i in range(4)] == [0, 1, 0, 1]


def test_round_robin_goes_on_after_one_has_left(router: Router) -> None:
    router = Router("round-robin", 16)
    assert [send(router, str(i), among=0b111) for i in range(3)] == [0, 1, 2]
    assert [send(router, str(i), among=0b101) for i in range(3, 7)] == [0, 2, 0, 2]


def test_moved_request_is_counted_elsewhere(router: Router) -> None:
    home = send(router, "a")
    router.index.store(1 - home, router.hashes(PROMPT[:160]))
    decision = router.move("a", len(PROMPT) + 5, 1 << 1 - home)
    assert (decision.replica, decision.chosen.num_hit_tokens, router.stats.num_moved) == (1 - home, 160, 1)
    assert [router.load(i).num_queued_tokens for i in (home, 1 - home)] == [0, len(PROMPT) + 5 - 160]
    router.start("a")
    assert not router.index._coming


def test_finished_requests_leave_nothing(router: Router) -> None:
    for i in range(3 * NUM_DECISIONS):
        send(router, str(i), [i] * 200)
        if i % 2:
            router.start(str(i))
            router.start(str(i))
        router.finish(str(i))
        router.finish(str(i))
        router.start(str(i))
    assert len(router.decisions) == NUM_DECISIONS and len(router.index) == 0 and not router.index._coming
    assert all(load.num_requests == load.num_queued_tokens == 0 for load in map(router.load, range(2)))
    assert not router._routed


def test_few_measurements_prove_nothing(router: Router, clock: Clock) -> None:
    warm_up(router, clock, 10.0, num=2)
    slow, fast = router.route("a", 1000, [], BOTH).options
    assert slow.predicted_s == fast.predicted_s


def test_idle_replica_is_not_slow_for_taking_a_step(router: Router, clock: Clock) -> None:
    """Both take 0.1 s and 1 ms a token; only one has had long prompts."""
    for i in range(20):
        for replica, num_tokens in ((0, 10 + i), (1, 4000 + i)):
            router.route(f"{i}-{replica}", num_tokens, [], 1 << replica)
            clock.now += 0.1 + 0.001 * num_tokens
            router.start(f"{i}-{replica}")
            router.finish(f"{i}-{replica}")
    decision = router.route("a", 1000, [], BOTH)
    assert [option.predicted_s for option in decision.options] == pytest.approx([1.1, 1.1])
