"""lm-eval's local-completions and local-chat-completions, unchanged, on tasks defined here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval", reason="lm-eval is not installed; `make clients` runs this")
pytestmark = pytest.mark.slow

DOCS = [
    {"question": "tell-me", "choices": ["abc", "xyz", "123"], "answer": 0},
    {"question": "Hello,world", "choices": ["abcde", "q", "12"], "answer": 2},
    {"question": "a+b=", "choices": ["7", "8", "9!"], "answer": 1},
]
TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {docs}}}}}
test_split: test
doc_to_text: "{{{{question}}}}"
target_delimiter: ""
"""
CHOICES = """
output_type: multiple_choice
doc_to_choice: "{{choices}}"
doc_to_target: answer
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""
UNTIL = """
output_type: generate_until
doc_to_target: "{{choices[answer]}}"
generation_kwargs: {until: ["QQ"], max_gen_toks: 12}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""
CHAT = ("--apply_chat_template",)


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    (docs := folder / "docs.jsonl").write_text("".join(json.dumps(doc) + "\n" for doc in DOCS))
    for name, rest in (("letters", CHOICES), ("until", UNTIL)):
        (folder / f"{name}.yaml").write_text(TASK.format(name=name, docs=docs) + rest)
    return folder


def samples(tasks: Path, model: str, url: str, tokenizer: Path, task: str, out: Path, *more: str) -> list[Any]:
    """The results of lm-eval for each document."""
    args = f"model=tiny,base_url={url},tokenizer={tokenizer},tokenizer_backend=huggingface,num_concurrent=2"
    program = [str(Path(sys.executable).with_name("lm_eval")), "run", "--model", model, "--model_args", args]
    arguments = ["--tasks", task, "--include_path", str(tasks), "--output_path", str(out), "--log_samples", *more]
    environment = {"OPENAI_API_KEY": "key", "HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(out / "cache")}
    done = subprocess.run(
        [*program, *arguments], env={**os.environ, **environment}, cwd=tasks, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (file,) = out.rglob("samples_*.jsonl")
    found = [json.loads(line) for line in file.read_text().splitlines()]
    return sorted(found, key=lambda sample: sample["doc_id"])


def ask(server: str, path: str, **body: Any) -> Any:
    headers = {"authorization": "Bearer key", "content-type": "application/json"}
    request = urllib.request.Request(f"{server}{path}", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


def logprob_of(server: str, question: str, choice: str) -> tuple[float, bool]:
    """A choice's log-likelihood after a question, and whether it is the greedy output, from prompt_logprobs."""
    body = {"prompt": question + choice, "max_tokens": 1, "prompt_logprobs": 1}
    entries = ask(server, "/v1/completions", **body)["choices"][0]["prompt_logprobs"]
    tokens = ask(server, "/tokenize", prompt=question + choice)["tokens"]
    arguments = [entry[str(t)] for t, entry in zip(tokens, entries, strict=True) if entry is not None][-len(choice) :]
    return sum(t["logprob"] for t in arguments), all(t["rank"] == 1 for t in arguments)


def test_loglikelihood_of_choices(server: str, tokenizer: Path, tasks: Path, tmp_path: Path) -> None:
    """With echo and logprobs. A token is a character, so the choice's tokens are the last ones."""
    url = f"{server}/v1/completions"
    found = samples(tasks, "local-completions", url, tokenizer, "letters", tmp_path)
    for doc, sample in zip(DOCS, found, strict=True):
        wanted = [logprob_of(server, str(doc["question"]), choice) for choice in doc["choices"]]  # type: ignore[attr-defined]
        got = [(float(logprob), greedy == "True") for ((logprob, greedy),) in sample["resps"]]
        assert [g for _, g in got] == [g for _, g in wanted]
        assert [p for p, _ in got] == pytest.approx([p for p, _ in wanted], abs=1e-4)
        best = max(range(3), key=lambda i: wanted[i][0])
        assert sample["acc"] == float(best == doc["answer"])


@pytest.mark.parametrize("chat", [False, True])
def test_generation(server: str, tokenizer: Path, tasks: Path, tmp_path: Path, chat: bool) -> None:
    path, model = (
        ("/v1/chat/completions", "local-chat-completions") if chat else ("/v1/completions", "local-completions")
    )
    found = samples(tasks, model, f"{server}{path}", tokenizer, "until", tmp_path, *(CHAT if chat else ()))
    for doc, sample in zip(DOCS, found, strict=True):
        asked: dict[str, Any] = {"prompt": doc["question"]}
        if chat:
            asked = {"messages": [{"role": "user", "content": doc["question"]}]}
        choice = ask(server, path, **asked, max_tokens=12, temperature=0, stop=["QQ"])["choices"][0]
        assert sample["resps"] == [[choice["message"]["content"] if chat else choice["text"]]]
