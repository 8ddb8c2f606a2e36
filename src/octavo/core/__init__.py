"""KV cache memory and scheduling, with the standard library only. Engine, simulator and oracle all run this code."""
