"""From the engine's outputs to what goes over the wire: chunks, and the whole response that chunks add up to.

Both kinds of answer take the same path. A response that is not streamed is the fold of the chunks that would have been:

    RequestOutput (what is new) --take--> choices --chunk--> {"choices": [...]}     streamed
                                             `------fold---> the response           whole
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from octavo.engine.outputs import CompletionOutput, Logprob, PositionLogprobs, RequestOutput
from octavo.frontend.cooperative import YIELD_POINT
from octavo.serve.openai.request import ParsedRequest
from octavo.text.detokenizer import Detokenizer
from octavo.text.output_parser import END_THINK, OutputParser
from octavo.text.tokenizer import Tokenizer

MIN_LOGPROB = -9999.0
"""What stands for minus infinity, which JSON has not."""
Json = dict[str, Any]
TEXTS = ("content", "reasoning")
"""What a delta has of a text."""


@dataclass(slots=True)
class Usage:
    """Tokens of one request, over all its prompts; a prompt with several samples counts once."""

    prompt: dict[int, int] = field(default_factory=dict)
    cached: dict[int, int] = field(default_factory=dict)
    completion: dict[int, int] = field(default_factory=dict)
    num_reasoning: int = 0

    def take(self, i: int, output: RequestOutput) -> None:
        self.prompt[i] = len(output.prompt_token_ids)
        self.cached[i] = output.num_cached_tokens
        self.completion[i] = output.metrics.num_generation_tokens

    def as_dict(self, *, reasons: bool) -> Json:
        num_prompt, num_completion = sum(self.prompt.values()), sum(self.completion.values())
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_completion,
            "total_tokens": num_prompt + num_completion,
            "prompt_tokens_details": {"cached_tokens": sum(self.cached.values())},
            "completion_tokens_details": {"reasoning_tokens": self.num_reasoning} if reasons else None,
        }


class ResponseBuilder(Protocol):
    """One response in the making."""

    usage: Usage

    def take(self, i: int, output: RequestOutput) -> Iterator[Json]:
        """The choices of the next chunks, from what is new of prompt `i`; and `YIELD_POINT`, see `slices`."""

    def chunk(self, choices: list[Json]) -> Json: ...

    def usage_chunk(self) -> Json: ...

    def fold(self, choice: Json) -> None: ...

    def whole(self) -> Iterator[Any]:
        """The response, after as many a `YIELD_POINT` as it takes."""


class _ResponseBuilderBase:
    """What completions and chats have in common."""

    object = ""
    chunk_object = ""

    def __init__(self, request: ParsedRequest, name: str, tokenizer: Tokenizer, fingerprint: str) -> None:
        self.request = request
        self.usage = Usage()
        self.tokenizer = tokenizer
        self._head = {"id": name, "object": "", "created": int(time.time()), "model": request.model}
        self._fingerprint = fingerprint
        self._choices: dict[int, Json] = {}
        self._prompt_logprobs: dict[int, list[Any]] = {}
        self._echoes = request.echo or request.stream  # then the prompt's log-probabilities are not told apart

    reasons = False

    def chunk(self, choices: list[Json]) -> Json:
        chunk: Json = {**self._head, "object": self.chunk_object, "choices": choices}
        if any(c["finish_reason"] for c in choices) and not self.request.include_usage:
            chunk["system_fingerprint"] = self._fingerprint
        if self.request.continuous_usage:
            chunk["usage"] = self.usage.as_dict(reasons=self.reasons)
        elif self.request.include_usage:
            chunk["usage"] = None
        return chunk

    def usage_chunk(self) -> Json:
        usage = self.usage.as_dict(reasons=self.reasons)
        return {
            **self._head,
            "object": self.chunk_object,
            "choices": [],
            "usage": usage,
            "system_fingerprint": self._fingerprint,
        }

    def whole(self) -> Iterator[Any]:
        yield self._response((yield from self._encoded(self._choices[index] for index in sorted(self._choices))))

    def _encoded(self, choices: Iterable[Json]) -> Generator[Any, None, list[msgspec.Raw]]:
        encoded = []
        for choice in choices:
            encoded.append(_raw(choice))
            yield YIELD_POINT
        return encoded

    def _response(self, choices: list[Any]) -> Json:
        response = {
            **self._head,
            "object": self.object,
            "choices": choices,
            "usage": self.usage.as_dict(reasons=self.reasons),
            "system_fingerprint": self._fingerprint,
        }
        return response

    def _note(self, i: int, output: RequestOutput) -> Iterator[Any]:
        self.usage.take(i, output)
        if output.prompt_logprobs is not None and not self._echoes:
            told = self._prompt_logprobs[i] = list[Any]()
            for entries in output.prompt_logprobs:
                if entries is not None:
                    told.append(_raw({str(t): _prompt_entry(lp) for t, lp in entries.items()}))
                    yield YIELD_POINT
                else:
                    told.append(None)

    def _extras(self, choice: Json, i: int, c: CompletionOutput, output: RequestOutput, *, first: bool) -> Json:
        """vLLM's own fields of a choice."""
        if self.request.token_ids:
            choice["token_ids"] = c.token_ids
            choice["prompt_token_ids"] = output.prompt_token_ids if first else None
        return choice

    def _token(self, token: int, entry: Logprob) -> str:
        return f"token_id:{token}" if self.request.tokens_as_ids else entry.decoded_token or ""


