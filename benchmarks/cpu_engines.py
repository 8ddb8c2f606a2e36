"""Worker process of `cpu_compare.py`: runs one engine and serves one job per line of input.

    python cpu_engines.py ENGINE MODEL [OPTIONS]      ENGINE: octavo, transformers, llamacpp; OPTIONS: a JSON object

Reads {"prompts": [[token ids]], "num_new": n} and writes {"first_s": .., "rest_s": ..}: seconds until all prompts have
their first token, and from then to the last token. Decoding is greedy and ignores stop tokens. Engines do not share a
process, because a library's idle threads would slow the other one. llama.cpp runs in another environment, so imports
are local.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any, Protocol

THREADS = int(os.environ.get("OMP_NUM_THREADS", "2"))
CONTEXT = 1024  # maximum tokens per sequence
MAX_SEQS = 16


class Engine(Protocol):
    def run(self, prompts: list[list[int]], num_new: int) -> list[float]:
        """Return num_new times: when all prompts had their first token, their second, and so on."""
        ...


class Octavo:
    def __init__(self, model: str, **options: Any) -> None:
        from octavo import LLM

        defaults = {
            "dtype": "bfloat16",
            "skip_tokenizer_init": True,
            "max_model_len": CONTEXT,
            "max_num_seqs": MAX_SEQS,
            "enable_prefix_caching": False,
            "device": "cpu",
        }
        self.llm = LLM(model, **(defaults | options))

    def run(self, prompts: list[list[int]], num_new: int) -> list[float]:
        from octavo import SamplingParams

        params = SamplingParams(max_tokens=num_new, temperature=0, ignore_eos=True)
        num_missing = [len(prompts)] * num_new
        times: list[float] = []
        num_seen: dict[str, int] = {}
        for output in self.llm.stream([{"prompt_token_ids": p} for p in prompts], params):
            now = time.perf_counter()
            count = len(output.outputs[0].token_ids)
            for column in range(num_seen.get(output.request_id, 0), count):
                num_missing[column] -= 1
                if not num_missing[column]:
                    times.append(now)
            num_seen[output.request_id] = count
        return times


class Transformers:
    def __init__(self, model: str) -> None:
        import torch
        import transformers

        torch.set_num_threads(THREADS)
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        self.model = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()

    def run(self, prompts: list[list[int]], num_new: int) -> list[float]:
        import torch

        times: list[float] = []

        def record_time(token_ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
            times.append(time.perf_counter())
            return torch.zeros(len(token_ids), dtype=torch.bool)

        inputs = torch.tensor(prompts)
        with torch.inference_mode():
            self.model.generate(
                inputs,
                attention_mask=torch.ones_like(inputs),
                max_new_tokens=num_new,
                min_new_tokens=num_new,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
                stopping_criteria=[record_time],
            )
        return times


class LlamaCpp:
    def __init__(self, model: str) -> None:
        import llama_cpp

        self.api = llama_cpp
        llama_cpp.llama_backend_init()
        discard_log = llama_cpp.llama_log_callback(lambda level, text, data: None)
        self._discard_log = discard_log  # llama.cpp keeps a pointer
        llama_cpp.llama_log_set(discard_log, None)
        loaded = llama_cpp.llama_model_load_from_file(model.encode(), llama_cpp.llama_model_default_params())
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = CONTEXT * MAX_SEQS
        params.n_seq_max = MAX_SEQS
        params.n_batch = params.n_ubatch = 512
        params.n_threads = params.n_threads_batch = THREADS
        self.context = llama_cpp.llama_init_from_model(loaded, params)
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(loaded))
        self.batch = llama_cpp.llama_batch_init(512, 0, 1)

    def run(self, prompts: list[list[int]], num_new: int) -> list[float]:
        api = self.api
        api.llama_memory_clear(api.llama_get_memory(self.context), True)
        times: list[float] = []
        first = [self._decode([(t, p, seq) for p, t in enumerate(prompt)]) for seq, prompt in enumerate(prompts)]
        times.append(time.perf_counter())
        tokens = [ids[-1] for ids in first]
        for column in range(1, num_new):
            step = [(t, len(prompts[seq]) + column - 1, seq) for seq, t in enumerate(tokens)]
            tokens = self._decode(step, every=True)
            times.append(time.perf_counter())
        return times

    def _decode(self, entries: list[tuple[int, int, int]], *, every: bool = False) -> list[int]:
        """The top token after each (token, position, sequence) if `every`, else only after the last."""
        import numpy as np

        batch = self.batch
        batch.n_tokens = len(entries)
        for i, (token, position, seq) in enumerate(entries):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0] = token, position, 1, seq
            batch.logits[i] = every or i + 1 == len(entries)
        if self.api.llama_decode(self.context, batch):
            raise RuntimeError("llama_decode failed")
        rows = range(len(entries)) if every else [len(entries) - 1]
        get = self.api.llama_get_logits_ith
        return [int(np.ctypeslib.as_array(get(self.context, row), (self.vocab_size,)).argmax()) for row in rows]


ENGINES = {"octavo": Octavo, "transformers": Transformers, "llamacpp": LlamaCpp}


def main() -> None:
    name, model, *options = sys.argv[1:]
    engine: Engine = ENGINES[name](model, **(json.loads(options[0]) if options else {}))
    print("ready", flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        begin = time.perf_counter()
        times = engine.run(job["prompts"], job["num_new"])
        assert len(times) == job["num_new"], len(times)
        print(json.dumps({"first_s": times[0] - begin, "rest_s": times[-1] - times[0]}), flush=True)


if __name__ == "__main__":
    main()
