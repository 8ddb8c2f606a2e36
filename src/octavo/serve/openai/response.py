"""Builds OpenAI responses from engine outputs: stream chunks, and complete responses.

Both take the same path. A complete response merges the choices that a stream would have sent:

    RequestOutput (delta) --choices--> choices --chunk--> {"choices": [...]}     streamed
                                          `-----merge---> build() -> response    complete
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Protocol

import msgspec

from octavo.engine.outputs import CompletionOutput, Logprob, PositionLogprobs, RequestOutput
from octavo.frontend.cooperative import YIELD_POINT
from octavo.serve.openai.request import ParsedRequest
from octavo.text.detokenizer import Detokenizer
from octavo.text.formats.markers import MarkerParser
from octavo.text.output_parser import OutputParser
from octavo.text.tokenizer import Tokenizer

MIN_LOGPROB = -9999.0
"""Replaces minus infinity, which JSON does not have."""
Json = dict[str, Any]
TEXT_FIELDS = ("content", "reasoning")
"""Text fields of a chat delta."""
UNSET_FIELDS = dict.fromkeys(("service_tier", "kv_transfer_params", "ec_transfer_params", "metrics"))
UNSET_CHOICE_FIELDS = dict.fromkeys(("stop_reason", "token_ids", "routed_experts"))
UNSET_MESSAGE_FIELDS = dict.fromkeys(("content", "refusal", "annotations", "audio", "function_call", "reasoning"))
"""Fields of complete responses, of their choices and of messages that are null unless set, as vLLM sends them: clients
read them as attributes."""


@dataclass(slots=True)
class Usage:
    """Token counts of one request, over all its prompts. A prompt with several samples counts once."""

    prompt: dict[int, int] = field(default_factory=dict)
    cached: dict[int, int] = field(default_factory=dict)
    completion: dict[int, int] = field(default_factory=dict)
    num_reasoning: int = 0

    def start(self, i: int, output: RequestOutput) -> None:
        self.prompt[i] = len(output.prompt_token_ids)
        self.cached[i] = output.num_cached_tokens

    def update(self, i: int, output: RequestOutput) -> None:
        self.start(i, output)
        self.completion[i] = output.metrics.num_generation_tokens

    def as_dict(self, *, has_reasoning: bool) -> Json:
        num_prompt, num_completion = sum(self.prompt.values()), sum(self.completion.values())
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_completion,
            "total_tokens": num_prompt + num_completion,
            "prompt_tokens_details": {"cached_tokens": sum(self.cached.values())},
            "completion_tokens_details": {"reasoning_tokens": self.num_reasoning} if has_reasoning else None,
        }


class ResponseBuilder(Protocol):
    """Builds one response."""

    usage: Usage

    def choices(self, i: int, output: RequestOutput) -> Iterator[Json]:
        """Yields the choices of the next chunks from a delta of prompt `i`, and `YIELD_POINT` (see `cooperative`)."""

    def chunk(self, choices: list[Json]) -> Json: ...

    def usage_chunk(self) -> Json: ...

    def merge(self, choice: Json) -> None:
        """Adds a choice to the complete response."""

    def build(self) -> Iterator[Any]:
        """Yields `YIELD_POINT` any number of times, then the complete response."""


class _ResponseBuilderBase:
    """Common parts of completion and chat responses."""

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
        # An echo with logprobs computes them too, for the choice's logprobs.
        self._has_prompt_logprobs = request.prompt_logprobs and not request.stream

    has_reasoning = False

    def chunk(self, choices: list[Json]) -> Json:
        chunk: Json = {**self._head, "object": self.chunk_object, "choices": choices}
        if any(c["finish_reason"] for c in choices) and not self.request.include_usage:
            chunk["system_fingerprint"] = self._fingerprint
        if self.request.continuous_usage:
            chunk["usage"] = self.usage.as_dict(has_reasoning=self.has_reasoning)
        elif self.request.include_usage:
            chunk["usage"] = None
        return chunk

    def usage_chunk(self) -> Json:
        usage = self.usage.as_dict(has_reasoning=self.has_reasoning)
        return {
            **self._head,
            "object": self.chunk_object,
            "choices": [],
            "usage": usage,
            "system_fingerprint": self._fingerprint,
        }

    def build(self) -> Iterator[Any]:
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
            "usage": self.usage.as_dict(has_reasoning=self.has_reasoning),
            "system_fingerprint": self._fingerprint,
            **UNSET_FIELDS,
        }
        return response

    def _record(self, i: int, output: RequestOutput) -> Iterator[Any]:
        self.usage.update(i, output)
        if output.prompt_logprobs is not None and self._has_prompt_logprobs:
            logprobs = self._prompt_logprobs[i] = list[Any]()
            for entries in output.prompt_logprobs:
                if entries is not None:
                    logprobs.append(_raw({str(t): _prompt_entry(lp) for t, lp in entries.items()}))
                    yield YIELD_POINT
                else:
                    logprobs.append(None)

    def _token(self, token: int, entry: Logprob) -> str:
        return f"token_id:{token}" if self.request.return_tokens_as_ids else entry.decoded_token or ""


class CompletionResponseBuilder(_ResponseBuilderBase):
    """Builds responses of /v1/completions. Sample j of prompt i is choice `i * n + j`."""

    object = chunk_object = "text_completion"

    def __init__(self, request: ParsedRequest, name: str, tokenizer: Tokenizer, fingerprint: str) -> None:
        super().__init__(request, name, tokenizer, fingerprint)
        self._offsets: dict[int, _TextOffsets] = {}

    def choices(self, i: int, output: RequestOutput) -> Iterator[Json]:
        yield from self._record(i, output)
        for c in output.outputs:
            yield (yield from self._choice(i, c, output))
            yield YIELD_POINT

    def _choice(self, i: int, c: CompletionOutput, output: RequestOutput) -> Generator[Any, None, Json]:
        index = i * self.request.n + c.index
        if first := index not in self._offsets:
            self._offsets[index] = _TextOffsets(
                self.tokenizer,
                output,
                echo=self.request.echo,
                skip_special_tokens=getattr(self.request.params, "skip_special_tokens", True),
                skip_in_prompt=isinstance(self.request.prompts[i], str),
            )
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
            choice["prompt_logprobs"] = self._prompt_logprobs[i]
        if self.request.return_token_ids:
            num_echoed = len(output.prompt_token_ids) if first and self.request.echo else 0
            choice["token_ids"] = c.token_ids[num_echoed:]
            choice["prompt_token_ids"] = output.prompt_token_ids if first else None
        return choice

    def _logprobs(
        self, token_ids: Sequence[int], entries: Sequence[PositionLogprobs | None], text_offsets: _TextOffsets
    ) -> Generator[Any, None, Json]:
        tokens: list[str] = []
        offsets: list[int] = []
        logprobs: list[float | None] = []
        top: list[msgspec.Raw | None] = []
        for token, position in zip(token_ids, entries, strict=False):
            if position is None:  # the first token of a prompt has no log-probability
                text = (
                    f"token_id:{token}" if self.request.return_tokens_as_ids else self.tokenizer.decode([token], False)
                )
                logprobs.append(None)
                top.append(None)
            else:
                text = self._token(token, position[token])
                logprobs.append(clamp_logprob(position[token].logprob))
                top.append(_raw(self._top(token, position)))
                yield YIELD_POINT
            tokens.append(text)
            offsets.append(text_offsets.next(token))
        return {"text_offset": offsets, "token_logprobs": logprobs, "tokens": tokens, "top_logprobs": top}

    def _top(self, token: int, position: PositionLogprobs) -> dict[str, float]:
        """Log-probabilities by text. Several tokens may have the same text: parts of a character, for example. The
        sampled token keeps it, or else the first. The others are named by their ids."""
        top = {self._token(token, position[token]): clamp_logprob(position[token].logprob)}
        for other, logprob in islice(position.items(), (self.request.top_logprobs or 0) + 1):
            if other != token:
                text = self._token(other, logprob)
                top[f"token_id:{other}" if text in top else text] = clamp_logprob(logprob.logprob)
        return top

    def merge(self, choice: Json) -> None:
        merged = self._choices.get(choice["index"])
        if merged is None:
            prompt = {"prompt_logprobs": None, "prompt_token_ids": None}
            self._choices[choice["index"]] = UNSET_CHOICE_FIELDS | prompt | choice | {"text": [choice["text"]]}
            if "token_ids" in choice:
                self._choices[choice["index"]]["token_ids"] = [*choice["token_ids"]]
            return
        merged["text"].append(choice["text"])
        _extend(merged, choice, "token_ids")
        if choice["logprobs"] is not None:
            for name, values in choice["logprobs"].items():
                merged["logprobs"][name] += values
        _set_finish_reason(merged, choice)

    def build(self) -> Iterator[Any]:
        """Tokens of a removed stop string get the offset of the text's end."""
        for choice in self._choices.values():
            _join(choice, "text")
            if choice["logprobs"] is not None:
                end = len(choice["text"])
                choice["logprobs"]["text_offset"] = [min(offset, end) for offset in choice["logprobs"]["text_offset"]]
        return super().build()


