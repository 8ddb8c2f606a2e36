"""Search for the most likely continuations of a prompt, instead of sampling one token after the other.

Start it with: python examples/beam_search.py
"""

import argparse

from octavo import LLM, BeamSearchParams, SamplingParams

parser = argparse.ArgumentParser(description="Compare beam search with greedy decoding.")
parser.add_argument("--model", default="smollm2-135m-instruct", help="a name, a directory or a .gguf file")
args = parser.parse_args()

prompt = "The best thing about a long winter is"
with LLM(args.model) as llm:
    (greedy,) = llm.generate(prompt, SamplingParams(max_tokens=12, temperature=0, logprobs=0), use_tqdm=False)
    (beams,) = llm.beam_search(prompt, BeamSearchParams(beam_width=4, max_tokens=12), use_tqdm=False)
    print(f"{prompt} ...\n")
    print("log-probability")
    best = greedy.outputs[0]
    print(f"{best.cumulative_logprob:15.2f}  {best.text.strip()!r}, greedy")
    for beam in beams.outputs:
        print(f"{beam.cumulative_logprob:15.2f}  {beam.text.strip()!r}")
