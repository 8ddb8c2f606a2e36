"""Compares Octavo on a CPU with Transformers and llama.cpp, in one run on the same two cores.

    python benchmarks/cpu_compare.py [--only NAME ...] [--rounds N] [--llamacpp PYTHON]
                                     [--json | --markdown]

    transformers   SmolLM2-135M in bfloat16: one sequence, sixteen, a prompt of 512 tokens
    llamacpp       the same with random weights in Qwen2.5-0.5B's shape, in bfloat16
    quantised      llama.cpp's files in 4 and 8 bits, of that shape in three types and of SmolLM2 as it is published
    kinds          a hybrid with recurrent layers and a model with experts, from llama.cpp's files
    int8           both models with --quantization int8 relative to bfloat16, and the change in perplexity
    prefix         time to first token after a prefix of 842 tokens, cached and not cached
    memory         peak memory of serving SmolLM2, and the time of a first one-token request

Engines alternate within each round, so that other programs disturb all of them alike. Figures are medians over the
rounds; ratios are medians of each round's ratio. A round in which other processes used more than 5 % of the machine is
repeated, at most --patience times in total. Times are measured from the start to the first tokens, and from there to
the last. Models are created once, in the cache folder. llama.cpp is llama-cpp-python, built from source for this
processor in its own environment next to the models (minutes, once), or the one of the interpreter --llamacpp.

The rows of the README and of docs/performance.md for this processor:

    python benchmarks/cpu_compare.py --only llamacpp transformers --markdown
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
import venv
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import random_gguf
import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file

from octavo import LLM, SamplingParams
from octavo.bench.quality import perplexity
from octavo.checkpoint import catalog
from octavo.checkpoint.resolve import open_checkpoint
from octavo.kernels import reference
from octavo.models.config import spec_from_config
from octavo.models.gguf_config import read_gguf_config
from octavo.models.loading.loader import dummy_model, load_model
from octavo.text.tokenizer import Tokenizer

ROOT = Path(__file__).parents[1]
NUM_PROMPT, NUM_NEW, LONG_PROMPT, CONCURRENT = 32, 48, 512, 16
PREFIX, QUESTION = 842, 60
SMOLLM2 = "smollm2-135m-instruct"
QWEN = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 151936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
Figures = dict[str, float]
"""Tokens per second by case."""


# -- models -----------------------------------------------------------------------------------------------------------


def models_folder() -> Path:
    folder = catalog.cache_dir() / "benchmarks"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def smollm2() -> Path:
    """SmolLM2's weights as a bfloat16 checkpoint, as Transformers reads them; from the catalogue's file."""
    folder = models_folder() / "smollm2-bf16"
    if not (folder / "config.json").exists():
        checkpoint = open_checkpoint(SMOLLM2)
        config = read_gguf_config(checkpoint.gguf, SMOLLM2)
        spec = spec_from_config(config, checkpoint.generation_config)
        model = load_model(checkpoint, spec, dtype=torch.bfloat16, device="cpu", ops=reference, max_len=1)
        _save(folder, config | {"dtype": "bfloat16"}, {w.name: w.target for w in model.weights()})
    return folder


def qwen() -> Path:
    """Random weights in Qwen2.5-0.5B's shape."""
    folder = models_folder() / "qwen2.5-0.5b-shape"
    if not (folder / "config.json").exists():
        model = dummy_model(spec_from_config(QWEN), dtype=torch.bfloat16, device="cpu", ops=reference, max_len=1)
        _save(folder, QWEN, {w.name: w.target for w in model.weights()})
    return folder


def _save(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    folder.mkdir(exist_ok=True)
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))


