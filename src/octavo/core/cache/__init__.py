"""The parts of the KV cache manager: prefix index, swapping, statistics."""
