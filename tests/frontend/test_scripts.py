"""The essential lines of vLLM's and nano-vllm's scripts, with the package's name changed."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

import octavo
from octavo import LLM, EngineArgs, SamplingParams, TokensPrompt
from octavo.errors import ParameterError, UnknownOptionError
from octavo.params.beam_search_params import BeamSearchParams
from octavo.utils.argparse_utils import FlexibleArgumentParser
from tests.engine.models import make_talking_checkpoint
from tests.text.samples import CHATML

PROMPTS = ["Hello,my-name-is", "The-capital-of-France-is"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Its tokenizer has no space and no newline, so the template has none either."""
    folder = make_talking_checkpoint(tmp_path_factory.mktemp("talking"), max_position_embeddings=512)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    template = CHATML.replace("\\n", "|").replace("<|im_start|>", "<s>").replace("<|im_end|>", "</s>")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": template}))
    return str(folder)


def test_nano_vllm_example(model: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    llm = LLM(model, enforce_eager=True, tensor_parallel_size=1)
    sampling_params = SamplingParams(temperature=0.6, max_tokens=256)
    prompts = [
        tokenizer.apply_chat_template([{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True)
        for prompt in PROMPTS
    ]
    outputs = llm.generate(prompts, sampling_params)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.prompt == prompt
        assert output["text"] == output.outputs[0].text and output["token_ids"] == output.outputs[0].token_ids
    with pytest.raises(KeyError):
        outputs[0]["logits"]
    llm.close()


def test_nano_vllm_bench(model: str) -> None:
    llm = LLM(model, enforce_eager=False, max_model_len=256)
    prompt_token_ids = [[5 + i % 90 for i in range(n)] for n in (3, 20, 40)]
    sampling_params = [SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=n) for n in (5, 9, 3)]
    llm.generate(["Benchmark:"], SamplingParams())
    outputs = llm.generate(prompt_token_ids, sampling_params, use_tqdm=False)
    assert [len(o["token_ids"]) for o in outputs] == [sp.max_tokens for sp in sampling_params]
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompt_token_ids], sampling_params, use_tqdm=False)
    assert [o.prompt_token_ids for o in outputs] == prompt_token_ids
    llm.close()


def test_vllm_generate_and_chat_examples(model: str) -> None:
    """generate.py and chat.py: options from a parser, and sampling parameters that are assigned to."""
    parser = FlexibleArgumentParser()
    EngineArgs.add_cli_args(parser)
    parser.set_defaults(model=model)
    group = parser.add_argument_group("Sampling parameters")
    group.add_argument("--max-tokens", type=int)
    group.add_argument("--top-k", type=int)
    line = [
        "--max_tokens",
        "7",
        "--top-k",
        "3",
        "--tensor-parallel-size",
        "1",
        "--max_model_len=200",
        "--enforce-eager",
    ]
    args = vars(parser.parse_args(line))
    max_tokens, top_k = args.pop("max_tokens"), args.pop("top_k")
    llm = LLM(**args)
    assert llm.config.max_model_len == 200 and llm.config.args.enforce_eager
    sampling_params = llm.get_default_sampling_params()
    sampling_params.max_tokens = max_tokens
    sampling_params.top_k = top_k
    sampling_params.ignore_eos = True
    outputs = llm.generate(PROMPTS, sampling_params)
    assert [o.prompt for o in outputs] == PROMPTS and [len(o.outputs[0].token_ids) for o in outputs] == [7, 7]
    assert llm.get_default_sampling_params().max_tokens != 7  # a copy
    conversation = [{"role": "system", "content": "You-are-helpful"}, {"role": "user", "content": "Hello"}]
    (one,) = llm.chat(conversation, sampling_params, use_tqdm=False)
    several = llm.chat([conversation for _ in range(3)], sampling_params, use_tqdm=True)
    assert [o.prompt for o in several] == [one.prompt] * 3
    sampling_params.top_p = 7.0
    with pytest.raises(ParameterError, match="top_p is 7"):
        llm.generate(PROMPTS, sampling_params)
    llm.close()