def qwen_gguf() -> Path:
    """The same weights as a GGUF file for llama.cpp. It has no vocabulary, since prompts are token ids."""
    path = models_folder() / "qwen2.5-0.5b-shape.gguf"
    if path.exists():
        return path
    spec = spec_from_config(QWEN)
    model = load_model(open_checkpoint(qwen()), spec, dtype=torch.bfloat16, device="cpu", ops=reference, max_len=1)
    writer = gguf.GGUFWriter(path.with_suffix(".part"), "qwen2")
    writer.add_context_length(spec.max_position_embeddings)
    writer.add_embedding_length(spec.hidden_size)
    writer.add_block_count(spec.num_layers)
    writer.add_feed_forward_length(spec.intermediate_size)
    writer.add_head_count(spec.num_heads)
    writer.add_head_count_kv(spec.num_kv_heads)
    writer.add_rope_freq_base(QWEN["rope_theta"])
    writer.add_layer_norm_rms_eps(QWEN["rms_norm_eps"])
    writer.add_vocab_size(spec.vocab_size)
    writer.add_tokenizer_model("no_vocab")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2, spec.num_layers)
    for weight in model.weights():
        name = names.get_name(weight.name, try_suffixes=(".weight", ".bias"))
        if weight.target.ndim == 1:
            writer.add_tensor(name, weight.target.float().numpy())
        else:
            bits = weight.target.contiguous().view(torch.uint16).numpy()
            writer.add_tensor(name, bits.view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    path.with_suffix(".part").rename(path)
    return path


# -- engines ----------------------------------------------------------------------------------------------------------


class Peer:
    """An engine of `cpu_engines.py`, in its own process."""

    def __init__(self, engine: str, model: Path, *, python: str = sys.executable, **options: Any) -> None:
        command = [python, str(ROOT / "benchmarks" / "cpu_engines.py"), engine, str(model), json.dumps(options)]
        if not options:
            command.pop()
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        while (line := self._line()) != "ready":
            print(line, file=sys.stderr)

    def _line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"error: {self.process.args} ended with {self.process.wait()}")
        return line.strip()

    def run(self, num_prompts: int, num_prompt: int, num_new: int, seed: int) -> tuple[float, float]:
        """Seconds to the first tokens, and from these to the last."""
        rng = random.Random(seed)
        prompts = [[rng.randrange(3, 40000) for _ in range(num_prompt)] for _ in range(num_prompts)]
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"prompts": prompts, "num_new": num_new}) + "\n")
        self.process.stdin.flush()
        reply = json.loads(self._line())
        return reply["first_s"], reply["rest_s"]

    def measure(self, cases: Iterable[str], seed: int) -> Figures:
        """Tokens per second by case."""
        figures: Figures = {}
        if "batch 1" in cases:
            figures["batch 1"] = (NUM_NEW - 1) / self.run(1, NUM_PROMPT, NUM_NEW, seed)[1]
        if "16 together" in cases:
            figures["16 together"] = CONCURRENT * (NUM_NEW - 1) / self.run(CONCURRENT, NUM_PROMPT, NUM_NEW, seed)[1]
        if "prefill" in cases:
            figures["prefill"] = LONG_PROMPT / self.run(1, LONG_PROMPT, 1, seed)[0]
        return figures

    def cpu_s(self) -> float:
        """CPU seconds used so far."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


CASES = {"batch 1": "one sequence", "16 together": "16 together", "prefill": "a prompt of 512 tokens"}
"""Case -> its label in the tables of the documentation."""
MAX_OTHERS = 0.05
"""Share of the machine that other processes may use in a round that counts."""
Rounds = dict[str, list[Figures]]
"""Figures of each round, by engine."""


def run_rounds(peers: dict[str, Peer], cases: dict[str, Sequence[str]], args: argparse.Namespace) -> Rounds:
    """Run all rounds after a warm-up, and return the figures of the least disturbed ones."""
    for peer in peers.values():
        peer.run(1, NUM_PROMPT, 4, seed=0)
    rounds: list[tuple[float, dict[str, Figures]]] = []
    for attempt in range(args.rounds + args.patience):
        before = _machine_cpu_s() - sum(peer.cpu_s() for peer in peers.values())
        begin = time.perf_counter()
        order = list(peers) if attempt % 2 else list(reversed(peers))
        figures = {name: peers[name].measure(cases[name], seed=attempt) for name in order}
        others_s = _machine_cpu_s() - sum(peer.cpu_s() for peer in peers.values()) - before
        rounds.append((others_s / (time.perf_counter() - begin) / (os.cpu_count() or 1), figures))
        if sum(share <= MAX_OTHERS for share, _ in rounds) >= args.rounds:
            break
    for peer in peers.values():
        peer.close()
    kept = sorted(rounds, key=lambda entry: entry[0])[: args.rounds]  # the least disturbed
    print(f"other processes used {kept[0][0]:.0%} to {kept[-1][0]:.0%} of the machine", file=sys.stderr)
    return {name: [figures[name] for _, figures in kept] for name in peers}


def _machine_cpu_s() -> float:
    """CPU seconds of the whole machine since it booted."""
    user, nice, system, _idle, _iowait, irq, softirq, *_ = map(int, Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def median(figures: list[Figures], case: str) -> float:
    return statistics.median(f[case] for f in figures)


def ratio(ours: list[Figures], case: str, theirs: list[Figures], their_case: str) -> float:
    return statistics.median(a[case] / b[their_case] for a, b in zip(ours, theirs, strict=True))


def digits(number: float) -> str:
    """Format with three significant digits."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.1f}" if number >= 10 else f"{number:.2f}"


