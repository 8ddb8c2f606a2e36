"""A pytest plugin that runs vLLM's tests without vLLM.

`vllm.X` is Octavo's public X. Where there is none, it is a placeholder that skips the test that uses it: such a test
is about vLLM's own code. `tests.utils` and the fixtures of vLLM's conftest.py that tests of servers and `LLM` use
are replaced.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import urllib.parse
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import octavo_server
import openai
import pytest
import stand_ins

import octavo
import octavo.errors

ROOT = Path(os.environ["PEER_ROOT"])
MAX_MODEL_LEN, DEFAULT_MODEL_LEN = 8192, 3072
"""SmolLM2 often writes as much as fits, within a case's time."""
DROPPED = {
    # option -> number of its values. They depend on the suite's machine or model, or turn on what other cases test
    "--enable-lora": 0, "--lora-modules": None, "--max-lora-rank": 1, "--max-cpu-loras": 1, "--dtype": 1, "--port": 1,
    "--gpu-memory-utilization": 1, "--max-num-seqs": 1, "--model": 1, "--runner": 1,
    "--structured-outputs-config.backend": 1,
}  # fmt: skip

RENAMED = {"qwen3": "think", "deepseek_r1": "think"}
"""Values of --reasoning-parser -> the one of `octavo serve` that does the same."""


class LLM(octavo.LLM):
    """Octavo's, whatever model a test names."""

    def __init__(self, model: str = "", **options: Any) -> None:
        options.pop("gpu_memory_utilization", None)
        options.pop("dtype", None)
        options["max_model_len"] = min(options.get("max_model_len") or MAX_MODEL_LEN, MAX_MODEL_LEN)
        super().__init__(octavo_server.BASE_MODELS.get(model, octavo_server.MODEL), **options)


class ModelConfig:
    """What the tests use of vLLM's."""

    def __init__(self, model: str, *_: Any, **__: Any) -> None:
        self.model = model

    def get_vocab_size(self) -> int:
        return len(stand_ins.get_tokenizer(self.model))


PLATFORM = SimpleNamespace(
    **dict.fromkeys(("is_rocm", "is_cuda", "is_xpu", "is_tpu", "is_cuda_alike"), lambda: False),
    is_cpu=lambda: True,
    device_type="cpu",
)
OWN: dict[str, Any] = {
    "LLM": LLM,
    "ModelConfig": ModelConfig,
    "get_tokenizer": stand_ins.get_tokenizer,
    "current_platform": PLATFORM,
    "version": SimpleNamespace(_prev_minor_version=lambda: "0.0"),
    "__version__": octavo.__version__,
    "VLLMValidationError": octavo.errors.ParameterError,
    "cleanup_dist_env_and_memory": lambda *_, **__: None,
    "is_aiter_found_and_supported": lambda: False,
}


def counterpart(module: str, name: str) -> Any:
    """What stands for `name` of vLLM's `module`."""
    if name in OWN:
        return OWN[name]
    try:
        own = importlib.import_module(module.replace("vllm", "octavo", 1))
    except ImportError:
        own = octavo
    for place in (own, octavo):
        if hasattr(place, name):
            return getattr(place, name)
    return stand_ins.placeholder(module, name)


def without_dropped(options: Sequence[str]) -> list[str]:
    kept: list[str] = []
    rest = [part for option in options for part in (option.split("=", 1) if option.startswith("--") else [option])]
    while rest:
        name = rest.pop(0)
        name = name.replace("_", "-") if name.startswith("--") else name
        if name in DROPPED:
            number = DROPPED[name]
            while rest and (number is None or number) and not rest[0].startswith("--"):
                rest.pop(0)
                number = number and number - 1
        elif name == "--max-model-len":
            if name in kept:  # the last one counts
                del kept[kept.index(name) : kept.index(name) + 2]
            kept += [name, str(min(int(rest.pop(0)), MAX_MODEL_LEN))]
        elif name == "--reasoning-parser":
            value = rest.pop(0)
            kept += [name, RENAMED.get(value, value)]
        else:
            kept.append(name)
    return kept