def test_vllm_pooling_examples_are_refused_with_the_reason(model: str) -> None:
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    parser.set_defaults(model=model, runner="pooling", enforce_eager=True)
    with pytest.raises(ParameterError, match="runner is 'pooling': models generate text"):
        LLM(**vars(parser.parse_args([])))
    args = EngineArgs.from_cli_args(argparse.Namespace(model=model, tensor_parallel_size=1, max_tokens=3, seed=4))
    assert args == EngineArgs(model=model, seed=4)


def test_vllm_tokenizer_and_prompts(model: str) -> None:
    llm = LLM(model=model, tokenizer=model, tokenizer_mode="auto", trust_remote_code=False, disable_log_stats=True)
    tokenizer = llm.get_tokenizer()
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], add_generation_prompt=True)["input_ids"]
    params = SamplingParams(temperature=0, max_tokens=5, stop_token_ids=[tokenizer.eos_token_id])
    (ours,) = llm.generate(TokensPrompt(prompt_token_ids=ids), params)
    (chat,) = llm.chat([{"role": "user", "content": "Hi"}], params)
    assert ours.prompt_token_ids == chat.prompt_token_ids == ids
    assert tokenizer.decode(ours.outputs[0].token_ids, skip_special_tokens=True) == ours.outputs[0].text
    assert tokenizer.convert_ids_to_tokens(ids)[0] == "<s>" == tokenizer.bos_token
    llm.close()


def test_vllm_beam_search(model: str) -> None:
    from octavo.outputs import BeamSearchOutput

    llm = LLM(model, max_logprobs=-1)
    params = BeamSearchParams(beam_width=3, max_tokens=6, ignore_eos=True)
    prompts = [TokensPrompt(prompt_token_ids=[5, 6, 7]), {"prompt": "abc"}, {"prompt": "x"}]
    outputs = llm.beam_search(prompts, params, use_tqdm=False)
    for output in outputs:
        assert isinstance(output, BeamSearchOutput) and len(output.sequences) == 3
        for sequence, hypothesis in zip(output.sequences, output.outputs, strict=True):
            assert sequence.tokens == output.prompt_token_ids + hypothesis.token_ids
            assert sequence.text == llm.get_tokenizer().decode(sequence.tokens)
            assert sequence.cum_logprob == hypothesis.cumulative_logprob < 0
        scores = [sequence.cum_logprob for sequence in output.sequences]
        assert scores == sorted(scores, reverse=True)
    for limit in (1, 2, 5):
        found = llm.beam_search(prompts, params, use_tqdm=False, concurrency_limit=limit)
        assert [[s.tokens for s in o.sequences] for o in found] == [[s.tokens for s in o.sequences] for o in outputs]
    with LLM(model, skip_tokenizer_init=True) as bare:
        (output,) = bare.beam_search(prompts[0], params, use_tqdm=False)
        assert [s.tokens for s in output.sequences] == [s.tokens for s in outputs[0].sequences]
        assert {s.text for s in output.sequences} == {None}
    num_steps = llm.stats().num_steps
    with pytest.raises(ParameterError, match="concurrency_limit is 0"):
        llm.beam_search(prompts, params, concurrency_limit=0)
    with pytest.raises(octavo.errors.PromptError):
        llm.beam_search([*prompts, ""], params, concurrency_limit=1)
    assert llm.stats().num_steps == num_steps
    llm.close()


def test_further_arguments_of_calls(model: str) -> None:
    llm = LLM(model)
    params, messages = SamplingParams(max_tokens=3), [{"role": "user", "content": "Hi"}]
    llm.generate("ab", params, lora_request=None, tokenization_kwargs={}, mm_processor_kwargs=None)
    llm.chat(messages, params, lora_request=None, chat_template_content_format="string")
    beams = BeamSearchParams(beam_width=2, max_tokens=2)
    llm.beam_search("ab", beams, lora_request=None)
    num_steps = llm.stats().num_steps
    calls: list[Callable[..., Any]] = [
        partial(llm.generate, "ab", params),
        partial(llm.chat, messages, params),
        partial(llm.beam_search, "ab", beams),
    ]
    for call in calls:
        with pytest.raises(ParameterError, match="lora_request is 'x': LoRA adapters are not supported"):
            call(lora_request="x")
        with pytest.raises(UnknownOptionError, match="has no option 'use_tdqm'; did you mean 'use_tqdm'"):
            call(use_tdqm=False)
    assert llm.stats().num_steps == num_steps
    llm.close()


