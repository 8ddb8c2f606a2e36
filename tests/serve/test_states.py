"""Chats with a model with recurrent layers: a turn begins at the checkpoint that an earlier request left."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.models import write_tokenizer
from tests.models.tiny import make_tiny_checkpoint
from tests.serve.in_process_server import Server, serving

TEMPLATE = (
    "{% for m in messages %}<s>{{ m['role'][0] }}{{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>a{% endif %}"
)
SIZES: dict[str, Any] = {"block_size": 4, "mamba_block_size": 8, "chat_template": TEMPLATE}
SYSTEM = {"role": "system", "content": "abcdefghij" * 4}  # with its opening and end 43 tokens


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = make_tiny_checkpoint(
        "qwen3_5", tmp_path_factory.mktemp("model") / "talking", max_position_embeddings=256
    )
    write_tokenizer(directory)
    return str(directory)


async def ask(server: Server, *messages: dict[str, str]) -> tuple[str, int, int]:
    """The answer, the tokens of the prompt, and those of them that were found."""
    answer = await server.chat(messages=[SYSTEM, *messages], max_tokens=40)
    usage = answer["usage"]
    content = answer["choices"][0]["message"]["content"]
    return content, usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


async def test_chats_begin_at_checkpoints(model: str) -> None:
    question, other = {"role": "user", "content": "x" * 21}, {"role": "user", "content": "y" * 21}
    async with serving(model, engine_options=SIZES) as server:
        answer, num_prompt, found = await ask(server, question)
        assert found == 0
        again, _, found = await ask(server, question)
        assert again == answer and found == (num_prompt - 2) // 4 * 4  # before the answer's opening of two tokens
        _, _, found = await ask(server, other)
        assert found == 40  # the system prompt
        _, _, found = await ask(server, question, {"role": "assistant", "content": answer}, other)
        assert found > num_prompt  # in the answer