class RemoteOpenAIServer:
    DUMMY_API_KEY = "token-abc123"

    def __init__(
        self,
        model: str,
        vllm_serve_args: Sequence[str],
        *,
        env_dict: Mapping[str, str] | None = None,
        seed: int | None = 0,
        override_hf_configs: Mapping[str, Any] | None = None,
        **_: Any,
    ) -> None:
        options = without_dropped(vllm_serve_args)
        if "--served-model-name" not in options:
            options += ["--served-model-name", model]
        if "--max-model-len" not in options:
            options += ["--max-model-len", str(DEFAULT_MODEL_LEN)]
        if "--uds" not in options:
            options += ["--port", "0"]
        if seed is not None and "--seed" not in options:
            options += ["--seed", str(seed)]
        if "--max-logprobs" in options:  # a limit of this server's
            options += ["--max-request-logprobs", "8000000"]
        if override_hf_configs:
            options += ["--hf-overrides", json.dumps(override_hf_configs)]
        server = octavo_server.serving(options, env_dict, model=model)
        self.proc = server.process
        self.uds = options[options.index("--uds") + 1] if "--uds" in options else None
        parts = urllib.parse.urlsplit(server.url)
        self.host, self.port = parts.hostname, None if self.uds else parts.port
        self.show_hidden_metrics = False

    def __enter__(self) -> RemoteOpenAIServer:
        return self

    def __exit__(self, *_: object) -> None:
        pass  # shared until the session's end

    @property
    def url_root(self) -> str:
        return f"http://{self.uds.split('/')[-1]}" if self.uds else f"http://{self.host}:{self.port}"

    def url_for(self, *parts: str) -> str:
        return "/".join([self.url_root, *(part.strip("/") for part in parts if part)])

    def _client(self, kind: Any, options: dict[str, Any]) -> Any:
        options = {"timeout": 280, "max_retries": 0, "api_key": self.DUMMY_API_KEY, **options}
        return kind(base_url=self.url_for("v1"), **options)

    def get_client(self, **options: Any) -> openai.OpenAI:
        return self._client(openai.OpenAI, options)

    def get_async_client(self, **options: Any) -> openai.AsyncOpenAI:
        return self._client(openai.AsyncOpenAI, options)


def same(*arguments: Any, **_: Any) -> Callable[..., Any]:
    """A decorator, with or without arguments, that changes nothing."""
    return arguments[0] if arguments and callable(arguments[0]) else lambda function: function


def needing(what: str) -> Callable[..., Any]:
    mark = pytest.mark.skip(reason=f"needs {what}")
    return lambda *arguments, **_: mark(arguments[0]) if arguments and callable(arguments[0]) else mark


UTILS = {
    "RemoteOpenAIServer": RemoteOpenAIServer,
    "VLLM_PATH": ROOT,
    "ROCM_ENV_OVERRIDES": {},
    "ROCM_EXTRA_ARGS": [],
    "ROCM_ENGINE_KWARGS": {},
    "create_new_process_for_each_test": same,
    "multi_gpu_only": needing("several GPUs"),
    "multi_gpu_test": needing("several GPUs"),
    "large_gpu_test": needing("a large GPU"),
    "requires_fp8": needing("FP8"),
}


stand_ins.install("vllm", counterpart)  # now: conftest.py files are imported before pytest_configure
sys.path.insert(0, str(ROOT))
for _name, _values in (("tests.utils", UTILS), ("tests.conftest", {})):
    sys.modules[_name] = stand_ins.StandIn(_name, stand_ins.placeholder, _values)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "skip_global_cleanup: of vLLM's conftest.py")


class Runner:
    """What the tests use of vLLM's `VllmRunner`: a context around `llm`."""

    def __init__(self, model: str, **options: Any) -> None:
        options.setdefault("max_model_len", 1024)
        self.llm = LLM(model, **options)

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *_: object) -> None:
        del self.llm

    def generate(
        self, prompts: Sequence[Any], sampling_params: Any, **options: Any
    ) -> list[tuple[list[list[int]], list[str]]]:
        found = self.llm.generate(list(prompts), sampling_params=sampling_params, **options)
        return [
            (
                [[*request.prompt_token_ids, *output.token_ids] for output in request.outputs],
                [(request.prompt or "") + output.text for output in request.outputs],
            )
            for request in found
        ]

    def generate_greedy(self, prompts: Sequence[Any], max_tokens: int, **options: Any) -> list[tuple[list[int], str]]:
        params = octavo.SamplingParams(temperature=0.0, max_tokens=max_tokens)
        return [(ids[0], texts[0]) for ids, texts in self.generate(prompts, params, **options)]

    def generate_w_logprobs(self, prompts: Sequence[Any], params: Any, **options: Any) -> list[tuple[Any, ...]]:
        found = self.llm.generate(list(prompts), sampling_params=params, **options)
        outputs = [(request, request.outputs[-1]) for request in found]
        rows = [(list(o.token_ids), o.text, o.logprobs, request.prompt_logprobs) for request, o in outputs]
        return rows if params.prompt_logprobs is not None else [row[:3] for row in rows]

    def generate_beam_search(
        self, prompts: Sequence[Any], beam_width: int, max_tokens: int, concurrency_limit: int | None = None
    ) -> list[tuple[list[list[int]], list[str]]]:
        params = octavo.BeamSearchParams(beam_width=beam_width, max_tokens=max_tokens)
        inputs = [{"prompt": p} if isinstance(p, str) else {"prompt_token_ids": p} for p in prompts]
        found = self.llm.beam_search(inputs, params, concurrency_limit=concurrency_limit)
        return [([s.tokens for s in one.sequences], [s.text for s in one.sequences]) for one in found]


@pytest.fixture(scope="session")
def vllm_runner() -> type[Runner]:
    return Runner


@pytest.fixture(scope="session")
def hf_runner() -> None:
    pytest.skip("compares with Transformers, as tests/engine does here")


@pytest.fixture
def example_prompts() -> Iterator[list[str]]:
    return (ROOT / "tests/prompts/example.txt").read_text().splitlines()