class _TextOffsets:
    """Computes each token's offset in the text of its choice.

    A token without text (a skipped special token, or a later part of a multi-token character) has the offset of the
    next token. `skip_in_prompt`: the prompt's text has no special tokens.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        output: RequestOutput,
        *,
        echo: bool,
        skip_special_tokens: bool,
        skip_in_prompt: bool,
    ) -> None:
        prompt_ids = output.prompt_token_ids
        self._output = Detokenizer(tokenizer, prompt_ids, skip_special_tokens=skip_special_tokens)
        self._base = len(output.prompt or "") if echo else 0
        self._num_prompt_ids = len(prompt_ids) if echo else 0  # not yet consumed
        self._prompt = Detokenizer(tokenizer, [], skip_special_tokens=skip_in_prompt)

    def next(self, token: int) -> int:
        """The offset of the next token."""
        if self._num_prompt_ids:
            self._num_prompt_ids -= 1
            offset = min(len(self._prompt.text), self._base)
            self._prompt.push([token])
            return offset
        offset = self._base + len(self._output.text)
        self._output.push([token])
        return offset


class ChatResponseBuilder(_ResponseBuilderBase):
    """Builds responses of /v1/chat/completions: deltas of reasoning, content and tool calls."""

    object, chunk_object = "chat.completion", "chat.completion.chunk"

    def __init__(
        self,
        request: ParsedRequest,
        name: str,
        tokenizer: Tokenizer,
        fingerprint: str,
        *,
        make_parser: Callable[[], OutputParser | MarkerParser],
        has_reasoning: bool,
        new_call_id: Callable[[], str],
    ) -> None:
        super().__init__(request, name, tokenizer, fingerprint)
        self.has_reasoning = has_reasoning
        self._make_parser = make_parser
        self._parsers: dict[int, OutputParser | MarkerParser] = {}
        self._new_call_id = new_call_id
        self._prompt_token_ids: Sequence[int] | None = None

    def choices(self, i: int, output: RequestOutput) -> Iterator[Json]:
        self.usage.start(i, output)
        for c in output.outputs:
            if c.index not in self._parsers:
                yield from self._begin(c, output)
        yield from self._record(i, output)
        for c in output.outputs:
            yield from (yield from self._choices_of(c))
            yield YIELD_POINT

    def _begin(self, c: CompletionOutput, output: RequestOutput) -> Iterator[Json]:
        """The choices before the first token: the role, and the message that an echo repeats."""
        if self.request.return_token_ids and not self._parsers:
            self._prompt_token_ids = output.prompt_token_ids
        self._parsers[c.index] = self._make_parser()
        if self.request.stream:
            yield self._choice(c, {"role": self.request.role, "content": ""}, None)
        if self.request.echoed:
            yield self._choice(c, {"content": self.request.echoed}, None)

    def chunk(self, choices: list[Json]) -> Json:
        chunk = super().chunk(choices)
        if self.request.stream and self._prompt_token_ids is not None:
            chunk["prompt_token_ids"], self._prompt_token_ids = self._prompt_token_ids, None
        return chunk

    def _choices_of(self, c: CompletionOutput) -> Generator[Any, None, list[Json]]:
        parser = self._parsers[c.index]
        was_reasoning = parser.in_reasoning
        parts = parser.push(c.text)
        if was_reasoning or parser.in_reasoning or any(part.kind == "reasoning" for part in parts):
            begin = 0 if was_reasoning else self._position(c.token_ids, parser.reasoning_begin, 0)
            end = len(c.token_ids) - 1
            if not parser.in_reasoning:
                end = self._position(c.token_ids, parser.reasoning_end, end, begin)
            self.usage.num_reasoning += end + 1 - begin
        deltas = [self._delta(part) for part in parts + (parser.finish() if c.finished() else [])]
        deltas = [d for d in _joined(deltas) if d]
        if not deltas and (c.finished() or c.logprobs or (self.request.return_token_ids and c.token_ids)):
            deltas = [{}] if c.finished() else [{"content": ""}]
        choices = [self._choice(c, delta, None) for delta in deltas]
        if choices:
            last = choices[-1]
            if c.logprobs is not None:
                last["logprobs"] = {"content": (yield from self._logprobs(c.token_ids, c.logprobs))}
            if self.request.return_token_ids:
                last["token_ids"] = c.token_ids
            if c.finished():
                called = parser.num_calls > 0 and c.finish_reason == "stop"
                last["finish_reason"] = "tool_calls" if called else api_finish_reason(c.finish_reason)
                last["stop_reason"] = c.stop_reason
        return choices

    def _position(self, token_ids: Sequence[int], marker: str, default: int, begin: int = 0) -> int:
        """Position of a marker's token, from `begin`. `default`: the marker is not one token, or not there."""
        ids = self.tokenizer.encode(marker, add_special_tokens=False)
        return token_ids.index(ids[0], begin) if len(ids) == 1 and ids[0] in token_ids[begin:] else default

    def _choice(self, c: CompletionOutput, delta: Json, finish_reason: str | None) -> Json:
        return {"index": c.index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}

    def _delta(self, part: Any) -> Json:
        if part.kind == "reasoning":
            return {"reasoning": part.text} if self.request.include_reasoning else {}
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
        logprobs = []
        for token, position in zip(token_ids, entries, strict=False):
            if position is not None:
                ranked = list(position.items())
                # The first entry is the sampled token; it belongs to the top tokens only if its rank is low enough.
                top = [pair for pair in ranked if pair[1].rank <= (self.request.top_logprobs or 0)]
                top.sort(key=lambda pair: pair[1].rank)
                entry = self._entry(token, position[token])
                logprobs.append(
                    _raw({**entry, "top_logprobs": [self._entry(t, lp) for t, lp in top[: self.request.top_logprobs]]})
                )
                yield YIELD_POINT
        return logprobs

    def _entry(self, token: int, entry: Logprob) -> Json:
        text = self._token(token, entry)
        has_bytes = self.tokenizer.has_token_bytes
        raw = self.tokenizer.token_bytes(token) if has_bytes else (entry.decoded_token or "").encode()
        return {"token": text, "logprob": clamp_logprob(entry.logprob), "bytes": list(raw)}

    def merge(self, choice: Json) -> None:
        message: Json = {"role": self.request.role, **UNSET_MESSAGE_FIELDS}
        merged = self._choices.setdefault(
            choice["index"],
            {
                "index": choice["index"],
                "message": message,
                "logprobs": None,
                "finish_reason": None,
                **UNSET_CHOICE_FIELDS,
            },
        )
        message, delta = merged["message"], choice["delta"]
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
            if merged["logprobs"] is None:
                merged["logprobs"] = {"content": []}
            merged["logprobs"]["content"] += choice["logprobs"]["content"]
        _extend(merged, choice, "token_ids")
        _set_finish_reason(merged, choice)

    def build(self) -> Iterator[Any]:
        for choice in self._choices.values():
            message = choice["message"]
            _join(message, *TEXT_FIELDS)
            for call in message.get("tool_calls", ()):
                _join(call["function"], "arguments")
            if message["content"] is None and ("tool_calls" not in message or self.request.required_tool is not None):
                message["content"] = ""
        yield from super().build()

    def _response(self, choices: list[Any]) -> Json:
        response = super()._response(choices)
        response["prompt_logprobs"] = self._prompt_logprobs.get(0)
        response["prompt_token_ids"], response["prompt_text"] = self._prompt_token_ids, None
        return response


