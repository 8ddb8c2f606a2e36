"""`octavo doctor --quality`: the perplexity of a text in each choice of bits."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from octavo.errors import ParameterError
from octavo.frontend.llm import LLM
from octavo.params.sampling_params import SamplingParams

WINDOW = 512
CHOICES: Mapping[str, tuple[dict[str, Any], ...]] = {
    "cpu": ({"dtype": "float32"}, {"quantization": "int8"}, {"quantization": "int4"}, {"kv_cache_dtype": "int8"}),
    "cuda": ({"quantization": "fp8"}, {"quantization": "int8"}, {"quantization": "int4"}, {"kv_cache_dtype": "fp8"}),
}
"""Engine options that are compared with those given, by device."""


class Quality(NamedTuple):
    """options: as on the command line    num_tokens: of the text    bits: of a weight, on average"""

    options: str
    perplexity: float
    num_tokens: int
    bits: float


def measure_quality(model: str, engine: Mapping[str, Any], text: str) -> Iterator[Quality]:
    """Perplexity of a text with the engine options given, then with each of `CHOICES`: one engine after the other.

    Raises `ParameterError` for a text of less than two tokens.
    """
    choices: list[dict[str, Any]] = [{}]
    for options in choices:
        with LLM(model, **{**engine, **options, "max_model_len": WINDOW + 1}) as llm:
            if not options:
                token_ids = llm.get_tokenizer().encode(text)
                if len(token_ids) < 2:
                    raise ParameterError("quality: the text has no two tokens; use a longer one", param="quality")
                choices += [choice for choice in CHOICES[llm.config.device] if _changes(choice, engine, llm)]
            name = " ".join(f"--{option.replace('_', '-')} {value}" for option, value in options.items())
            bits = 8 * llm.config.weight_bytes / llm.spec.num_params
            yield Quality(name or "as given", perplexity(llm, token_ids), len(token_ids), bits)


def _changes(choice: dict[str, Any], engine: Mapping[str, Any], llm: LLM) -> bool:
    """True if an option differs from those given. Files that are quantised are not rounded again."""
    return not choice.items() <= engine.items() and not ("quantization" in choice and llm.spec.forms)


def perplexity(llm: LLM, token_ids: Sequence[int]) -> float:
    """exp of the mean negative log-likelihood in windows of 512 tokens, without the first token of each."""
    windows = [list(token_ids[i : i + WINDOW]) for i in range(0, len(token_ids) - 1, WINDOW)]
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    logprobs: list[float] = []
    for output in llm.generate([{"prompt_token_ids": window} for window in windows], params, use_tqdm=False):
        places = zip(output.prompt_token_ids[1:], (output.prompt_logprobs or [])[1:], strict=True)
        logprobs += [entry[token].logprob for token, entry in places if entry is not None]
    return math.exp(-sum(logprobs) / len(logprobs))