class CompletionResponseBuilder(_ResponseBuilderBase):
    """Of /v1/completions. Sample j of prompt i is choice `i * n + j`."""

    object = chunk_object = "text_completion"

    def __init__(self, request: ParsedRequest, name: str, tokenizer: Tokenizer, fingerprint: str) -> None:
        super().__init__(request, name, tokenizer, fingerprint)
        self._offsets: dict[int, _TextOffsets] = {}

    def take(self, i: int, output: RequestOutput) -> Iterator[Json]:
        yield from self._note(i, output)
        for c in output.outputs:
            yield (yield from self._choice(i, c, output))
            yield YIELD_POINT

    def _choice(self, i: int, c: CompletionOutput, output: RequestOutput) -> Generator[Any, None, Json]:
        index = i * self.request.n + c.index
        if first := index not in self._offsets:
            skip, echo = getattr(self.request.params, "skip_special_tokens", True), self.request.echo
            self._offsets[index] = _TextOffsets(self.tokenizer, output, echo=echo, skip_special_tokens=skip)
        logprobs = None
        if c.logprobs is not None:
            logprobs = yield from self._logprobs(c.token_ids, c.logprobs, self._offsets[index])
        choice: Json = {
            "index": index,
            "text": c.text,
            "logprobs": logprobs,
            "finish_reason": api_finish_reason(c.finish_reason),
            "stop_reason": c.stop_reason,
        }
        if i in self._prompt_logprobs:
            choice["prompt_logprobs"] = self._prompt_logprobs.get(i)
        return self._extras(choice, i, c, output, first=first)

    def _logprobs(
        self, token_ids: Sequence[int], entries: Sequence[PositionLogprobs | None], places: _TextOffsets
    ) -> Generator[Any, None, Json]:
        tokens: list[str] = []
        offsets: list[int] = []
        own: list[float | None] = []
        top: list[msgspec.Raw | None] = []
        for token, position in zip(token_ids, entries, strict=False):
            if position is None:  # nothing comes before the first token of a prompt
                text = f"token_id:{token}" if self.request.tokens_as_ids else self.tokenizer.decode([token], False)
                own.append(None)
                top.append(None)
            else:
                text = self._token(token, position[token])
                own.append(finite(position[token].logprob))
                top.append(_raw({self._token(t, lp): finite(lp.logprob) for t, lp in position.items()}))
                yield YIELD_POINT
            tokens.append(text)
            offsets.append(places.next(token))
        return {"text_offset": offsets, "token_logprobs": own, "tokens": tokens, "top_logprobs": top}

    def fold(self, choice: Json) -> None:
        so_far = self._choices.get(choice["index"])
        if so_far is None:
            self._choices[choice["index"]] = choice | {"text": [choice["text"]]}
            if "token_ids" in choice:
                self._choices[choice["index"]]["token_ids"] = [*choice["token_ids"]]
            return
        so_far["text"].append(choice["text"])
        _extend(so_far, choice, "token_ids")
        if choice["logprobs"] is not None:
            for name, values in choice["logprobs"].items():
                so_far["logprobs"][name] += values
        _end(so_far, choice)

    def whole(self) -> Iterator[Any]:
        """A stop string is not in the text, but its tokens are among the tokens: they stand at the end."""
        for choice in self._choices.values():
            _join(choice, "text")
            if choice["logprobs"] is not None:
                end = len(choice["text"])
                choice["logprobs"]["text_offset"] = [min(at, end) for at in choice["logprobs"]["text_offset"]]
        return super().whole()


