"""Time from process start to the first token, with an empty kernel cache and with all kernels compiled.

    python benchmarks/startup.py MODEL [--load-format dummy] [--max-model-len 4096] [--runs 3]

Each start is a separate process. The first also reads libraries from disk that the others find in the page cache.
Prints a line of JSON per start: seconds for imports, for building the engine, and until the first token, and the
engine's own log line about its start.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from typing import Any


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument(
        "--load-format", default="auto", help="dummy: random weights for a directory with a config.json"
    )
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--begun", type=float, help=argparse.SUPPRESS)  # set in the measured process: its start time
    args = parser.parse_args()
    if args.begun is not None:
        print(json.dumps(start(args)), flush=True)
        return
    with tempfile.TemporaryDirectory() as cache:
        for run in range(args.runs):
            command = [sys.executable, __file__, *sys.argv[1:], "--begun", str(time.time())]
            done = subprocess.run(
                command, env={**os.environ, "TRITON_CACHE_DIR": cache}, stdout=subprocess.PIPE, text=True, check=True
            )
            times = json.loads(done.stdout.splitlines()[-1])
            print(json.dumps({"model": args.model, "compiled": run > 0, **times}), flush=True)


def start(args: argparse.Namespace) -> dict[str, Any]:
    """Start an engine and generate one token. Times count from the parent's request for the process."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("octavo").addHandler(handler)
    logging.getLogger("octavo").setLevel(logging.INFO)
    from octavo import LLM, SamplingParams

    imported = time.time()
    options: dict[str, Any] = {"load_format": args.load_format, "max_model_len": args.max_model_len}
    with LLM(args.model, skip_tokenizer_init=True, **options) as llm:
        built = time.time()
        params = SamplingParams(max_tokens=1, ignore_eos=True, detokenize=False)
        llm.generate([{"prompt_token_ids": [1, 2, 3]}], params, use_tqdm=False)
        first_token = time.time()
    return {
        "import_s": round(imported - args.begun, 2),
        "make_s": round(built - imported, 2),
        "first_token_s": round(first_token - args.begun, 2),
        "engine": next((line for line in messages if line.startswith("ready in")), ""),
    }


if __name__ == "__main__":
    main()
