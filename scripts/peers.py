"""Runs the peers' own tests of their OpenAI-compatible servers against `octavo serve`.

    python scripts/clients.py peers [--vllm PATH] [--llama-cpp PATH] [--sglang PATH] [-k WORDS] [--output FILE]

PATH is a checkout or an unpacked source distribution (vllm and llama_cpp_python are on PyPI); nothing but pip packages
is fetched. tests/clients/peer_suites replaces what starts the peer's server. The table of cases and reasons goes to
FILE (.scratch/peers.md), its groups are printed. The exit code is 1 if a case fails without a reason.
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
CASE_S = 300


LLAMA_CPP_OWN = ("completion", "ctx_shift", "infill", "slot_save", "speculative", "tokenize", "tool_call", "lora")
Groups = tuple[tuple[str, str], ...]
"""(patterns with spaces between them, reason) pairs."""


@dataclass(frozen=True)
class Suite:
    """A peer's tests. Each group of cases is a pattern, or several, and a reason.

    tests           folders and files, relative to `root`
    not_applicable  about the peer's own code, model or machine; they are not run
    missing         about what is not offered here; they are not run
    differs         what is done differently: a failure is expected
    """

    plugin: str
    root: str
    tests: tuple[str, ...]
    not_applicable: Groups = ()
    missing: Groups = ()
    differs: Groups = ()

    def reasons(self) -> list[tuple[str, str, str]]:
        """(pattern, outcome, reason); the first pattern that matches counts."""
        groups = (("differs", self.differs), ("missing", self.missing), ("not applicable", self.not_applicable))
        return [(p, outcome, reason) for outcome, pairs in groups for ps, reason in pairs for p in ps.split()]


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
        not_applicable=(
            ("*test_cli_args*", "vLLM's own parser of its command line"),
            ("*test_collective_rpc*", "vLLM's own workers"),
            ("*test_shutdown*", "vLLM's own processes"),
            ("*llm/test_chat.py::test_chat_batch_failure_cleanup", "reads LLM.llm_engine, vLLM's own"),
            ("*test_error_sanitization.py*", "reads vLLM's source"),
            ("tests/tool_use/test_tool_choice_required.py::*", "tests the peer's own code"),
            ("*/correctness/* *test_accuracy*", "measures a large model"),
            ("*test_gpu_utilization*", "needs a GPU"),
            ("*test_offline_mode*", "downloads from the hub"),
            ("*test_basic.py::test_request_cancellation*", "needs a context of 10,100 tokens"),
            (
                "*test_completion.py::test_single_completion* *test_chat.py::test_single_chat_session*"
                " *test_no_bad_words.py* *test_chat.py::test_more_than_one_prompt_logprobs_chat*"
                " *llm/test_chat.py::test_chat_extra_kwargs* *llm/test_generate.py::test_max_model_len",
                "counts or expects the tokens of its model",
            ),
            (
                "*test_chat.py::test_structured_outputs_json_chat *test_chat.py::test_response_format_json_object"
                " *test_chat.py::test_structured_outputs_regex_chat"
                " *test_chat.py::test_response_format_json_schema *test_chat.py::test_complex_message_content"
                " *test_chat_echo.py::test_chat_session_with_echo_and_continue_final_message[[]*"
                " *test_root_path.py::*[[]test_case[23][]]"
                " *test_return_token_ids.py::test_chat_completion_with_tool_use"
                " *test_return_token_ids.py::test_comparison_with_prompt_logprobs* *test_chat.py::test_custom_role"
                " *test_completion_with_function_calling.py::test_named_tool_use"
                " *responses/test_basic.py::test_simple_input"
                " *test_structured_output.py::test_structured_output_with_parse"
                " tests/tool_use/test_parallel_tool_calls.py::*[[]hermes*"
                " tests/tool_use/test_parallel_tool_calls.py::*[[]llama*"
                " tests/tool_use/test_tool_calls.py::test_tool_call_and_choice*"
                " tests/tool_use/test_tool_calls.py::test_tool_call_with_results[[]llama*"
                " *responses/test_basic.py::test_instructions *responses/test_basic.py::test_chat"
                " *test_structured_output.py::test_structured_output"
                " *test_completion_with_function_calling.py::test_function_tool_use[[]False-auto-*"
                " *test_function_call.py::test_function_tool_use[[]auto-*"
                " *test_function_call.py::test_function_calling_with_streaming_expected_arguments*"
                " *test_function_call.py::test_function_calling_with_streaming_types[[]False-auto-*"
                " *test_function_call.py::test_function_calling_with_streaming_types[[]True-required-*"
                " *test_function_call.py::test_function_calling_with_streaming_forced_tool_choice[[]auto-*",
                "expects an answer, or its end, that SmolLM2-135M does not give",
            ),
            (
                "*test_completion_with_function_calling.py::test_function_tool_use[[]True-*"
                " *test_function_call.py::test_function_tool_use[[]required-* *test_simple.py::test_reasoning_item*"
                " *test_simple.py::test_*_reasoning_tokens_e2e* *test_include_reasoning.py*",
                "needs a model that reasons",
            ),
        ),
        missing=(
            ("*lora* *test_models.py::test_check_models", "LoRA adapters"),
            (
                "*_vlm* *multimodal* *test_extra_content_fields* *test_prompt_validation.py::test_require_mm_embeds*",
                "images, audio and video",
            ),
            ("*prompt_embeds*", "prompts as embeddings"),
            ("*harmony* *test_mcp_tools* *test_parsable_context*", "gpt-oss's weights and its built-in tools"),
            ("*test_run_batch*", "the command run-batch"),
            ("*sagemaker* *test_chat.py::test_invocations", "SageMaker's routes"),
            ("*test_sleep*", "sleep mode"),
            ("*test_tensorizer*", "weights in Tensorizer's format"),
            ("*test_return_routed_experts*", "models with experts"),
            ("*test_dp_supervisor* *test_multi_api_servers*", "data parallelism"),
            ("*test_batched_chat_completions.py*", "batched chats, /v1/chat/completions/batch"),
            ("*test_stateful.py*", "stored responses"),
            ("*test_simple.py::test_enable_response_messages*", "enable_response_messages of responses"),
            ("*test_namespace_tool_separator.py*", "tools other than functions"),
            ("*::test_v2_endpoint_accepts*", "embeddings, /v2/embed"),
            ("*test_orca_metrics.py*", "ORCA's header endpoint-load-metrics"),
            (
                "tests/tool_use/mistral/* tests/tool_use/*[[]mistral* tests/tool_use/*[[]granite*"
                " tests/tool_use/*[[]internlm* tests/tool_use/*[[]toolACE*",
                "tool calls in the formats of Mistral, Granite, InternLM and Pythonic models",
            ),
            ("*test_thinking_token_budget.py*", "thinking_token_budget"),
            ("*::test_logprob_token_ids_[rs]* *test_completion.py::test_logprob_token_ids*", "logprob_token_ids"),
        ),
        differs=(
            (
                "*test_chat.py::test_extra_fields_allowed",
                "unknown parameters are refused, unless --unknown-params warn",
            ),
            (
                "*test_chat.py::test_long_seed *test_prompt_validation.py::test_empty_prompt"
                " *test_prompt_validation.py::test_out_of_vocab*",
                "the wording of errors is another",
            ),
            (
                "*test_struct_output_generate.py::* *test_beam_search.py::test_beam_search_structured_output*",
                "structured_outputs_config is refused: grammars have one backend",
            ),
            ("*::test_no_request_id_header", "every response has X-Request-Id"),
        ),
    ),
    "llama-cpp": Suite(
        "peer_llama_cpp",
        "tools/server/tests",
        ("unit",),
        not_applicable=(
            (
                " ".join(f"unit/test_{name}.py*" for name in LLAMA_CPP_OWN)
                + " unit/test_basic.py::test_server_props unit/test_basic.py::test_server_slots"
                " unit/test_basic.py::test_load_split_model unit/test_basic.py::test_no_webui"
                " unit/test_security.py::test_correct_api_key unit/test_chat_completion.py::*with_timings_per_token"
                " unit/test_chat_completion.py::*with_json_schema* unit/test_chat_completion.py::*with_grammar*",
                "llama.cpp's own routes, parameters and options",
            ),
            (
                "unit/test_chat_completion.py::test_chat_completion[[]*"
                " unit/test_chat_completion.py::test_chat_completion_stream*",
                "expects the words and tokens of its model",
            ),
            ("unit/test_basic.py::test_server_models", "counts models; other cases need a server with three names"),
        ),
        missing=(("unit/test_embedding.py* unit/test_rerank.py*", "embeddings and reranking"),),
        differs=(
            ("unit/test_chat_completion.py::*with_openai_library", "fingerprints begin with octavo-"),
            ("unit/test_chat_completion.py::test_logprobs_stream", "as at OpenAI, the role's chunk has no logprobs"),
            ("unit/test_security.py::*Allow-Credentials*", "pages send no cookies"),
            ("unit/test_security.py::*Allow-Headers*", "CORS answers name the headers that were asked for"),
            (
                "unit/test_basic.py::test_server_start_simple unit/test_security.py::*[[]/health[]]",
                "/health has no body",
            ),
            ("unit/test_security.py::*[[]/models[]]", "every route of OpenAI's needs the key"),
            ("unit/test_security.py::test_openai_library_*", "OpenAI's routes are at /v1 only"),
        ),
    ),
    "sglang": Suite("peer_sglang", "test", ("registered/openai_server", "srt/openai_server")),
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
        "PEER_REASONS": json.dumps(suite.reasons()),
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


OUTCOMES = ("passed", "failed", "differs", "missing", "not applicable")


def summary(name: str, cases: list[dict[str, str]]) -> str:
    """The groups of cases that did not pass, with their reasons."""
    counts = Counter(case["outcome"] for case in cases)
    groups = Counter((case["outcome"], case["message"]) for case in cases if case["outcome"] != "passed")
    lines = [f"## {name}: " + ", ".join(f"{counts[outcome]} {outcome}" for outcome in OUTCOMES), ""]
    lines += ["| cases | outcome | reason |", "|--:|---|---|"]
    for (outcome, reason), count in sorted(groups.items(), key=lambda g: (OUTCOMES.index(g[0][0]), -g[1], g[0][1])):
        lines.append(f"| {count} | {outcome} | {reason.replace('|', '/')} |")
    return "\n".join(lines) + "\n"


def table(name: str, cases: list[dict[str, str]]) -> str:
    lines = [f"## {name}: every case", "", "| case | outcome | why |", "|---|---|---|"]
    for case in sorted(cases, key=lambda case: (OUTCOMES.index(case["outcome"]), case["case"])):
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
    options.output.write_text("\n".join(part(n, cases) for part in (summary, table) for n, cases in found.items()))
    print("\n".join(summary(name, cases) for name, cases in found.items()))
    return int(any(case["outcome"] == "failed" for cases in found.values() for case in cases))
