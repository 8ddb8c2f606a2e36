"""Flags of vLLM that Octavo lacks. The error line names them as such, instead of suggesting a similar option."""

from __future__ import annotations

_NAMES = """
allow-credentials allowed-headers allowed-methods allowed-origins api-key attention-backend
compilation-config config cpu-offload-gb data-parallel-size default-chat-template-kwargs
disable-access-log-for-endpoints disable-log-stats distributed-executor-backend download-dir enable-auto-tool-choice
enable-expert-parallel enable-force-include-usage enable-log-requests enable-lora enable-per-request-metrics
enable-prompt-tokens-details enable-request-id-headers enable-ssl-refresh hf-overrides
host kv-cache-dtype kv-cache-metrics kv-offloading-backend kv-transfer-config limit-mm-per-prompt
logprobs-mode lora-modules max-loras max-lora-rank max-num-partial-prefills
max-num-queued-reqs max-num-queued-tokens middleware pipeline-parallel-size port
prefix-caching-hash-algo profiler-config ramp-up-end-rps ramp-up-start-rps ramp-up-strategy reasoning-parser
root-path scheduler-reserve-full-isl
served-model-name shutdown-timeout skip-tokenizer-init spec-method spec-model spec-tokens speculative-config
sse-keep-alive-interval ssl-ca-certs ssl-certfile ssl-keyfile stream-interval tensor-parallel-size tokenizer
tokenizer-mode tokenizer-revision tool-call-parser trust-remote-code uds uvicorn-log-level
"""
UNSUPPORTED = frozenset(_NAMES.split())


def unsupported(option: str) -> str | None:
    """The unsupported vLLM flag in `option`, without a suffix such as `.method` of `--speculative-config.method`."""
    name = option.removeprefix("--").partition(".")[0].replace("_", "-")
    if not option.startswith("--") or not {name, name.removeprefix("no-")} & UNSUPPORTED:
        return None
    return f"--{name}"