def processor() -> str:
    """Name, family, model and vector or matrix extensions of the processor, from /proc/cpuinfo."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in reversed(lines) if ":" in line)
    values = {name.strip(): value.strip() for name, value in fields.items()}
    family = f"family {values.get('cpu family')}, model {values.get('model')}"
    units = [
        unit
        for unit in ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16")
        if unit in values["flags"].split()
    ]
    return f"{os.cpu_count()} cores of {values.get('model name')} ({family}: {', '.join(units)})"


class Report:
    """Prints results as tables, as JSON lines, or as Markdown rows."""

    def __init__(self, as_json: bool, as_markdown: bool = False) -> None:
        self.as_json = as_json
        self.as_markdown = as_markdown
        self.console = Console(width=100)
        if as_markdown:
            print(f"{processor()}; torch {torch.__version__}\n\n| tokens/s | Octavo | the other | |\n|---|---|---|---|")

    def speeds(self, title: str, figures: dict[str, list[Figures]], ratios: Sequence[tuple[str, float, float]]) -> None:
        if self.as_markdown:
            return
        if self.as_json:
            for name, rounds in figures.items():
                for case in rounds[0]:
                    print(json.dumps({"model": title, "engine": name, "case": case, "tok_s": median(rounds, case)}))
        else:
            table = Table(title=f"{title}, tokens/s")
            table.add_column("engine")
            for case in CASES:
                table.add_column(case, justify="right")
            for name, rounds in figures.items():
                table.add_row(name, *(f"{median(rounds, c):,.1f}" if c in rounds[0] else "-" for c in CASES))
            self.console.print(table)
        for name, value, goal in ratios:
            self.figure(title, name, value, f"{value:.2f} x", f"goal {goal:g} x")

    def rows(self, title: str, other: str, figures: Rounds, their_cases: dict[str, str]) -> None:
        """Print the rows of a Markdown table. `their_cases`: our case -> the other engine's case to compare with."""
        if not self.as_markdown:
            return
        ours, theirs = figures["octavo"], figures[other.lower()]
        for case, their_case in their_cases.items():
            suffix = "" if case == their_case else f" {other}' one"
            print(
                f"| {title}, {CASES[case]} | {digits(median(ours, case))} "
                f"| {other} {digits(median(theirs, their_case))} "
                f"| {digits(ratio(ours, case, theirs, their_case))} x{suffix} |",
                flush=True,
            )

    def figure(self, title: str, name: str, value: float, text: str, note: str = "") -> None:
        if self.as_markdown:
            print(f"| {title}, {name} | {text} | | |")
        elif self.as_json:
            print(json.dumps({"model": title, "figure": name, "value": value}))
        else:
            print(f"  {name:<58} {text:>12}  {note}")


# -- comparisons ------------------------------------------------------------------------------------------------------


def with_transformers(report: Report, args: argparse.Namespace) -> None:
    model = smollm2()
    peers = {"octavo": Peer("octavo", model), "transformers": Peer("transformers", model)}
    cases: dict[str, Sequence[str]] = {"octavo": tuple(CASES), "transformers": ("batch 1", "prefill")}
    figures = run_rounds(peers, cases, args)
    ours, theirs = figures["octavo"], figures["transformers"]
    ratios = [
        ("batch 1, to Transformers' batch 1", ratio(ours, "batch 1", theirs, "batch 1"), 2.0),
        ("16 together, to Transformers' batch 1", ratio(ours, "16 together", theirs, "batch 1"), 10.0),
        ("prefill of 512 tokens", ratio(ours, "prefill", theirs, "prefill"), 1.2),
    ]
    report.speeds("SmolLM2-135M, bfloat16", figures, ratios)
    # Transformers does not batch independent requests, so its batch 1 is the baseline for 16 requests.
    their_cases = {"batch 1": "batch 1", "16 together": "batch 1", "prefill": "prefill"}
    report.rows("SmolLM2-135M", "Transformers", figures, their_cases)


def with_llamacpp(report: Report, args: argparse.Namespace) -> None:
    peers = {
        "octavo": Peer("octavo", qwen()),
        "llama.cpp": Peer("llamacpp", qwen_gguf(), python=args.llamacpp or llamacpp_python()),
    }
    figures = run_rounds(peers, dict.fromkeys(peers, tuple(CASES)), args)
    ours, theirs = figures["octavo"], figures["llama.cpp"]
    ratios = [
        ("batch 1, to llama.cpp's batch 1", ratio(ours, "batch 1", theirs, "batch 1"), 1.2),
        ("16 together, to llama.cpp's batch 1", ratio(ours, "16 together", theirs, "batch 1"), 8.0),
        ("16 together, to llama.cpp's 16", ratio(ours, "16 together", theirs, "16 together"), 1.0),
        ("prefill of 512 tokens", ratio(ours, "prefill", theirs, "prefill"), 1.0),
    ]
    report.speeds("Qwen2.5-0.5B's shape, bfloat16", figures, ratios)
    report.rows("Qwen2.5-0.5B's shape", "llama.cpp", figures, {case: case for case in CASES})


