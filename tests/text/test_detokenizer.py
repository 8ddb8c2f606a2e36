"""Incremental detokenization: streamed text equals decoded text, and stop strings never leak."""

from __future__ import annotations

import bisect
import itertools
import time
from pathlib import Path

import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from octavo.errors import ParameterError
from octavo.text.detokenizer import Detokenizer
from octavo.text.tokenizer import Tokenizer
from tests.text.samples import make_sentencepiece, read, train_byte_level

STORIES = Path(__file__).parents[3] / "shared" / "data" / "models" / "stories260k"


def make_wordpiece() -> tokenizers.Tokenizer:
    """A decoder that works on whole texts, and so needs the library's stream."""
    vocab = {p: i for i, p in enumerate(["[UNK]", "[SEP]", "the", "##m", "dog", "##s", "a", ".", "'"])}
    backend = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece()
    backend.add_special_tokens(["[SEP]"])
    return backend


def make_byte_fallback() -> tokenizers.Tokenizer:
    """Byte tokens through the library's stream: with `Metaspace` in the decoder, tokens have no bytes of their own."""
    backend = make_sentencepiece()
    parts = [decoders.ByteFallback(), decoders.Metaspace(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(parts)
    return backend


BYTE_LEVEL = Tokenizer(train_byte_level())
SENTENCEPIECE = Tokenizer(make_sentencepiece())
WORDPIECE = Tokenizer(make_wordpiece())
BYTE_FALLBACK = Tokenizer(make_byte_fallback())
EVERY = {"byte_level": BYTE_LEVEL, "sentencepiece": SENTENCEPIECE, "wordpiece": WORDPIECE, "fallback": BYTE_FALLBACK}
texts = st.lists(
    st.one_of(
        st.sampled_from(
            ["🙂", "👩‍👩‍👧", "漢字", "한국어", "e\u0301", "ö", "the ", " and", "\n\n", "dogs", "</s>", "\ufffd"]
        ),
        st.text(st.characters(exclude_categories=["Cs"]), max_size=4),
    ),
    max_size=8,
).map("".join)


def stream(detokenizer: Detokenizer, ids: list[int], cuts: list[int] | None = None) -> list[str]:
    """The text returned by each call; `cuts` are the sizes of the first calls, then one token each."""
    shown, at = [], 0
    for size in [*(cuts or []), *[1] * len(ids)]:
        shown.append(detokenizer.push(ids[at : at + size]))
        at += size
    return [*shown, detokenizer.finish()]


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCEPIECE], ids=["byte_level", "sentencepiece"])
@given(text=texts, cuts=st.lists(st.integers(0, 5), max_size=6))
def test_streamed_text_equals_the_text(tokenizer, text, cuts):
    ids = tokenizer.encode(text, add_special_tokens=False, parse_special=False)
    # SentencePiece writes a space as "▁".
    expected = text.replace("\ufdd0", "").replace("▁", " " if tokenizer is SENTENCEPIECE else "▁")
    detokenizer = Detokenizer(tokenizer, [])
    shown = stream(detokenizer, ids, cuts)
    assert "".join(shown) == detokenizer.text == tokenizer.decode(ids) == expected
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in shown)
    assert detokenizer.num_tokens_kept == len(ids)


@given(ids=st.lists(st.integers(0, 361), max_size=20), skip=st.booleans(), cuts=st.lists(st.integers(0, 5), max_size=6))
def test_any_tokens_stream_as_they_decode(ids, skip, cuts):
    """Partial characters and stray bytes included; U+FFFD appears only if no later token can complete a character."""
    detokenizer = Detokenizer(BYTE_LEVEL, [], skip_special_tokens=skip)
    assert "".join(stream(detokenizer, ids, cuts)) == BYTE_LEVEL.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("name", EVERY)
@given(data=st.data())
def test_text_does_not_depend_on_the_cuts(name, data):
    tokenizer = EVERY[name]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=14))
    prompt = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=5))
    cuts = data.draw(st.lists(st.integers(0, 5), max_size=6))
    stop = data.draw(st.lists(st.sampled_from(["the", "he ", "a", "\ufffd", "n\ufffd", " "]), max_size=2))
    one, other = (Detokenizer(tokenizer, prompt, stop=stop) for _ in range(2))
    assert "".join(stream(one, ids, cuts)) == "".join(stream(other, ids))
    assert (one.text, one.stop_reason, one.num_tokens_kept) == (other.text, other.stop_reason, other.num_tokens_kept)


