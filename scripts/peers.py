"""Runs the peers' own tests of their OpenAI-compatible servers against `octavo serve`.

    python scripts/clients.py peers [--vllm PATH] [--llama-cpp PATH] [--sglang PATH] [-k WORDS] [--output FILE]

PATH is a checkout or an unpacked source distribution (vllm and llama_cpp_python are on PyPI); nothing but pip packages
is fetched. tests/clients/peer_suites replaces what starts the peer's server. The table of cases, passed, failed and
not applicable with the reason, goes to FILE (.scratch/peers.md). The exit code is 1 if a case fails.
"""

from __future__ import annotations

import argparse
import json
import os
import site
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PLUGINS = ROOT / "tests/clients/peer_suites"
PACKAGES = [
    "openai>=2",
    "pytest-asyncio",
    "pytest-timeout",
    "aiohttp",
    "fastapi",
    "jsonschema",
    "prometheus_client",
    "pybase64",
    "regex",
    "requests",
    "urllib3",
]
CASE_S = 120


@dataclass(frozen=True)
class Suite:
    """A peer's tests.

    tests           folders and files, relative to `root`
    not_applicable  patterns of cases, and why they do not apply
    """

    plugin: str
    root: str
    tests: tuple[str, ...]
    not_applicable: tuple[tuple[str, str], ...]


WIT = "expects an answer that SmolLM2-135M does not give"
PYDANTIC = "expects pydantic's words"
REASONS = "needs a model that reasons"
LORA = "LoRA adapters are not served"
MODALITIES = "text is the only modality"
HARMONY = "gpt-oss and its Harmony format are not served"

LLAMA_CPP_OWN = ("completion", "ctx_shift", "infill", "slot_save", "speculative", "tokenize", "tool_call")
LLAMA_CPP_OWN += ("embedding", "rerank", "lora")