def quantised(report: Report, args: argparse.Namespace) -> None:
    python = args.llamacpp or llamacpp_python()
    files = {f"Qwen2.5-0.5B's shape, {kind}": quantised_gguf(kind, python) for kind in ("Q4_0", "Q4_K_M", "Q8_0")}
    files["SmolLM2-135M, Q4_1"] = open_checkpoint(SMOLLM2).path
    beside_llamacpp(report, args, files, {"batch 1": 1.15, "16 together": 1.8, "prefill": 1.7})


def kinds(report: Report, args: argparse.Namespace) -> None:
    files, folder = {}, models_folder()
    for kind in ("Q8_0", "BF16"):
        path = folder / f"qwen3.5-0.8b-shape.{kind}.gguf"
        files[f"Qwen3.5-0.8B's shape, {kind}"] = random_gguf.write(path, random_gguf.qwen35_08b(), kind)
    for kind in ("Q4_0", "Q8_0"):
        path = folder / f"qwen3-30b-a3b-8-layers.{kind}.gguf"
        files[f"8 layers of Qwen3-30B-A3B's, {kind}"] = random_gguf.write(path, random_gguf.qwen3_30b_a3b(8), kind)
    beside_llamacpp(report, args, files, {"batch 1": 1.1, "16 together": 1.1, "prefill": 1.2})


def beside_llamacpp(report: Report, args: argparse.Namespace, files: dict[str, Path], goals: dict[str, float]) -> None:
    """Both engines read the same files."""
    python = args.llamacpp or llamacpp_python()
    for title, path in files.items():
        peers = {"octavo": Peer("octavo", path), "llama.cpp": Peer("llamacpp", path, python=python)}
        figures = run_rounds(peers, dict.fromkeys(peers, tuple(CASES)), args)
        ours, theirs = figures["octavo"], figures["llama.cpp"]
        ratios = [(f"{CASES[case]}, to llama.cpp's", ratio(ours, case, theirs, case), goals[case]) for case in CASES]
        report.speeds(title, figures, ratios)
        report.rows(title, "llama.cpp", figures, {case: case for case in CASES})


QUANTISE = """
import sys, llama_cpp
source, target, kind = sys.argv[1:]
params = llama_cpp.llama_model_quantize_default_params()
params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
sys.exit(llama_cpp.llama_model_quantize(source.encode(), target.encode(), params))
"""


def quantised_gguf(kind: str, python: str) -> Path:
    """The weights of `qwen_gguf`, rounded by llama.cpp."""
    source = qwen_gguf()
    path = source.with_name(f"{source.stem}.{kind}.gguf")
    if not path.exists():
        part = path.with_suffix(".part")
        subprocess.run([python, "-c", QUANTISE, str(source), str(part), kind], check=True, capture_output=True)
        part.rename(path)
    return path