def test_character_is_returned_with_its_last_byte():
    ids = BYTE_LEVEL.encode("🙃", parse_special=False)
    raw = [BYTE_LEVEL.backend.token_to_id(c) for c in "ðŁĻĥ"]
    assert BYTE_LEVEL.decode(raw) == "🙃" == BYTE_LEVEL.decode(ids)
    detokenizer = Detokenizer(BYTE_LEVEL, [])
    assert [detokenizer.push([i]) for i in raw] == ["", "", "", "🙃"]
    assert detokenizer.finish() == ""


def test_complete_characters_stream_although_each_token_ends_inside_one():
    """Each token ends inside a character: what is complete is shown all the same."""
    raw = "漢字漢字".encode()
    alphabet = {bytes([b]): c for c in pre_tokenizers.ByteLevel.alphabet() for b in [_byte(c)]}
    pieces = [raw[:2], raw[2:5], raw[5:8], raw[8:11], raw[11:]]
    vocab = {"".join(alphabet[p[i : i + 1]] for i in range(len(p))): n for n, p in enumerate(pieces[:3])}
    backend = tokenizers.Tokenizer(models.BPE({**vocab, "x": 3}, []))
    backend.decoder = decoders.ByteLevel()
    detokenizer = Detokenizer(Tokenizer(backend), [])
    assert [detokenizer.push([i]) for i in (0, 1, 2)] == ["", "漢", "字"]


def _byte(char: str) -> int:
    decoded = decoders.ByteLevel().decode([char]).encode()
    return decoded[0] if len(decoded) == 1 else BYTE_LEVEL._piece_to_bytes(char)[0]


def test_partial_character_at_the_end_is_one_replacement():
    raw = [BYTE_LEVEL.backend.token_to_id(c) for c in "aðŁĻ"]
    detokenizer = Detokenizer(BYTE_LEVEL, [])
    assert [detokenizer.push([i]) for i in raw] == ["a", "", "", ""]
    assert detokenizer.finish() == "\ufffd"
    assert detokenizer.finish() == ""
    assert detokenizer.text == "a\ufffd" == BYTE_LEVEL.decode(raw)


def test_prompt_may_end_inside_a_character():
    raw = [BYTE_LEVEL.backend.token_to_id(c) for c in "theðŁĻĥ"]
    detokenizer = Detokenizer(BYTE_LEVEL, raw[:-1])
    assert detokenizer.push(raw[-1:]) == "🙃"


def test_bad_byte_in_sentencepiece_keeps_good_ones():
    """The library's decoder turns a run of bytes with a bad one into U+FFFD; returned text must stay."""
    ids = [SENTENCEPIECE.backend.token_to_id(f"<0x{b:02X}>") for b in (*"漢".encode(), 0xE6)]
    the = SENTENCEPIECE.backend.token_to_id("▁the")
    for tokenizer in (SENTENCEPIECE, BYTE_FALLBACK):
        detokenizer = Detokenizer(tokenizer, [the])
        assert "".join(detokenizer.push([i]) for i in ids) == "漢"
        assert detokenizer.push([the]) == "\ufffd the"


def test_sentencepiece_strips_the_first_space():
    the = SENTENCEPIECE.backend.token_to_id("▁the")
    for prompt, text in (([], "the the"), ([1], "the the"), ([the], " the the"), ([1, the], " the the")):
        assert Detokenizer(SENTENCEPIECE, prompt).push([the, the]) == text
    assert Detokenizer(SENTENCEPIECE, [1], skip_special_tokens=False).push([the]) == " the"


def test_special_tokens_are_returned_on_request():
    ids = [1, *BYTE_LEVEL.encode("the"), 2]
    assert Detokenizer(BYTE_LEVEL, []).push(ids) == "the"
    assert Detokenizer(BYTE_LEVEL, [], skip_special_tokens=False).push(ids) == "<|im_start|>the<|im_end|>"
    assert Detokenizer(WORDPIECE, []).push([2, 1, 4]) == "the dog"


def test_wordpiece_streams_as_it_decodes():
    ids = WORDPIECE.encode("the dogs them a dog.")
    for cuts in ([], [2, 3], [99]):
        detokenizer = Detokenizer(WORDPIECE, [])
        assert "".join(stream(detokenizer, ids, cuts)) == WORDPIECE.decode(ids) == "the dogs them a dog."
    assert Detokenizer(WORDPIECE, ids).push([4, 5]) == " dogs"


