"""The end of an assistant's turn is found in the chat template, and stops the engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from octavo import LLM, SamplingParams
from octavo.checkpoint.resolve import open_checkpoint
from octavo.text.end_of_turn import find_end_of_turn
from octavo.text.formats import harmony
from octavo.text.tokenizer import Tokenizer
from tests.text.samples import CHATML, train_byte_level


def loop(body: str) -> str:
    return "{{ bos_token }}{% for m in messages %}" + body + "{% endfor %}"


def turns(user: str, assistant: str) -> str:
    return loop("{% if m.role == 'user' %}" + user + "{% else %}" + assistant + "{% endif %}")


LLAMA3 = loop("<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>")
GEMMA = loop(
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<end_of_turn>\n"
)
MISTRAL = turns(" [INST] {{ m.content }} [/INST]", " {{ m.content }}{{ eos_token }}")
LLAMA2 = turns("{{ bos_token }}[INST] {{ m.content }} [/INST]", " {{ m.content }} {{ eos_token }}")
USER, ASSISTANT, END = "<\uff5cUser\uff5c>", "<\uff5cAssistant\uff5c>", "<\uff5cend▁of▁sentence\uff5c>"
DEEPSEEK = turns(USER + "{{ m.content }}", ASSISTANT + "{{ m.content }}" + END)
ROLES = "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}END{% endfor %}"
ZEPHYR = "<|system|>\nBe kind.{{ eos_token }}\n" + ROLES.replace("END", "{{ eos_token }}\n")
GLM = "[gMASK]<sop><|system|>\nBe kind." + ROLES.replace("END", "")
ONE_TURN = loop(
    "{% if loop.index > 2 %}{{ raise_exception('one turn') }}{% endif %}{{ m.role }}: {{ m.content }}<|end|>\n"
)
BASE = ["<s>", "</s>"]
# fmt: off
CASES = {
    "Llama 3": (LLAMA3, [*BASE, "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"], "<|eot_id|>"),
    "ChatML": (CHATML, [*BASE, "<|im_start|>", "<|im_end|>"], "<|im_end|>"),
    "ChatML with a system prompt":
        ("<|im_start|>system\nBe kind.<|im_end|>\n" + CHATML, ["<|im_start|>", "<|im_end|>"], "<|im_end|>"),
    "Gemma": (GEMMA, [*BASE, "<start_of_turn>", "<end_of_turn>"], "<end_of_turn>"),
    "Mistral, markers of text": (MISTRAL, BASE, "</s>"),
    "Mistral, markers of one token": (MISTRAL, [*BASE, "[INST]", "[/INST]"], "</s>"),
    "Llama 2": (LLAMA2, BASE, "</s>"),
    "DeepSeek": (DEEPSEEK, [*BASE, USER, ASSISTANT, END], END),
    "Zephyr with a system prompt": (ZEPHYR, BASE, "</s>"),
    "one token is the start of another": (LLAMA3, [*BASE, "<|eot", "<|eot_id|>"], "<|eot_id|>"),
    "only one turn": (ONE_TURN, [*BASE, "<|end|>"], "<|end|>"),
    # no token ends a turn
    "GLM: the next role": (GLM, ["[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>"], None),
    "ChatML without ends": (CHATML.replace("<|im_end|>", ""), ["<|im_start|>", "<|im_end|>"], None),
    "text": ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", BASE, None),
    "the end is no token": (LLAMA3, BASE, None),
    "no special tokens": (CHATML, [], None),
    "every sample is rejected": ("{{ raise_exception('no') }}", BASE, None),
    "the answer is left out": ("{{ messages[0].content }}</s>", BASE, None),
    "a broken template": ("{% for", BASE, None),
    "a long start": ("{% for i in range(9999) %}<s>{% endfor %}" + MISTRAL, BASE, "</s>"),
}
# fmt: on


@pytest.mark.parametrize("name", CASES)
def test_end_of_turn_is_the_token_that_follows_the_answer(name: str) -> None:
    template, contents, end = CASES[name]
    assert find_end_of_turn(template, {"bos_token": "<s>", "eos_token": "</s>"}, contents) == end


def test_end_of_turn_joins_the_end_tokens() -> None:
    tokenizer = Tokenizer(train_byte_level(), eos_token_ids=[0], chat_templates={"default": CHATML})
    assert (tokenizer.eos_token_ids, tokenizer.end_ids) == ((0,), (0, 2))
    assert Tokenizer.from_wire(tokenizer.to_wire()).end_ids == (0, 2)
    assert Tokenizer(train_byte_level(), eos_token_ids=[0]).end_ids == (0,)
    named = Tokenizer(train_byte_level(), eos_token_ids=[2], chat_templates={"default": CHATML})
    assert named.end_ids == (2,)


def test_end_of_a_harmony_message_ends_no_output() -> None:
    """In the template <|end|> follows the answer."""
    names = ["<|start|>", "<|end|>", "<|return|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|call|>"]
    backend = train_byte_level()
    first = backend.get_vocab_size()
    backend.add_special_tokens(names)
    template = loop("<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>") + "<|start|>assistant"
    assert find_end_of_turn(template, {}, names) == "<|end|>"
    tokenizer = Tokenizer(backend, eos_token_ids=[0], chat_templates={"default": template})
    assert tokenizer.end_ids == (0, first + names.index("<|return|>"), first + names.index("<|call|>"))


def test_an_output_of_gemma_ends_before_a_result() -> None:
    names = ["<|turn>", "<turn|>", "<|tool_response>"]
    backend = train_byte_level()
    first = backend.get_vocab_size()
    backend.add_special_tokens(names)
    template = loop("<|turn>{{ m.role }}\n{{ m.content }}<turn|>\n")
    assert Tokenizer(backend, eos_token_ids=[0], chat_templates={"default": template}).end_ids == (
        0,
        first + 1,
        first + 2,
    )


def test_names_of_harmony_in_a_gguf_file_end_no_message(write_gguf: Callable[..., Path]) -> None:
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    names = ["<|endoftext|>", *sorted(harmony.MARKERS)]

    def eos_ids(names: list[str]) -> set[int]:
        path = write_gguf(
            metadata={
                "tokenizer.ggml.pre": "llama-bpe",
                "tokenizer.ggml.tokens": [*alphabet, *names, "ab"],
                "tokenizer.ggml.token_type": [1] * 256 + [3] * len(names) + [1],
                "tokenizer.ggml.eos_token_id": 256,
            }
        )
        return {i - 256 for i in Tokenizer.from_checkpoint(open_checkpoint(path)).eos_token_ids}

    assert eos_ids(names) == {0}
    assert eos_ids(["<|endoftext|>", "<|end|>"]) == {0, 1}  # Phi-3


@pytest.mark.parametrize(("end", "kind"), [("<|eot_id|>", 3), ("<|im_end|>", 4), ("<end_of_turn>", 1), ("[over]", 3)])
def test_chat_stops_where_the_template_ends_a_turn(write_gguf: Callable[..., Path], end: str, kind: int) -> None:
    """The file names another end. Names that llama.cpp knows end a turn whatever their type."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    shapes = {
        "token_embd": (260, 16), "output": (260, 16), "output_norm": (16,), "blk.0.attn_norm": (16,),
        "blk.0.ffn_norm": (16,), "blk.0.attn_q": (16, 16), "blk.0.attn_k": (8, 16), "blk.0.attn_v": (8, 16),
        "blk.0.attn_output": (16, 16), "blk.0.ffn_gate": (32, 16), "blk.0.ffn_up": (32, 16), "blk.0.ffn_down": (16, 32),
    }  # fmt: skip
    path = write_gguf(
        tensors={f"{name}.weight": np.full(shape, 0.01, np.float32) for name, shape in shapes.items()},
        metadata={
            "tokenizer.ggml.pre": "llama-bpe",
            "tokenizer.ggml.tokens": [*alphabet, "<|begin_of_text|>", "<|stop|>", end, "ab"],
            "tokenizer.ggml.token_type": [1] * 256 + [3, 3, kind, 1],
            "tokenizer.ggml.bos_token_id": 256,
            "tokenizer.ggml.eos_token_id": 257,
            "tokenizer.chat_template": loop("{{ m.role }}: {{ m.content }}" + end),
        },
    )
    params = SamplingParams(temperature=0, max_tokens=8, logit_bias={258: 100})
    llm = LLM(str(path), dtype="float32", max_model_len=128)
    answer = llm.chat([{"role": "user", "content": "hi"}], params, use_tqdm=False)[0].outputs[0]
    assert (answer.finish_reason, len(answer.token_ids)) == ("stop", 1)