def _raw(value: Any) -> msgspec.Raw:
    """Encodes a part of a response early, so that encoding the complete response takes little time at once."""
    return msgspec.Raw(msgspec.json.encode(value))


def _joined(deltas: Iterable[Json]) -> list[Json]:
    """Joins adjacent deltas of the same text field: a chunk may carry several tokens."""
    joined: list[Json] = []
    for delta in deltas:
        name = next((name for name in TEXT_FIELDS if delta.keys() == {name}), None)
        if name is not None and joined and joined[-1].keys() == {name}:
            joined[-1][name].append(delta[name])
        else:
            joined.append(delta if name is None else {name: [delta[name]]})
    for delta in joined:
        _join(delta, *TEXT_FIELDS)
    return joined


def _extend(merged: Json, choice: Json, name: str) -> None:
    if choice.get(name) is not None:
        merged[name] = merged[name] or []
        merged[name].extend(choice[name])


def _join(holder: Json, *names: str) -> None:
    """Joins fields that were collected as lists of strings: appending to a string would copy it each time."""
    for name in names:
        if isinstance(pieces := holder.get(name), list):
            holder[name] = "".join(pieces)


def _set_finish_reason(merged: Json, choice: Json) -> None:
    if choice["finish_reason"] is not None:
        merged["finish_reason"] = choice["finish_reason"]
        merged["stop_reason"] = choice.get("stop_reason")


def api_finish_reason(reason: str | None) -> str | None:
    """The API has no "abort": an aborted response gets "length"."""
    return "length" if reason == "abort" else reason


def clamp_logprob(logprob: float) -> float:
    return max(logprob, MIN_LOGPROB)


def _prompt_entry(entry: Logprob) -> Mapping[str, Any]:
    return {"logprob": clamp_logprob(entry.logprob), "rank": entry.rank, "decoded_token": entry.decoded_token}
