"""Complete several prompts in one batch, without a server.

Start it with: python examples/offline_batch.py
"""

import argparse

from octavo import LLM, SamplingParams

parser = argparse.ArgumentParser(description="Complete several prompts in one batch.")
parser.add_argument("--model", default="smollm2-135m-instruct", help="a name, a directory or a .gguf file")
args = parser.parse_args()

prompts = [
    "The capital of France is",
    "The opposite of hot is",
    "Once upon a time, there was a fox who",
]
with LLM(args.model) as llm:
    params = SamplingParams(max_tokens=32, temperature=0, stop=["\n"])
    outputs = llm.generate(prompts, params, use_tqdm=False)
    for output in outputs:
        answer = output.outputs[0]
        print(f"{output.prompt} ...\n  {answer.text.strip()}")
        print(
            f"  [{len(output.prompt_token_ids)} prompt tokens, {len(answer.token_ids)} new; {answer.finish_reason}]\n"
        )
    num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    print(f"{num_tokens} tokens, up to {llm.stats().peak_running} requests in a step")
