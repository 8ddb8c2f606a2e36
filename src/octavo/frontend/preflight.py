"""Checks of a model before torch is imported, which takes seconds and 200 MiB."""

from __future__ import annotations

from octavo.checkpoint.generation_config import sampling_defaults
from octavo.checkpoint.resolve import open_checkpoint
from octavo.checkpoint.safetensors_header import check_headers
from octavo.config import EngineArgs
from octavo.models.config import read_spec


def check_model(args: EngineArgs) -> None:
    """Raises the `ModelError` that loading would raise for the model's configuration or tensor names."""
    checkpoint = open_checkpoint(args.model, revision=args.revision, weights=False)
    args.for_checkpoint(read_spec(checkpoint).quant_method)
    sampling_defaults(args.generation_config, checkpoint)
    if checkpoint.format == "safetensors" and args.load_format != "dummy":
        check_headers(open_checkpoint(args.model, revision=args.revision))
