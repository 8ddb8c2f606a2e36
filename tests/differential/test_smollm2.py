"""SmolLM2 gives Transformers' greedy tokens for 20 prompts in one batch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.checkpoint import catalog
from octavo.checkpoint.resolve import open_checkpoint
from octavo.kernels import reference
from octavo.models.loading.loader import load_model

MODEL = "smollm2-135m-instruct"
NUM_NEW = 48
MT_BENCH = Path(__file__).parents[3] / "shared" / "data" / "prompts" / "mt_bench_question.jsonl"
PROMPTS = [
    "What is the capital of Italy?",
    "Write a haiku about rain on a tin roof.",
    "Explain in two sentences why the sky is blue.",
    "List three things to pack for a winter hike.",
    "If a train leaves at 9:40 and arrives at 11:05, how long does it take?",
    "Translate into French: Good morning, how are you?",
    "Write a Python function that reverses a string.",
    "Who wrote Pride and Prejudice?",
    "Give me a recipe for pancakes.",
    "What is 17 times 23? Show your steps.",
    "Complete the sequence: 2, 4, 8, 16,",
    "Describe a sunset to somebody who has never seen one.",
    "Is a tomato a fruit or a vegetable? Say why.",
    "Name the planets of the solar system in order.",
    "Write a polite e-mail that declines an invitation.",
    "What does the word 'ephemeral' mean?",
    "How do bees make honey?",
    "Tell a very short story about a lost key.",
    "What are the primary colours?",
    "Summarise the plot of Romeo and Juliet in one sentence.",
]

pytestmark = [
    pytest.mark.model,
    pytest.mark.proof,
    pytest.mark.skipif(
        not any(row.is_cached for row in catalog.list_models() if row.name == MODEL),
        reason=f"{MODEL} is not in the cache; run `octavo models fetch {MODEL}`",
    ),
]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(MODEL, dtype="float32", max_model_len=512, max_num_seqs=20, num_gpu_blocks_override=400) as llm:
        yield llm


def transformers_model(llm: LLM) -> Any:
    """Transformers' Llama with the weights of the same file."""
    import transformers

    spec = llm.spec
    config = transformers.LlamaConfig(
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_hidden_layers=spec.num_layers,
        num_attention_heads=spec.num_heads,
        num_key_value_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        rms_norm_eps=spec.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": spec.rope_theta},
        max_position_embeddings=spec.max_position_embeddings,
        tie_word_embeddings=spec.tie_word_embeddings,
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    # Loaded again: the engine's weights are packed.
    plain = load_model(
        open_checkpoint(llm.config.args.model), spec, dtype=torch.float32, device="cpu", ops=reference, max_len=1
    )
    weights = {weight.name: weight.target for weight in plain.weights()}
    if spec.tie_word_embeddings:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict(weights, strict=True, assign=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)  # its buffers were created on "meta" above
    return model.eval()


def check(llm: LLM, model: Any, prompts: list[str]) -> None:
    """Each token is the argmax of Transformers' logits after the tokens before it."""
    params = SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True)
    outputs = llm.chat([[{"role": "user", "content": p}] for p in prompts], params, use_tqdm=False)
    assert llm.stats().peak_running == len(prompts) == 20
    for prompt, output in zip(prompts, outputs, strict=True):
        tokens = output.outputs[0].token_ids
        assert len(tokens) == NUM_NEW and output.outputs[0].text
        ids = torch.tensor([output.prompt_token_ids + tokens[:-1]])
        with torch.inference_mode():
            logits = model(ids, logits_to_keep=NUM_NEW).logits[0]
        assert logits.argmax(-1).tolist() == tokens, prompt


def test_same_tokens_as_transformers(llm: LLM) -> None:
    check(llm, transformers_model(llm), PROMPTS)


@pytest.mark.slow
@pytest.mark.shared
@pytest.mark.skipif(not MT_BENCH.exists(), reason="no ../shared/data/prompts")
def test_same_tokens_as_transformers_gguf_loader(llm: LLM) -> None:
    import transformers

    path = catalog.cached_path(MODEL)
    model = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    turns = [json.loads(line)["turns"][0] for line in MT_BENCH.read_text().splitlines()]
    check(llm, model, sorted(turns, key=len)[:20])
