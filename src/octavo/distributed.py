"""`cleanup_dist_env_and_memory`, under the name of vLLM's module."""

from __future__ import annotations

import gc


def cleanup_dist_env_and_memory(shutdown_ray: bool = False) -> None:
    """Free the memory of `LLM`s that have been dropped."""
    del shutdown_ray
    gc.collect()
