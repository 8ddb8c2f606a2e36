"""`new_event_loop` of servers and of the load generator: uvloop's, or asyncio's where uvloop is absent (Windows)."""

try:
    from uvloop import new_event_loop as new_event_loop
except ImportError:
    from asyncio import new_event_loop as new_event_loop  # type: ignore[assignment]