class _TextOffsets:
    """Where each token of a choice begins in the choice's text.

    A token without text, such as a special token that is skipped, stands where the next one does; so do the tokens
    behind the first of a character that several make up.
    """

    def __init__(self, tokenizer: Tokenizer, output: RequestOutput, *, echo: bool, skip_special_tokens: bool) -> None:
        prompt_ids = output.prompt_token_ids
        self._own = Detokenizer(tokenizer, prompt_ids, skip_special_tokens=skip_special_tokens)
        self._base = len(output.prompt or "") if echo else 0
        self._num_prompt_ids = len(prompt_ids) if echo else 0  # that are still to come
        self._prompt = Detokenizer(tokenizer, [], skip_special_tokens=skip_special_tokens)

    def next(self, token: int) -> int:
        """Of the token behind those before."""
        if self._num_prompt_ids:
            self._num_prompt_ids -= 1
            at = min(len(self._prompt.text), self._base)
            self._prompt.push([token])
            return at
        at = self._base + len(self._own.text)
        self._own.push([token])
        return at


class ChatResponseBuilder(_ResponseBuilderBase):
    """Of /v1/chat/completions: deltas of reasoning, content and calls of tools."""

    object, chunk_object = "chat.completion", "chat.completion.chunk"

    def __init__(
        self,
        request: ParsedRequest,
        name: str,
        tokenizer: Tokenizer,
        fingerprint: str,
        *,
        make_parser: Callable[[], OutputParser],
        reasons: bool,
        new_call_id: Callable[[], str],
    ) -> None:
        super().__init__(request, name, tokenizer, fingerprint)
        self.reasons = reasons
        self._make_parser = make_parser
        self._parsers: dict[int, OutputParser] = {}
        self._new_call_id = new_call_id

    def take(self, i: int, output: RequestOutput) -> Iterator[Json]:
        yield from self._note(i, output)
        for c in output.outputs:
            first = c.index not in self._parsers
            if first:
                self._parsers[c.index] = self._make_parser()
                if self.request.stream:
                    yield self._choice(c, {"role": "assistant", "content": ""}, None)
            yield from (yield from self._choices_of(c, output, first=first))
            yield YIELD_POINT

    def _choices_of(
        self, c: CompletionOutput, output: RequestOutput, *, first: bool
    ) -> Generator[Any, None, list[Json]]:
        parser = self._parsers[c.index]
        was_reasoning = parser.in_reasoning
        parts = parser.push(c.text)
        if was_reasoning or parser.in_reasoning or any(part.kind == "reasoning" for part in parts):
            self.usage.num_reasoning += self._num_reasoning(c.token_ids, ends=not parser.in_reasoning)
        deltas = [self._delta(part) for part in parts + (parser.finish() if c.finished() else [])]
        deltas = [d for d in _joined(deltas) if d]
        if not deltas and (c.finished() or c.logprobs or (self.request.token_ids and (c.token_ids or first))):
            deltas = [{}] if c.finished() else [{"content": ""}]
        choices = [self._choice(c, delta, None) for delta in deltas]
        if choices:
            last = choices[-1]
            if c.logprobs is not None:
                last["logprobs"] = {"content": (yield from self._logprobs(c.token_ids, c.logprobs))}
            self._extras(last, 0, c, output, first=first)
            if c.finished():
                called = parser.num_calls > 0 and c.finish_reason == "stop"
                last["finish_reason"] = "tool_calls" if called else api_finish_reason(c.finish_reason)
                last["stop_reason"] = c.stop_reason
        return choices

    def _num_reasoning(self, token_ids: Sequence[int], *, ends: bool) -> int:
        """Of tokens that came together; where the reasoning ends, up to the token that ends it, if that is one."""
        end = self.tokenizer.encode(END_THINK, add_special_tokens=False) if ends else []
        if len(end) == 1 and end[0] in token_ids:
            return token_ids.index(end[0]) + 1
        return len(token_ids)

    def _choice(self, c: CompletionOutput, delta: Json, finish_reason: str | None) -> Json:
        return {"index": c.index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}

    def _delta(self, part: Any) -> Json:
        if part.kind == "reasoning":
            return {"reasoning": part.text} if self.request.reasoning else {}
        if part.kind == "content":
            return {"content": part.text}
        if part.index and not self.request.parallel_tool_calls:
            return {}
        if part.name is None:
            return {"tool_calls": [{"index": part.index, "function": {"arguments": part.text}}]}
        call = {"index": part.index, "id": self._new_call_id(), "type": "function"}
        return {"tool_calls": [{**call, "function": {"name": part.name, "arguments": ""}}]}

    def _logprobs(
        self, token_ids: Sequence[int], entries: Sequence[PositionLogprobs | None]
    ) -> Generator[Any, None, list[msgspec.Raw]]:
        told = []
        for token, position in zip(token_ids, entries, strict=False):
            if position is not None:
                ranked = list(position.items())
                # The first is the token that came; it is one of the likeliest only where its rank says so.
                top = [pair for pair in ranked if pair[1].rank <= (self.request.top or 0)]
                top.sort(key=lambda pair: pair[1].rank)
                entry = self._entry(token, position[token])
                told.append(_raw({**entry, "top_logprobs": [self._entry(t, lp) for t, lp in top[: self.request.top]]}))
                yield YIELD_POINT
        return told

    def _entry(self, token: int, entry: Logprob) -> Json:
        text = self._token(token, entry)
        has_bytes = self.tokenizer.has_token_bytes
        raw = self.tokenizer.token_bytes(token) if has_bytes else (entry.decoded_token or "").encode()
        return {"token": text, "logprob": finite(entry.logprob), "bytes": list(raw)}

    def fold(self, choice: Json) -> None:
        message: Json = {"role": "assistant", "content": None, "refusal": None}
        so_far = self._choices.setdefault(
            choice["index"],
            {
                "index": choice["index"],
                "message": message,
                "logprobs": None,
                "finish_reason": None,
                "stop_reason": None,
            },
        )
        message, delta = so_far["message"], choice["delta"]
        for name in ("content", "reasoning"):
            if name in delta:
                if message.get(name) is None:
                    message[name] = []
                message[name].append(delta[name])
        for call in delta.get("tool_calls", ()):
            calls = message.setdefault("tool_calls", [])
            if "id" in call:
                function = {"name": call["function"]["name"], "arguments": [call["function"]["arguments"]]}
                calls.append({"id": call["id"], "type": call["type"], "function": function})
            else:
                calls[-1]["function"]["arguments"].append(call["function"]["arguments"])
        if choice["logprobs"] is not None:
            if so_far["logprobs"] is None:
                so_far["logprobs"] = {"content": []}
            so_far["logprobs"]["content"] += choice["logprobs"]["content"]
        _extend(so_far, choice, "token_ids")
        if choice.get("prompt_token_ids") is not None:
            so_far["prompt_token_ids"] = choice["prompt_token_ids"]
        _end(so_far, choice)

    def whole(self) -> Iterator[Any]:
        for choice in self._choices.values():
            message = choice["message"]
            _join(message, *TEXTS)
            for call in message.get("tool_calls", ()):
                _join(call["function"], "arguments")
            if message["content"] is None and "tool_calls" not in message:
                message["content"] = ""
        yield from super().whole()

    def _response(self, choices: list[Any]) -> Json:
        response = super()._response(choices)
        if 0 in self._prompt_logprobs:
            response["prompt_logprobs"] = self._prompt_logprobs[0]
        return response