def llamacpp_python() -> str:
    """The interpreter of an environment with llama-cpp-python, which the first call creates and installs."""
    folder = models_folder() / "llamacpp"
    python = folder / "bin" / "python"
    if not (folder / "installed").exists():
        print("building llama-cpp-python; this takes minutes, once", file=sys.stderr)
        venv.create(folder, with_pip=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", "llama-cpp-python"], check=True)
        (folder / "installed").touch()
    return str(python)


def int8(report: Report, args: argparse.Namespace) -> None:
    for title, model in (("SmolLM2-135M", smollm2()), ("Qwen2.5-0.5B's shape", qwen())):
        peers = {"bfloat16": Peer("octavo", model), "int8": Peer("octavo", model, quantization="int8")}
        figures = run_rounds(peers, dict.fromkeys(peers, tuple(CASES)), args)
        ours, theirs = figures["int8"], figures["bfloat16"]
        ratios = [
            ("int8 to bfloat16, batch 1", ratio(ours, "batch 1", theirs, "batch 1"), 1.6),
            ("int8 to bfloat16, 16 together", ratio(ours, "16 together", theirs, "16 together"), 1.0),
        ]
        report.speeds(title, figures, ratios)
    before, after = (smollm2_perplexity(quantization, args.text) for quantization in (None, "int8"))
    name = Path(args.text).name
    report.figure("SmolLM2-135M", f"perplexity of {name} in bfloat16", before, f"{before:.3f}")
    report.figure("SmolLM2-135M", f"perplexity of {name} in int8", after, f"{after:.3f}", f"{after / before - 1:+.2%}")


def smollm2_perplexity(quantization: str | None, text: str) -> float:
    token_ids = Tokenizer.from_checkpoint(open_checkpoint(SMOLLM2)).encode(Path(text).read_text(encoding="utf-8"))
    with LLM(str(smollm2()), dtype="bfloat16", quantization=quantization, skip_tokenizer_init=True) as llm:
        return perplexity(llm, token_ids)


def prefix(report: Report, args: argparse.Namespace) -> None:
    rng = random.Random(0)
    tokens = lambda n: [rng.randrange(3, 40000) for _ in range(n)]  # noqa: E731
    params = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
    cold: list[float] = []
    warm: list[float] = []
    with LLM(str(smollm2()), dtype="bfloat16", skip_tokenizer_init=True, max_model_len=2048) as llm:
        for _ in range(args.rounds + 1):
            shared = tokens(PREFIX)
            for times in (cold, warm, warm):
                begin = time.perf_counter()
                llm.generate({"prompt_token_ids": shared + tokens(QUESTION)}, params, use_tqdm=False)
                times.append(time.perf_counter() - begin)
    ratios = [
        first / min(second) for first, second in zip(cold[1:], zip(warm[2::2], warm[3::2], strict=True), strict=True)
    ]
    title = "SmolLM2-135M, bfloat16"
    for label, times in (("cold", cold[1:]), ("warm", warm[2:])):
        seconds = statistics.median(times)
        report.figure(
            title, f"time to first token behind {PREFIX} shared tokens, {label}", seconds, f"{seconds * 1e3:.1f} ms"
        )
    report.figure(title, "cold to warm", statistics.median(ratios), f"{statistics.median(ratios):.1f} x", "goal 5 x")


SERVE = """
import resource, sys
from octavo import LLM, SamplingParams
with LLM(sys.argv[1], dtype="bfloat16", max_model_len=1024, max_num_seqs=16, skip_tokenizer_init=True) as llm:
    prompts = [{"prompt_token_ids": [i * 37 + j for j in range(3, 259)]} for i in range(16)]
    llm.generate(prompts, SamplingParams(max_tokens=64, temperature=0, ignore_eos=True), use_tqdm=False)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, llm.config.weight_bytes, llm.config.kv_bytes)
"""


def memory(report: Report, args: argparse.Namespace) -> None:
    title = "SmolLM2-135M, bfloat16"
    done = subprocess.run([sys.executable, "-c", SERVE, str(smollm2())], check=True, capture_output=True, text=True)
    peak, weights, pool = map(int, done.stdout.split())
    for label, size in (("peak memory", peak), ("weights", weights), ("KV pool", pool)):
        report.figure(title, label, size, f"{size / 2**20:,.0f} MiB")
    other = (peak - weights - pool) / 1e6
    report.figure(title, "peak beside weights and pool", other, f"{other:,.0f} MB", "goal 400 MB")
    command = [
        str(Path(sys.executable).parent / "octavo"),
        "generate",
        "--model",
        SMOLLM2,
        "--max-tokens",
        "1",
        "--prompt",
        "Hello",
    ]
    times = []
    for _ in range(args.rounds):
        begin = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True)
        times.append(time.perf_counter() - begin)
    seconds = statistics.median(times)
    report.figure(title, "from the command to the end of a one-token answer", seconds, f"{seconds:.2f} s", "goal 3 s")


SECTIONS: dict[str, Callable[[Report, argparse.Namespace], None]] = {
    "transformers": with_transformers,
    "llamacpp": with_llamacpp,
    "quantised": quantised,
    "kinds": kinds,
    "int8": int8,
    "prefix": prefix,
    "memory": memory,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--patience", type=int, default=14, metavar="N", help="maximum number of repeated rounds")
    parser.add_argument("--text", default=str(ROOT / "docs" / "memory.md"), help="text file for measuring perplexity")
    parser.add_argument("--llamacpp", metavar="PYTHON", help="interpreter of an environment with llama_cpp")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true")
    form.add_argument("--markdown", action="store_true", help="rows for the README and docs/performance.md")
    args = parser.parse_args()
    report = Report(args.json, args.markdown)
    for name in args.only:
        SECTIONS[name](report, args)


if __name__ == "__main__":
    main()
