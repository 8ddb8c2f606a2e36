"""Structured outputs of a random model: JSON that fits random schemas, in every engine configuration."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from octavo import LLM, BeamSearchParams, RequestOutput, SamplingParams
from octavo.core.policy import PreemptionMode
from octavo.engine.engine_request import EngineRequest
from tests.differential.cases import PreemptingScheduler
from tests.engine.client import StepClient
from tests.models.tiny import make_tiny_checkpoint

CORPUS = ['{"name": "the dog", "size": 12, "tags": ["a", "b"], "on": true, "é": null, "漢字": [1, 2, 3]}' * 3]
LETTERS = 'abcxyz é漢🙂"\\/{}:,'
MAX_TOKENS = 400


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a byte-level tokenizer, which can generate any text."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    specials = ["<pad>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=specials, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    folder = make_tiny_checkpoint(
        "llama", tmp_path_factory.mktemp("bytes"), vocab_size=325, max_position_embeddings=512
    )  # fmt: skip
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    return folder


def open_llm(path: Path, **options: Any) -> LLM:
    defaults = {"dtype": "float32", "block_size": 8, "num_gpu_blocks_override": 3000, "max_num_seqs": 64, "seed": 1}
    return LLM(str(path), **(defaults | options))


# -- schemas -----------------------------------------------------------------------------------------------------------


def random_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """A random schema whose documents have a maximum length."""
    make = rng.choice(
        [_string, _integer, _enum, _simple, _const]
        if depth > 2
        else [_object, _object, _array, _any_of, _string, _integer, _enum]
    )
    return make(rng, depth)


def _word(rng: random.Random, longest: int = 4) -> str:
    return "".join(rng.choice(LETTERS) for _ in range(rng.randrange(1, longest)))


def _string(rng: random.Random, depth: int) -> dict[str, Any]:
    if rng.random() < 0.4:
        return {
            "type": "string",
            "pattern": rng.choice(["^[a-c]{1,4}$", "^(yes|no)$", "^[0-9]{2}-[0-9]{2}$", "^é?x{2}$"]),
        }
    low = rng.randrange(3)
    return {"type": "string", "minLength": low, "maxLength": low + rng.randrange(5)}


def _integer(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randrange(-200, 200)
    return {"type": "integer", "minimum": low, "maximum": low + rng.randrange(1000)}


def _enum(rng: random.Random, depth: int) -> dict[str, Any]:
    return {
        "enum": [rng.choice([_word(rng), rng.randrange(99), True, None, [1, "a"]]) for _ in range(rng.randrange(1, 4))]
    }


def _const(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"const": {"k": [_word(rng), 1]}}


def _simple(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"type": rng.choice(["boolean", "null"])}


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randrange(2)
    items = random_schema(rng, depth + 1)
    return {"type": "array", "items": items, "minItems": low, "maxItems": low + rng.randrange(3)}


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = list(dict.fromkeys(_word(rng) for _ in range(rng.randrange(1, 4))))
    return {
        "type": "object",
        "properties": {name: random_schema(rng, depth + 1) for name in names},
        "required": [name for name in names if rng.random() < 0.6],
        "additionalProperties": False,
    }


def _any_of(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [random_schema(rng, depth + 1) for _ in range(2)]}


def fits(value: Any, schema: dict[str, Any]) -> bool:
    """True if a document fits a schema; supports the keywords of `random_schema`."""
    if "anyOf" in schema:
        return any(fits(value, s) for s in schema["anyOf"])
    if "enum" in schema or "const" in schema:
        allowed = schema["enum"] if "enum" in schema else [schema["const"]]
        return any(type(value) is type(a) and value == a for a in allowed)
    kinds: dict[str, Callable[[], bool]] = {
        "string": lambda: isinstance(value, str) and _fits_string(value, schema),
        "integer": lambda: type(value) is int and schema["minimum"] <= value <= schema["maximum"],
        "boolean": lambda: isinstance(value, bool),
        "null": lambda: value is None,
        "array": lambda: (
            isinstance(value, list)
            and schema["minItems"] <= len(value) <= schema["maxItems"]
            and all(fits(v, schema["items"]) for v in value)
        ),
        "object": lambda: (
            isinstance(value, dict)
            and set(schema["required"]) <= set(value) <= set(schema["properties"])
            and all(fits(v, schema["properties"][k]) for k, v in value.items())
        ),
    }
    return kinds[schema["type"]]()


def _fits_string(value: str, schema: dict[str, Any]) -> bool:
    if "pattern" in schema:
        return re.search(schema["pattern"], value) is not None
    return int(schema["minLength"]) <= len(value) <= int(schema["maxLength"])


def test_fits_rejects_documents() -> None:
    rng = random.Random(5)
    results = [fits(value, random_schema(rng)) for value in (1, "x", None, {}, [], {"a": 1}) for _ in range(50)]
    assert 0 < sum(results) < 75
    assert fits("é漢", {"type": "string", "minLength": 2, "maxLength": 2})
    assert not fits(True, {"type": "integer", "minimum": 0, "maximum": 1})
    assert not fits({"a": 1}, {"type": "object", "properties": {}, "required": []})


# -- the model ---------------------------------------------------------------------------------------------------------


def structured_params(schemas: list[dict[str, Any]], first: int = 0) -> list[SamplingParams]:
    return [
        SamplingParams(
            temperature=1.0,
            seed=first + i,
            max_tokens=MAX_TOKENS,
            structured_outputs={"json": schema, "disable_any_whitespace": True},  # type: ignore[arg-type]
        )
        for i, schema in enumerate(schemas)
    ]


def run_and_check(path: Path, num: int) -> None:
    rng = random.Random(num)
    schemas = [_object(rng, 0) for _ in range(num)]
    num_stopped, texts = 0, set()
    with open_llm(path) as llm:
        outputs = llm.generate([f"number {i}" for i in range(num)], structured_params(schemas), use_tqdm=False)
        assert llm.kv_stats().num_used == 0
    for output, schema in zip(outputs, schemas, strict=True):
        (c,) = output.outputs
        if c.finish_reason == "stop":
            num_stopped += 1
            texts.add(c.text)
            assert fits(json.loads(c.text), schema), (c.text, schema)
        else:
            assert c.finish_reason == "length", c.stop_reason
    assert num_stopped >= 0.95 * num
    assert len(texts) > 0.8 * num


def test_finished_outputs_fit_their_schema(path: Path) -> None:
    run_and_check(path, 60)


@pytest.mark.slow
def test_finished_outputs_fit_a_thousand_schemas(path: Path) -> None:
    run_and_check(path, 1000)


# -- engine configurations ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def expected(path: Path) -> Iterator[list[list[list[int]]]]:
    """Tokens of each request run alone, without prefix caching."""
    with open_llm(path, enable_prefix_caching=False) as llm:
        yield [tokens_of(llm.generate([prompt], params, use_tqdm=False)[0]) for prompt, params in mixed_requests()]  # type: ignore[arg-type]


def mixed_requests() -> list[tuple[list[int], SamplingParams | BeamSearchParams]]:
    rng = random.Random(8)
    common = [rng.randrange(3, 300) for _ in range(20)]
    requests: list[SamplingParams | BeamSearchParams] = []
    for seed in range(9):
        form = {"json": _object(rng, 0), "disable_any_whitespace": True}
        if seed % 3 == 2:
            requests.append(BeamSearchParams(beam_width=3, max_tokens=25, structured_outputs=form))  # type: ignore[arg-type]
        else:
            requests.append(SamplingParams(seed=seed, n=1 + seed % 3 * 2, max_tokens=40, structured_outputs=form))  # type: ignore[arg-type]
    requests.append(SamplingParams(seed=9, max_tokens=40, n=2))
    requests.append(SamplingParams(temperature=0, max_tokens=40))
    return [(common[: 7 + i], request) for i, request in enumerate(requests)]


def tokens_of(output: RequestOutput) -> list[list[int]]:
    return [c.token_ids for c in output.outputs]


@pytest.mark.parametrize("mode", [None, "recompute", "swap"])
@pytest.mark.parametrize(("block_size", "chunk"), [(1, 512), (8, 12), (16, 512)])
def test_same_tokens_with_preemption_chunks_and_block_sizes(
    mode: str | None,
    block_size: int,
    chunk: int,
    path: Path,
    expected: list[list[list[int]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if mode is not None:
        monkeypatch.setattr("octavo.frontend.build.Scheduler", PreemptingScheduler)
    with open_llm(path, block_size=block_size, max_num_batched_tokens=chunk, max_num_seqs=12, decode_window=3) as llm:
        if mode is not None:
            llm.engine.scheduler.preempt_randomly(PreemptionMode(mode), seed=block_size, max_preemptions=25)  # type: ignore[attr-defined]
        prompts, params = zip(*mixed_requests(), strict=True)
        client = StepClient(llm.engine)
        for i, (prompt, request) in enumerate(mixed_requests()):
            client.add_request(
                EngineRequest(str(i), prompt, request, grammar=llm.input_processor.compile_grammar(request))
            )
        found = {o.request_id: o for o in client.run_to_end()}
        assert [tokens_of(found[str(i)]) for i in range(len(prompts))] == expected
        assert len(params) == len(found)
        stats = llm.stats()
        assert bool(stats.num_preemptions) == (mode is not None)
        assert llm.kv_stats().num_used == 0 == llm.kv_stats().num_host_used
