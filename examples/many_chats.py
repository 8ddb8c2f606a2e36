"""Hold several conversations at once, and see what the prefix cache saves.

All conversations begin with the same instructions, whose blocks they share. Each turn sends its whole conversation
again, and finds the blocks of the turns before.

Start it with: python examples/many_chats.py
"""

import argparse

from octavo import LLM, SamplingParams

parser = argparse.ArgumentParser(description="Hold several conversations at once.")
parser.add_argument("--model", default="smollm2-135m-instruct", help="a name, a directory or a .gguf file")
args = parser.parse_args()

instructions = "You are a friendly guide to nature. Answer in one short sentence, in simple words."
chats = {
    "Ann": ["Why is the sky blue?", "And why is it red in the evening?"],
    "Ben": ["Why do leaves fall in autumn?", "Do all trees lose them?"],
    "Cleo": ["How do birds find their way?", "Do they fly at night, too?"],
}
conversations = {name: [{"role": "system", "content": instructions}] for name in chats}

with LLM(args.model) as llm:
    for turn in range(2):
        for name, questions in chats.items():
            conversations[name].append({"role": "user", "content": questions[turn]})
        params = SamplingParams(max_tokens=60, temperature=0, stop=["."], include_stop_str_in_output=True)
        outputs = llm.chat(list(conversations.values()), params, use_tqdm=False)
        for name, output in zip(chats, outputs, strict=True):
            answer = output.outputs[0].text.strip()
            conversations[name].append({"role": "assistant", "content": answer})
            num_prompt = len(output.prompt_token_ids)
            print(f"{name}: {chats[name][turn]}\n  {answer}")
            print(f"  [{output.num_cached_tokens} of {num_prompt} prompt tokens came from the cache]\n")
    stats = llm.kv_stats()
    print(f"prefix cache: {stats.num_hit_tokens} of {stats.num_queried_tokens} prompt tokens were found")
