"""Memory and scheduling, in the standard library alone. Every engine, simulator and oracle runs this same core."""
