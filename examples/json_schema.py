"""Get JSON that always matches a schema: tokens that would break it are never sampled.

Start it with: python examples/json_schema.py
"""

import argparse
import json

from octavo import LLM, SamplingParams

parser = argparse.ArgumentParser(description="Extract facts from texts, as JSON that matches a schema.")
parser.add_argument("--model", default="smollm2-135m-instruct", help="a name, a directory or a .gguf file")
args = parser.parse_args()

schema = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "pet": {"enum": ["cat", "dog", "none"]},
    },
    "required": ["name", "age", "pet"],
    "additionalProperties": False,
}
texts = [
    "Maria is 34 years old and walks her dog every morning.",
    "At 71, Henrik lives in Bergen with a cat that he found on a ferry.",
]
instruction = "Give the person's name, age and pet as JSON: "
conversations = [[{"role": "user", "content": instruction + text}] for text in texts]

with LLM(args.model) as llm:
    params = SamplingParams(max_tokens=100, temperature=0, structured_outputs={"json": schema})
    outputs = llm.chat(conversations, params, use_tqdm=False)
    for text, output in zip(texts, outputs, strict=True):
        person = json.loads(output.outputs[0].text)  # never fails, unless max_tokens cut the text
        print(f"{text}\n  name: {person['name']}, age: {person['age']}, pet: {person['pet']}")