def _raw(value: Any) -> msgspec.Raw:
    """As JSON already: a large answer is many of these, and what is put together of them is made in no time."""
    return msgspec.Raw(msgspec.json.encode(value))


def _joined(deltas: Iterable[Json]) -> list[Json]:
    """Neighbours of the same kind as one: a chunk may carry several tokens."""
    joined: list[Json] = []
    for delta in deltas:
        name = next((name for name in TEXTS if delta.keys() == {name}), None)
        if name is not None and joined and joined[-1].keys() == {name}:
            joined[-1][name].append(delta[name])
        else:
            joined.append(delta if name is None else {name: [delta[name]]})
    for delta in joined:
        _join(delta, *TEXTS)
    return joined


def _extend(so_far: Json, choice: Json, name: str) -> None:
    if choice.get(name) is not None:
        so_far.setdefault(name, []).extend(choice[name])


def _join(holder: Json, *names: str) -> None:
    """The texts of these names, which were put together piece by piece: a string that grows is copied each time."""
    for name in names:
        if isinstance(pieces := holder.get(name), list):
            holder[name] = "".join(pieces)


def _end(so_far: Json, choice: Json) -> None:
    if choice["finish_reason"] is not None:
        so_far["finish_reason"] = choice["finish_reason"]
        so_far["stop_reason"] = choice.get("stop_reason")


def api_finish_reason(reason: str | None) -> str | None:
    """The API knows no aborted answer: one that was cut short has ended by its length."""
    return "length" if reason == "abort" else reason


def finite(logprob: float) -> float:
    return max(logprob, MIN_LOGPROB)


def _prompt_entry(entry: Logprob) -> Mapping[str, Any]:
    return {"logprob": finite(entry.logprob), "rank": entry.rank, "decoded_token": entry.decoded_token}
