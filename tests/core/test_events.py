"""The event stream: order of calls, and that events are built only for listeners."""

from __future__ import annotations

from octavo.core import events as ev
from octavo.core.events import EventStream
from tests.core.lab import Lab


def test_listeners_are_called_in_order_of_subscription() -> None:
    stream, seen = EventStream(), []
    stream.subscribe(lambda e: seen.append(("first", e)))
    stream.subscribe(lambda e: seen.append(("second", e)), blocks=True)
    event, block = ev.SwapLost("A"), ev.Allocated(3)
    stream.emit(event)
    stream.emit_block(block)
    assert seen == [("first", event), ("second", event), ("second", block)]


def test_flags_show_whether_there_are_listeners() -> None:
    stream = EventStream()
    flags = [(stream.active, stream.blocks)]
    stop_requests = stream.subscribe(lambda _: None)
    flags.append((stream.active, stream.blocks))
    stop_blocks = stream.subscribe(lambda _: None, blocks=True)
    flags.append((stream.active, stream.blocks))
    stop_blocks()
    flags.append((stream.active, stream.blocks))
    stop_requests()
    flags.append((stream.active, stream.blocks))
    assert flags == [(False, False), (True, False), (True, True), (True, False), (False, False)]


def test_unsubscribing_twice_leaves_others_alone() -> None:
    stream, seen = EventStream(), []
    listener = seen.append
    stop = stream.subscribe(listener, blocks=True)
    other: list[ev.Event] = []
    stream.subscribe(other.append, blocks=True)
    stop()
    stop()
    stream.emit(ev.SwapLost("A"))
    stream.emit_block(ev.Allocated(1))
    assert seen == [] and other == [ev.SwapLost("A"), ev.Allocated(1)]


def test_block_events_are_built_only_for_their_listeners() -> None:
    lab = Lab(8, listen=False)
    seen: list[ev.Event] = []
    lab.cache.events.subscribe(seen.append)
    lab.add("A", [1, 2, 3], 3, width=2)
    lab.run()
    assert {type(e) for e in seen} == {ev.Arrived, ev.Admitted, ev.Step, ev.Finished}


def test_table_events_carry_their_sequence() -> None:
    lab = Lab(8)
    lab.add("A", [1, 2, 3], 3, width=2)
    lab.run()
    tables = lab.emitted(ev.TableChanged)
    assert tables[0] == ev.TableChanged("A", 0, 0, 0, (1, 2))
    assert {(e.sequence_index, e.row) for e in tables} == {(0, 0), (1, 1)}


def test_table_events_carry_their_group() -> None:
    """The row is that of all groups, though the device's line is not."""
    lab = Lab(20, windows=(1, 9))
    lab.add("A", [1, 2, 3], 3)
    lab.add("B", [4], 1)
    lab.run()
    tables = lab.emitted(ev.TableChanged)
    assert tables[:3] == [
        ev.TableChanged("A", 0, 0, 0, ids, group) for group, ids in enumerate([(1, 2), (3, 4), (5, 6)])
    ]
    assert ev.TableChanged("A", 0, 0, 0, (0, 0), 1) in tables
    assert {(e.request_id, e.row, e.group) for e in tables} == {("A", 0, g) for g in range(3)} | {
        ("B", 1, g) for g in range(3)
    }


def test_sealed_events_carry_the_content() -> None:
    lab = Lab(8)
    lab.add("A", [1, 2, 3, 4], 1)
    lab.run()
    first, second = lab.emitted(ev.Sealed)
    assert first == ev.Sealed(1, 1, 0, lab.requests["A"].prompt_token_ids[:2].tobytes())
    assert (second.block_id, second.seal_id, second.parent_id) == (2, 2, 1)
