"""Watch the pool of blocks in a notebook while requests run.

The cells of this file begin with "# %%": Visual Studio Code, Spyder and Jupytext open it as a notebook. As a program
it writes the same pictures to pool.html.

Start it with: python examples/notebook_pool.py
"""

# %%
import argparse
from pathlib import Path

from octavo import LLM, SamplingParams

parser = argparse.ArgumentParser(description="Draw the pool while requests run.")
parser.add_argument("--model", default="smollm2-135m-instruct", help="a name, a directory or a .gguf file")
args, _ = parser.parse_known_args()  # a notebook's kernel has arguments of its own
try:
    from IPython.display import display
except ImportError:  # a program, without a notebook
    page = Path("pool.html")
    page.write_text("<!doctype html><meta charset='utf-8'><title>The pool</title>")

    def display(shown):
        with page.open("a") as file:
            file.write(f"<p>{shown._repr_html_()}</p>")


# %% An LLM shows its pool: a square stands for a block.
llm = LLM(args.model, num_gpu_blocks_override=96)
display(llm)

# %% While requests run, each has a colour. Blocks that several requests share have the colour of text.
facts = """The sea covers most of our planet. It is deep, salt and cold. The moon moves it, twice a day.
It feeds birds, fish and people. Its currents warm the land in the north. Ships cross it with grain, oil and tea. """
llm.generate(facts, SamplingParams(max_tokens=1), use_tqdm=False)  # computes what the prompts below share
prompts = [f"{facts}The {subject} of the sea" for subject in ("fish", "birds", "ships", "colour")]
params = SamplingParams(max_tokens=48, temperature=0.7, seed=1)
for i, output in enumerate(llm.stream(prompts, params), 1):
    if i % 60 == 0:
        display(llm)
    if output.finished:
        display(output)

# %% Afterwards the prefix cache keeps the blocks, until others need the room.
display(llm)
stats = llm.kv_stats()
print(f"{stats.num_cached} of {stats.num_blocks} blocks are cached")
llm.close()
