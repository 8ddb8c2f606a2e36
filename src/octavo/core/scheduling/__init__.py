"""The parts of the scheduler: its state, and what functions on it do in a step."""
