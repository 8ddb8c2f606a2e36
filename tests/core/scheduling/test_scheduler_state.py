"""The queues, and the reasons why requests wait."""

from __future__ import annotations

import pytest

from octavo.core import events as ev
from octavo.core.policy import Policy
from octavo.core.request import Status
from tests.core.lab import Lab, Worlds

# -- Scheduling 1: order -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("by_priority", "order"), [(False, "ABCD"), (True, "CBDA")])
def test_requests_run_in_order_of_arrival_or_by_priority(by_priority: bool, order: str) -> None:
    """The lower number goes first, then the earlier request."""
    lab = Lab(40, rows=1, policy=Policy(by_priority=by_priority))
    for name, priority in (("A", 1), ("B", 0), ("C", -1), ("D", 0)):
        lab.add(name, [1, 2], 1, priority=priority)
    lab.run()
    assert lab.finished == list(order)


# -- Scheduling 4: wait reasons and events -----------------------------------------------------------------------------


def test_a_running_request_has_no_wait_reason(world: Worlds) -> None:
    lab = world(8, rows=1)
    lab.add("A", [1], 1)
    b = lab.add("B", [2], 2)
    lab.step()
    assert b.wait_reason == "rows"
    lab.plan()
    assert b.status is Status.RUNNING and b.wait_reason == ""


def test_a_wait_reason_is_emitted_with_its_numbers_when_it_changes_not_once_per_step(world: Worlds) -> None:
    lab = world(8)
    lab.add("gone", [1, 2, 3, 4, 5], 1)
    lab.run()
    assert (lab.pool.num_cached, lab.pool.num_free) == (2, 6)
    lab.add("A", [6] * 9, 4)
    lab.add("B", [7] * 9, 4)
    lab.run()
    assert lab.emitted(ev.Waiting) == [ev.Waiting("B", "blocks", 5, 1, 2)]