def test_spaces_between_special_tokens():
    """For a decoder that puts spaces between special tokens; the space before a word stays."""
    ids = [WORDPIECE.backend.token_to_id(t) for t in ("dog", "[SEP]", "[SEP]", "[SEP]", "the", "[SEP]")]
    for spaces, text in ((True, "dog [SEP] [SEP] [SEP] the [SEP]"), (False, "dog [SEP][SEP][SEP] the [SEP]")):
        shown = stream(Detokenizer(WORDPIECE, [], skip_special_tokens=False, spaces_between_special_tokens=spaces), ids)
        assert "".join(shown) == text


def test_decode_of_other_tokens():
    the = SENTENCEPIECE.backend.token_to_id("▁the")
    other = Detokenizer(SENTENCEPIECE, [])
    assert other.decode([1, the, the], True) == "the the" and other.decode([the], True) == " the"
    assert other.decode([1], True) == "" and other.decode([1], False) == "<s>"
    assert other.decode([SENTENCEPIECE.backend.token_to_id("<0xE6>")], False) == "\ufffd"
    assert Detokenizer(WORDPIECE, []).decode([4], True) == "dog"
    assert (other.text, other.num_tokens_kept) == ("", 0)


def test_ids_without_text_return_nothing():
    padded = Tokenizer(train_byte_level(), num_ids=512)
    for tokenizer in (padded, Tokenizer(make_wordpiece(), num_ids=512)):
        detokenizer = Detokenizer(tokenizer, [511], skip_special_tokens=False)
        assert detokenizer.push([500, 10**9, -1]) == ""
        assert detokenizer.num_tokens_kept == 3


def test_many_tokens_without_text_are_cheap():
    start = time.perf_counter()
    for tokenizer in (BYTE_LEVEL, WORDPIECE):
        detokenizer = Detokenizer(tokenizer, [])
        for _ in range(20_000):
            detokenizer.push([1])
    assert time.perf_counter() - start < 40  # decoding all pending tokens for each token would take minutes


# ---- stop strings


def bytewise(text: str) -> list[int]:
    """One token per byte."""
    inverse = {BYTE_LEVEL._piece_to_bytes(c): c for c in pre_tokenizers.ByteLevel.alphabet()}
    return [BYTE_LEVEL.backend.token_to_id(inverse[bytes([b])]) for b in text.encode()]


def test_stop_string_across_tokens_does_not_leak():
    detokenizer = Detokenizer(BYTE_LEVEL, [], stop=["END"])
    shown = [detokenizer.push([i]) for i in bytewise("aENbEND!more")]
    assert shown == ["a", "", "", "ENb", "", "", "", "", "", "", "", ""]
    assert detokenizer.stop_reason == "END"
    assert detokenizer.text == "aENb"
    assert detokenizer.num_tokens_kept == 7
    assert detokenizer.finish() == ""


def test_tokens_after_the_stop_in_the_same_call_do_not_count():
    detokenizer = Detokenizer(BYTE_LEVEL, [], stop=["b"])
    assert detokenizer.push(bytewise("abab")) == "a"
    assert detokenizer.num_tokens_kept == 2


@pytest.mark.parametrize(
    ("text", "stop", "shown", "reason"),
    [
        ("xabcdx", ["abcd", "bc"], "xa", "bc"),  # complete first
        ("xabcx", ["bc", "abc"], "x", "abc"),  # complete together: the longest
        ("xabx", ["ab", "abx"], "x", "ab"),
        ("aaab", ["aab"], "a", "aab"),  # overlaps itself
        ("ababac", ["abac"], "ab", "abac"),
        ("abababx", ["ababx"], "ab", "ababx"),
        ("aabaaabaaac", ["aabaaac"], "aaba", "aabaaac"),
        ("x🙂y", ["🙂"], "x", "🙂"),
        ("e\u0301x", ["\u0301"], "e", "\u0301"),
        ("\n\nUser:", ["\n\nUser:"], "", "\n\nUser:"),
        ("nothing", ["xyz"], "nothing", None),
    ],
)
def test_first_complete_then_longest_stop_string_wins(text, stop, shown, reason):
    for ids in (bytewise(text), BYTE_LEVEL.encode(text)):
        detokenizer = Detokenizer(BYTE_LEVEL, [], stop=stop)
        assert "".join(stream(detokenizer, ids)) == shown == detokenizer.text
        assert detokenizer.stop_reason == reason


