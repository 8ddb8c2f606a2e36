"""Metrics of an engine, under the name of vLLM's module."""

from octavo.frontend.metrics import Counter, Gauge, Histogram, Metric, Vector

__all__ = ["Counter", "Gauge", "Histogram", "Metric", "Vector"]
