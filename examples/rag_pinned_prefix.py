"""Ask several questions about the same documents, which are computed once and pinned.

A pinned prefix keeps its blocks until it is unpinned, however full the memory gets. Every prompt that begins with it
shares the blocks.

Start it with: python examples/rag_pinned_prefix.py
"""

import argparse

from octavo import LLM, SamplingParams

parser = argparse.ArgumentParser(description="Ask questions about documents in a pinned prefix.")
parser.add_argument("--model", default="smollm2-135m-instruct", help="a name, a directory or a .gguf file")
args = parser.parse_args()

documents = """\
Opening hours: The library opens at 9 and closes at 18. On Saturdays it closes at 13. It is closed on Sundays.
Loans: A book may be kept for four weeks. A film may be kept for one week. Both may be renewed twice.
Fees: A card costs 12 euros a year. Children and students pay nothing. A late book costs 20 cents a day.
Rooms: The quiet room has 24 seats. The music room has two pianos, and must be booked at the desk."""
prefix = [{"role": "system", "content": f"Answer from these documents, in one sentence.\n\n{documents}"}]
questions = [
    "What does a card cost?",
    "How many seats are in the quiet room?",
    "How many pianos are in the music room?",
]

with LLM(args.model) as llm:
    name = llm.pin_prefix(prefix)
    print(f"the documents are pinned in {llm.kv_stats().num_pinned} blocks\n")
    prompts = [[*prefix, {"role": "user", "content": question}] for question in questions]
    outputs = llm.chat(prompts, SamplingParams(max_tokens=32, temperature=0), use_tqdm=False)
    for question, output in zip(questions, outputs, strict=True):
        print(f"{question}\n  {output.outputs[0].text.strip()}")
    num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
    num_cached = sum(output.num_cached_tokens for output in outputs)
    print(f"\n{num_cached} of {num_prompt} prompt tokens were not computed again")
    print(f"{llm.unpin_prefix(name)} blocks unpinned")