def test_vllm_metrics_example(model: str) -> None:
    from octavo.v1.metrics.reader import Counter, Gauge, Histogram, Vector

    llm = LLM(model=model, disable_log_stats=False)
    llm.generate([[5, 6, 7], [8, 9]], SamplingParams(max_tokens=4, ignore_eos=True))
    values = {}
    for metric in llm.get_metrics():
        assert not isinstance(metric, Histogram | Vector) and metric.labels["model_name"] == model
        values[metric.name] = metric.value if isinstance(metric, Counter | Gauge) else None
    assert values["vllm:prompt_tokens"] == 5 and values["vllm:generation_tokens"] == 8
    assert values["vllm:num_requests_running"] == values["vllm:num_requests_waiting"] == 0
    assert values["vllm:prefix_cache_queries"] == llm.kv_stats().num_queried_tokens
    llm.close()


def test_vllm_prefix_caching_example(model: str) -> None:
    from octavo.distributed import cleanup_dist_env_and_memory

    params = SamplingParams(temperature=0.0)
    prompts = ["You-are-an-expert-school-principal" * 3 + prompt for prompt in PROMPTS]
    regular = LLM(model=model, gpu_memory_utilization=0.4, enable_prefix_caching=False, max_num_seqs=4)
    want = [output.outputs[0].text for output in regular.generate(prompts, params)]
    del regular
    cleanup_dist_env_and_memory()
    cached = LLM(model=model, enable_prefix_caching=True, gpu_memory_utilization=0.4, max_num_seqs=4)
    cached.generate(prompts[0], params)
    outputs = cached.generate(prompts, params)
    assert [output.outputs[0].text for output in outputs] == want and outputs[0].num_cached_tokens > 0
    cached.close()


async def test_vllm_async_streaming_example(model: str) -> None:
    from octavo.engine.arg_utils import AsyncEngineArgs
    from octavo.sampling_params import RequestOutputKind
    from octavo.v1.engine.async_llm import AsyncLLM

    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=model, enforce_eager=True))
    params = SamplingParams(max_tokens=20, temperature=0.8, top_p=0.95, seed=42, output_kind=RequestOutputKind.DELTA)
    try:
        texts = []
        for i in range(2):
            text = ""
            async for output in engine.generate(request_id=f"stream-{i}", prompt=PROMPTS[0], sampling_params=params):
                text += "".join(completion.text for completion in output.outputs)
            texts.append(text)
        assert texts[0] == texts[1] and texts[0]
    finally:
        engine.shutdown()


def test_names_that_scripts_import() -> None:
    from octavo.exceptions import VLLMValidationError
    from octavo.inputs import PromptType, TextPrompt
    from octavo.logprobs import Logprob
    from octavo.outputs import CompletionOutput, RequestOutput
    from octavo.sampling_params import BeamSearchParams, StructuredOutputsParams

    assert octavo.AsyncEngineArgs is octavo.EngineArgs and octavo.Logprob is Logprob
    assert octavo.PromptType is PromptType and octavo.TextPrompt is TextPrompt
    assert octavo.RequestOutput is RequestOutput and octavo.CompletionOutput is CompletionOutput
    with pytest.raises(VLLMValidationError):
        SamplingParams(temperature=float("nan"))
    assert octavo.BeamSearchParams is BeamSearchParams and octavo.AsyncLLMEngine is octavo.AsyncLLM
    assert octavo.ParameterError is ParameterError and issubclass(ParameterError, octavo.OctavoError)
    assert octavo.StructuredOutputsParams is StructuredOutputsParams
    assert {name for name in octavo.__all__ if getattr(octavo, name) is None} == set()
    assert Path(octavo.__file__).parent.name == "octavo"