def first_stop(text: str, stop: list[str]) -> tuple[str, str | None]:
    """Brute force: every start position in the text."""
    for end in range(1, len(text) + 1):
        complete = [s for s in stop if text[:end].endswith(s)]
        if complete:
            longest = max(complete, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(
    text=st.text("ab🙂", max_size=24),
    stop=st.lists(st.text("ab🙂", min_size=1, max_size=8), max_size=3),
    include=st.booleans(),
)
@example(text="abaababaabaab", stop=["abaababaabaab"[3:]], include=False)
def test_stop_strings_match_brute_force(text, stop, include):
    """One token per byte: stop strings may start and end inside a character."""
    detokenizer = Detokenizer(BYTE_LEVEL, [], stop=stop, include_stop=include)
    expected, reason = first_stop(text, stop)
    expected += reason if include and reason else ""
    ends = list(itertools.accumulate(len(char.encode()) for char in text))
    seen = ""
    for n, token_id in enumerate(bytewise(text), start=1):
        seen += detokenizer.push([token_id])
        assert expected.startswith(seen)  # no returned text is taken back
        if detokenizer.stop_reason is None:  # and none is held back needlessly
            held = text[len(seen) : bisect.bisect_right(ends, n)]
            assert held == "" or any(s.startswith(held) for s in stop)
    seen += detokenizer.finish()
    assert (seen, detokenizer.stop_reason) == (expected, reason)


@given(text=st.text("ab", max_size=12), stop=st.text("ab", min_size=1, max_size=3), min_tokens=st.integers(0, 8))
def test_stop_within_min_tokens_does_not_count(text, stop, min_tokens):
    """One token per character: the first occurrence that ends after the minimum wins, overlapping ones included."""
    detokenizer = Detokenizer(BYTE_LEVEL, [], stop=[stop], min_tokens=min_tokens)
    shown = "".join(stream(detokenizer, bytewise(text)))
    ends = [at for at in range(max(len(stop), min_tokens + 1), len(text) + 1) if text[:at].endswith(stop)]
    assert detokenizer.stop_reason == (stop if ends else None)
    assert shown == (text[: ends[0] - len(stop)] if ends else text)


@pytest.mark.parametrize("stop", [[""], ["a", ""], [None], [7]])
def test_invalid_stop_strings_are_rejected(stop):
    with pytest.raises(ParameterError, match="at least one character"):
        Detokenizer(BYTE_LEVEL, [], stop=stop)


@pytest.mark.shared
@pytest.mark.skipif(not STORIES.exists(), reason="shared/data is not there")
@given(text=texts)
def test_stories260k_streams_as_it_decodes(text):
    tokenizer = _stories()
    ids = tokenizer.encode(text, parse_special=False)
    detokenizer = Detokenizer(tokenizer, [])
    assert "".join(stream(detokenizer, ids)) == tokenizer.decode(ids) == text.replace("\ufdd0", "")


def _stories(cache: list[Tokenizer] = []) -> Tokenizer:  # noqa: B006 - one for all examples
    if not cache:
        cache.append(read(STORIES))
    return cache[0]


def test_time_per_token_does_not_grow_with_the_text() -> None:
    """Appending copied the text for every token, at four bytes per character with an emoji in it."""
    tokenizer = Tokenizer(train_byte_level())
    ids = tokenizer.encode("🙂" + " the" * 250_000)
    detokenizer = Detokenizer(tokenizer, [])
    start = time.process_time()
    for token_id in ids:
        detokenizer.push([token_id])
    assert time.process_time() - start < 5
    assert detokenizer.text == "🙂" + " the" * 250_000


def test_pending_bytes_are_bounded() -> None:
    """The library's stream decodes all pending tokens again for each token: 8,000 of them took 9 s."""
    tokenizer = Tokenizer(make_byte_fallback())
    assert not tokenizer.has_token_bytes
    detokenizer = Detokenizer(tokenizer, [])
    lead = tokenizer.backend.token_to_id("<0xE2>")
    shown = detokenizer.push([lead] * 500)
    assert len(shown) > 400 and set(shown) == {"\ufffd"}
    assert shown + detokenizer.finish() == detokenizer.text == "\ufffd" * 500