SUITES = {
    "vllm": Suite(
        "peer_vllm",
        ".",
        (
            "tests/entrypoints/openai",
            "tests/entrypoints/serve",
            "tests/entrypoints/llm",
            "tests/tool_use",
            "tests/samplers",
        ),
        (
            ("*lora*", LORA),
            ("*harmony*", HARMONY),
            ("*prompt_embeds*", "a prompt is text or token ids"),
            ("*_vlm*", MODALITIES),
            ("*multimodal*", MODALITIES),
            ("*test_extra_content_fields*", MODALITIES),
            ("*test_run_batch*", "a command line of vLLM's own"),
            ("*test_cli_args*", "a command line of vLLM's own"),
            ("*sagemaker*", "SageMaker's routes are not served"),
            ("*test_collective_rpc*", "vLLM's workers"),
            ("*test_sleep*", "vLLM's sleep mode"),
            ("*test_tensorizer*", "vLLM's weight loader"),
            ("*test_return_routed_experts*", "vLLM's experts"),
            ("*test_dp_supervisor*", "vLLM's data parallelism"),
            ("*test_multi_api_servers*", "vLLM's data parallelism"),
            ("*test_shutdown*", "vLLM's processes"),
            ("*/correctness/*", "measures a large model"),
            ("*test_accuracy*", "measures a large model"),
            ("*test_gpu_utilization*", "needs a GPU"),
            ("*test_offline_mode*", "downloads from the hub"),
            ("*test_mcp_tools*", HARMONY),
            ("*test_completion.py::test_single_completion*", "counts the tokens of OPT's tokenizer"),
            ("*test_models.py::test_check_models", LORA),
            ("*test_chat.py::test_single_chat_session*", "counts the tokens of Zephyr's tokenizer"),
            ("*test_chat.py::test_structured_outputs_json_chat", WIT),
            ("*test_chat.py::test_response_format_json_object", WIT),
            ("*test_chat.py::test_response_format_json_schema", WIT),
            ("*test_chat.py::test_complex_message_content", WIT),
            ("*test_chat_echo.py::test_chat_session_with_echo_and_continue_final_message[[]test_case1[]]", WIT),
            ("*test_root_path.py::*[[]test_case2[]]", WIT),
            ("*test_chat.py::test_long_seed", PYDANTIC),
            ("*test_chat.py::test_invocations", "SageMaker's routes are not served"),
            ("*test_batched_chat_completions.py*", "a route of vLLM's own, /v1/chat/completions/batch"),
            ("*test_parsable_context.py*", HARMONY),
            ("*test_completion_with_function_calling.py::test_function_tool_use[[]True-*", REASONS),
            ("*test_completion_with_function_calling.py::test_function_tool_use[[]False-auto-*", WIT),
            ("*test_function_call.py::test_function_tool_use[[]auto-*", WIT),
            ("*test_function_call.py::test_function_tool_use[[]required-*", REASONS),
            ("*test_function_call.py::test_function_calling_with_streaming_expected_arguments*", WIT),
            ("*test_function_call.py::test_function_calling_with_streaming_types[[]False-auto-*", WIT),
            ("*test_function_call.py::test_function_calling_with_streaming_forced_tool_choice[[]auto-*", WIT),
            ("*test_namespace_tool_separator.py*", "functions are the only tools, see docs/clients.md"),
            ("*responses/test_basic.py::test_simple_input", WIT),
            ("*responses/test_basic.py::test_instructions", WIT),
            ("*responses/test_basic.py::test_chat", WIT),
            ("*test_structured_output.py::test_structured_output", WIT),
            ("*test_simple.py::test_reasoning_item*", REASONS),
            ("*test_simple.py::test_enable_response_messages*", "a parameter of vLLM's own, enable_response_messages"),
            ("*test_no_bad_words.py*", "expects the tokens of its model"),
            ("*test_prompt_validation.py::test_require_mm_embeds*", MODALITIES),
            ("*test_simple.py::test_*_reasoning_tokens_e2e*", REASONS),
            ("*test_stateful.py*", "responses are not stored, see docs/clients.md"),
            ("*test_basic.py::test_request_cancellation*", "needs a context of 10,100 tokens"),
            ("*::test_v2_endpoint_accepts*", "a route of vLLM's own, /v2/embed"),
            ("*::test_no_request_id_header", "every response has X-Request-Id, see docs/clients.md"),
            ("*::test_tokenizer_info*", "a route of vLLM's own, /tokenizer_info"),
            ("*::test_server_load*", "a route of vLLM's own, /load"),
            ("*test_orca_metrics.py*", "ORCA's header endpoint-load-metrics is not offered"),
            ("*test_error_sanitization.py*", "reads vLLM's source"),
            ("*test_thinking_token_budget.py*", REASONS),
            ("*test_include_reasoning.py*", REASONS),
        ),
    ),
    "llama-cpp": Suite(
        "peer_llama_cpp",
        "tools/server/tests",
        ("unit",),
        (
            *((f"unit/test_{name}.py*", "llama.cpp's own routes and options") for name in LLAMA_CPP_OWN),
            ("unit/test_basic.py::test_server_props", "a route of llama.cpp's own, /props"),
            ("unit/test_basic.py::test_server_slots", "a route of llama.cpp's own, /slots"),
            ("unit/test_basic.py::test_load_split_model", "a route of llama.cpp's own, /completion"),
            ("unit/test_basic.py::test_no_webui", "a page of llama.cpp's own"),
            ("unit/test_chat_completion.py::test_chat_completion[[]*", "expects the words and tokens of its model"),
            ("unit/test_chat_completion.py::test_chat_completion_stream*", "expects the words and tokens of its model"),
            ("unit/test_chat_completion.py::*with_timings_per_token", "a parameter of llama.cpp's own"),
            ("unit/test_chat_completion.py::*with_json_schema*", "a parameter of llama.cpp's own, json_schema"),
            ("unit/test_chat_completion.py::*with_grammar*", "a parameter of llama.cpp's own, grammar"),
            ("unit/test_basic.py::test_server_models", "counts models; other cases need a server with three names"),
            ("unit/test_chat_completion.py::*with_openai_library", "expects llama.cpp's fingerprint"),
            ("unit/test_chat_completion.py::test_logprobs_stream", "OpenAI's chunk with the role has no logprobs"),
            ("unit/test_security.py::*Allow-Credentials*", "pages send no cookies"),
            ("unit/test_security.py::*Allow-Headers*", "the answer names the headers that were asked for"),
            ("unit/test_basic.py::test_server_start_simple", "expects a body of /health"),
            ("unit/test_security.py::*[[]/health[]]", "expects a body of /health"),
            ("unit/test_security.py::*[[]/models[]]", "every route of OpenAI's needs the key"),
            ("unit/test_security.py::test_openai_library_*", "OpenAI's routes are at /v1 only, see docs/clients.md"),
            ("unit/test_security.py::test_correct_api_key", "the answer of llama.cpp's own /completions"),
        ),
    ),
    "sglang": Suite("peer_sglang", "test", ("registered/openai_server", "srt/openai_server"), ()),
}


