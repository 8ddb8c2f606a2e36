"""Measurements of a load: a record for each request, and the run that has them all."""

from __future__ import annotations

from dataclasses import dataclass, field

from octavo.bench.samples import Sample


@dataclass(slots=True)
class Record:
    """One sent request. Times are in seconds on one clock.

    start_s   sent              first_s   first token              last_s   last token
    gaps      seconds between chunks with tokens; a chunk may carry several tokens
    error     the reason of the failure; None: the request succeeded
    """

    sample: Sample
    start_s: float
    first_s: float = 0.0
    last_s: float = 0.0
    gaps: list[float] = field(default_factory=list)
    num_prompt: int = 0
    num_output: int = 0
    texts: list[str] = field(default_factory=list)
    error: str | None = None

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.start_s

    @property
    def e2el_s(self) -> float:
        return self.last_s - self.start_s

    @property
    def tpot_s(self) -> float | None:
        """Seconds per token after the first; None for a single token."""
        return (self.last_s - self.first_s) / (self.num_output - 1) if self.num_output > 1 else None


@dataclass(slots=True)
class Run:
    """Results of a load of `num_samples` requests. After Ctrl-C (`interrupted`) some have no record."""

    model: str
    num_samples: int
    records: list[Record] = field(default_factory=list)
    begin_s: float = 0.0
    end_s: float = 0.0
    interrupted: bool = False