def python_of(folder: Path) -> Path:
    """The Python of the peers' environment, which also has this project's packages."""
    from clients import make_environment

    python = make_environment(folder, PACKAGES)
    places = [str(ROOT / "src"), *site.getsitepackages()]
    found = next(folder.glob("lib/python*/site-packages"))
    (found / "project.pth").write_text("\n".join(places) + "\n")
    for path in map(Path, site.getsitepackages()):
        for pth in path.glob("*.pth"):
            extra = [line for line in pth.read_text().splitlines() if line.startswith("/")]
            (found / f"project_{pth.stem}.pth").write_text("\n".join(extra) + "\n")
    return python


def locate(path: Path, inner: str) -> Path:
    """`inner` of a checkout, or of the copy of it that an sdist carries."""
    for place in (path / inner, *sorted(path.glob(f"vendor/*/{inner}"))):
        if place.is_dir():
            return place.resolve()
    sys.exit(f"{path} has no {inner}")


def run(name: str, path: Path, python: Path, words: str, base_model: Path) -> list[dict[str, str]]:
    suite = SUITES[name]
    root = locate(path, suite.root)
    report = ROOT / ".scratch" / f"peers-{name}.jsonl"
    report.parent.mkdir(exist_ok=True)
    report.write_text("")
    environment = {
        **os.environ,
        "PYTHONPATH": str(PLUGINS),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PEER_ROOT": str(root),
        "PEER_REPORT": str(report),
        "PEER_NOT_APPLICABLE": json.dumps(suite.not_applicable),
        "PEER_BASE_MODEL": str(base_model),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    tests = [test for test in suite.tests if (root / test).exists()]
    if not tests:
        sys.exit(f"{root} has none of {', '.join(suite.tests)}")
    command = [str(python), "-m", "pytest", "-c", os.devnull, "--rootdir", str(root), "-q", "--no-header", "--tb=no"]
    command += [
        "--confcutdir",
        str(root.joinpath(*Path(tests[0]).parts[:2])),
    ]  # not the peer's own conftest.py, which starts its engine
    command += ["-p", "peer_report", "-p", suite.plugin, "-p", "no:cacheprovider", "--timeout", str(CASE_S)]
    command += ["--continue-on-collection-errors", "-W", "ignore", "-o", "asyncio_default_fixture_loop_scope=function"]
    command += ["-k", words] if words else []
    subprocess.run([*command, *tests], cwd=root, env=environment, check=False)
    cases = {}  # the last outcome of a case counts, except that a failure stays
    for line in report.read_text().splitlines():
        case = json.loads(line)
        known = cases.get(case["case"])
        if known is None or known["outcome"] != "failed":
            cases[case["case"]] = case
    return list(cases.values())


def table(name: str, cases: list[dict[str, str]]) -> str:
    counts = Counter(case["outcome"] for case in cases)
    lines = [f"## {name}: " + ", ".join(f"{counts[o]} {o}" for o in ("passed", "failed", "not applicable")), ""]
    lines += ["| case | outcome | why |", "|---|---|---|"]
    order = {"failed": 0, "passed": 1, "not applicable": 2}
    for case in sorted(cases, key=lambda case: (order[case["outcome"]], case["case"])):
        lines.append(f"| {case['case']} | {case['outcome']} | {case['message'].replace('|', '/')} |")
    return "\n".join(lines) + "\n"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="scripts/clients.py peers")
    for name in SUITES:
        parser.add_argument(f"--{name}", type=Path)
    parser.add_argument("-k", default="", help="pytest's -k: only cases that match")
    parser.add_argument("--output", type=Path, default=ROOT / ".scratch/peers.md")
    options = parser.parse_args(arguments)
    paths = {name: path for name in SUITES if (path := getattr(options, name.replace("-", "_"))) is not None}
    if not paths:
        parser.error("give a path of at least one peer")
    python = python_of(ROOT / ".venv-clients/peers")
    sys.path.insert(0, str(ROOT))
    from tests.engine.models import make_talking_checkpoint

    with tempfile.TemporaryDirectory() as directory:
        base = make_talking_checkpoint(Path(directory) / "base", max_position_embeddings=8192)
        found = {name: run(name, path, python, options.k, base) for name, path in paths.items()}
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text("\n".join(table(name, cases) for name, cases in found.items()))
    print(options.output.read_text())
    return int(any(case["outcome"] == "failed" for cases in found.values() for case in cases))
