"""What is far too large is refused before it costs anything, and what is handed in is copied."""

import random
import sys
import unicodedata
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from counting_executor import VOCAB_SIZE, byte_tokenizer, make_engine, run
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as TokenizerBackend

from nanoserve import LLM, SamplingParams
from nanoserve.config import EngineConfig
from nanoserve.engine.guard import GuardedEngine
from nanoserve.engine.text_limit import TextLimit

MAX_MODEL_LEN = 512


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("tiny-qwen3", num_kv_blocks=100, max_model_len=MAX_MODEL_LEN) as llm:
        yield llm


@pytest.fixture
def blind(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> LLM:
    """An LLM whose tokenizer must not be asked."""

    def encode(*args: Any) -> list[int]:
        raise AssertionError("tokenized")

    monkeypatch.setattr(llm.engine.tokenizer, "encode", encode)
    monkeypatch.setattr(llm.engine.tokenizer, "encode_marked", encode, raising=False)
    return llm


# ---------------------------------------------------------------- prompts

LONG_TEXTS = {
    "words": "a b " * 200_000,
    "one word": "a" * 800_000,
    "spaces": " " * 800_000,
    "Chinese": "块表" * 400_000,
    "special tokens": "<|im_end|>" * 80_000,
}


@pytest.mark.parametrize("text", LONG_TEXTS.values(), ids=LONG_TEXTS)
def test_a_text_that_cannot_fit_is_refused_without_being_tokenized(blind: LLM, text: str) -> None:
    for ask in (
        lambda: blind.generate(text, use_tqdm=False),
        lambda: blind.generate({"prompt": text}, use_tqdm=False),
        lambda: blind.stream(text),
        lambda: blind.engine.add_request("r", text),
        lambda: blind.chat([{"role": "user", "content": text}], use_tqdm=False),
        lambda: blind.chat([{"role": "user", "content": ["x"]}], chat_template=f"{text}"),
    ):
        with pytest.raises(ValueError, match=r"characters; max_model_len=512 .* 511 tokens"):
            ask()
    assert not blind.engine.has_unfinished_requests()


def longest_tokens(llm: LLM) -> list[str]:
    """Texts that are one token each, the longest ones."""
    tokenizer = llm.engine.tokenizer
    ids = range(tokenizer.backend.get_vocab_size())
    texts = {tokenizer.decode([i], skip_special_tokens=False) for i in ids}
    single = [text for text in texts if text and len(tokenizer.encode(text)) == 1]
    return sorted(single, key=len)[-20:]


def test_no_text_that_fits_is_refused(llm: LLM) -> None:
    """Also of the longest tokens, and decomposed, which the normalizer makes shorter again."""
    tokenizer, limit = llm.engine.tokenizer, llm.engine.input_processor.text_limit
    longest = longest_tokens(llm)
    rng = random.Random(0)
    for _ in range(10):
        text = "".join(rng.choices(longest, k=MAX_MODEL_LEN * 2))
        while len(tokenizer.encode(text)) >= MAX_MODEL_LEN:
            text = text[: len(text) * 9 // 10]
        assert len(text) > 3000
        limit.check(text)
    special = "<|endoftext|>" * (MAX_MODEL_LEN - 1)
    assert len(tokenizer.encode(special)) == MAX_MODEL_LEN - 1
    limit.check(special)
    decomposed = unicodedata.normalize("NFD", "ᾂ" * 170)
    assert len(decomposed) == 680 and len(tokenizer.encode(decomposed)) < MAX_MODEL_LEN
    TextLimit(tokenizer.backend, len(tokenizer.encode(decomposed)) + 1).check(decomposed)


def test_unicodes_normal_forms_join_four_characters_at_most() -> None:
    characters = map(chr, (c for c in range(sys.maxunicode) if not 0xD800 <= c < 0xE000))
    lengths = {len(unicodedata.normalize("NFD", character)) for character in characters}
    assert max(lengths) == 4


BYTES = {symbol: i for i, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
FALLBACK = {f"<0x{byte:02X}>": byte for byte in range(256)}
WORD = {"Ġ": 300, "Ġa": 301}


def bpe(vocab: dict[str, int], normalizer: Any = None, pre: Any = None, **options: Any) -> Any:
    backend = TokenizerBackend(models.BPE(vocab=vocab, merges=[], **options))
    if normalizer is not None:
        backend.normalizer = normalizer
    if pre is not None:
        backend.pre_tokenizer = pre
    return backend


LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False)
SPACES = Regex(r"\s+")


@pytest.mark.parametrize(
    ("backend", "longest"),
    [
        (bpe(BYTES | WORD, pre=LEVEL), 2),
        (bpe(BYTES | WORD, normalizers.NFC(), LEVEL), 2),
        (
            bpe(
                BYTES | WORD,
                normalizers.Sequence([normalizers.NFKC()]),
                pre_tokenizers.Sequence([pre_tokenizers.Split(SPACES, "isolated"), LEVEL]),
            ),
            2,
        ),
        (bpe(FALLBACK | {"▁": 300}, normalizers.Replace(" ", "▁"), byte_fallback=True), 6),
        (bpe(FALLBACK, pre=pre_tokenizers.Metaspace(), byte_fallback=True), 6),
        # Each of these may lose something.
        (bpe(FALLBACK, byte_fallback=False), None),
        (bpe({**BYTES, **WORD}), None),
        (bpe({k: v for k, v in BYTES.items() if v != 7}, pre=LEVEL), None),
        (bpe(BYTES, normalizers.Strip(), LEVEL), None),
        (bpe(BYTES, normalizers.Replace("  ", " "), LEVEL), None),
        (bpe(BYTES, normalizers.Replace(SPACES, " "), LEVEL), None),
        (bpe(BYTES, normalizers.Sequence([normalizers.StripAccents()]), LEVEL), None),
        (
            bpe(BYTES, pre=pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), LEVEL])),
            None,
        ),
        (
            bpe(
                BYTES,
                pre=pre_tokenizers.Sequence([pre_tokenizers.Split(SPACES, "removed"), LEVEL]),
            ),
            None,
        ),
        (TokenizerBackend(models.WordLevel({"a": 1}, unk_token="a")), None),
    ],
)
def test_a_tokenizer_that_may_lose_text_has_no_limit(backend: Any, longest: int | None) -> None:
    limit = TextLimit(backend, 11)
    assert limit.most_characters(is_ascii=True) == (longest and 10 * longest)
    assert limit.most_characters(is_ascii=False) == (longest and 40 * longest)
    if longest is None:
        limit.check("x" * 10_000)
    else:
        with pytest.raises(ValueError, match="10000 characters"):
            limit.check("x" * 10_000)


def test_white_space_that_tokens_swallow_does_not_count() -> None:
    backend = bpe(BYTES | WORD, pre=LEVEL)
    backend.add_special_tokens([AddedToken("<u>", rstrip=True)])
    text = "<u>" + " \n\u3000" * 10_000 + "a" * 8
    assert len(backend.encode(text).ids) == 9
    limit = TextLimit(backend, 10)
    limit.check(text)
    with pytest.raises(ValueError, match="characters"):
        limit.check(text + "a" * 200)


def test_a_tokenizer_with_parts_in_python_has_no_limit() -> None:
    class Upper:
        def normalize(self, text: Any) -> None:
            text.uppercase()

    backend = bpe(BYTES, normalizers.Normalizer.custom(Upper()), LEVEL)
    assert TextLimit(backend, 10).most_characters(is_ascii=True) is None


class Ids(list):
    """Token ids that must not be looked at."""

    def __iter__(self) -> Iterator[int]:
        raise AssertionError("looked at")


@pytest.mark.parametrize("num_tokens", [512, 10_000_000])
def test_too_many_token_ids_are_counted_and_not_looked_at(num_tokens: int) -> None:
    engine = make_engine()
    ids = Ids([5]) * num_tokens if num_tokens < 10**6 else np.zeros(num_tokens, np.int8)
    for prompt in (ids, {"prompt_token_ids": ids}):
        with pytest.raises(ValueError, match=f"{num_tokens} tokens; max_model_len=512"):
            engine.add_request("r", Ids(ids) if isinstance(ids, list) else prompt)


# ---------------------------------------------------------------- conversations


def test_messages_that_are_too_long_together_are_refused_before_they_are_rendered(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llm.engine.tokenizer, "apply_chat_template", None)
    loop: list[Any] = []
    loop.append([loop, loop])
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    for told, messages in (
        ("1048576 characters", [{"role": "user", "content": "x" * 2**20}]),
        ("1048576 characters", [{"role": "user", "content": "x" * 2**10}] * 2**10),
        ("1048576 characters", [{"role": "user", "content": ""}] * 2**20),
        ("1048576 characters", [{"role": "user", "content": [{"x" * 2**20: 1}]}]),
        ("64 deep", [{"role": "user", "content": loop}]),
        ("64 deep", [{"role": "user", "content": deep}]),
    ):
        with pytest.raises(ValueError, match=told):
            llm.chat(messages, use_tqdm=False)
    with pytest.raises(ValueError, match="64 deep"):
        options = {"tools": [deep], "chat_template": "{{ tools }}"}
        llm.chat([{"role": "user", "content": "x"}], use_tqdm=False, **options)


def test_a_message_of_a_refused_conversation_is_not_shown_at_length(llm: LLM) -> None:
    with pytest.raises(ValueError) as caught:
        llm.chat([{"role": "user", "content": ["x" * 10_000]}], use_tqdm=False)
    assert len(str(caught.value)) < 1000


# ---------------------------------------------------------------- lists

LIMITS = [
    ("stop", ["x"] * 1024, ["x"] * 1025, "stop has 1025 entries; at most 1024"),
    ("stop", "x" * 16_384, "x" * 16_385, "stop has 16385 characters; together at most 16384"),
    ("stop", ["x" * 8192] * 2, ["x" * 8192] * 3, "stop has 24576 characters"),
    ("bad_words", ["x"] * 4096, ["x"] * 4097, "bad_words has 4097 entries; at most 4096"),
    ("bad_words", ["x" * 1024] * 64, [*["x" * 1024] * 64, "x"], "bad_words has 65537 characters"),
    ("bad_words", ["x" * 1024], ["x" * 1025], "bad_words has a string of 1025 characters; at most"),
    *(
        (name, [5] * 2**19, [5] * (2**19 + 1), f"{name} has 524289 entries; at most 524288")
        for name in ("stop_token_ids", "allowed_token_ids")
    ),
    (
        "logit_bias",
        dict.fromkeys(range(2**19), 1),
        dict.fromkeys(range(2**19 + 1), 1),
        "logit_bias has 524289 entries; at most 524288",
    ),
]


@pytest.mark.parametrize(("name", "good", "bad", "told"), LIMITS, ids=lambda value: str(value)[:20])
def test_lists_have_limits(name: str, good: Any, bad: Any, told: str) -> None:
    SamplingParams(**{name: good})
    with pytest.raises(ValueError, match=told):
        SamplingParams(**{name: bad})
    params = SamplingParams()
    setattr(params, name, bad)
    with pytest.raises(ValueError, match=told):
        make_engine(byte_tokenizer()).add_request("r", "abc", params)


def test_a_long_list_is_not_looked_at() -> None:
    for name in ("stop", "bad_words", "stop_token_ids", "allowed_token_ids"):
        with pytest.raises(ValueError, match="entries"):
            SamplingParams(**{name: Ids([None]) * 10**6})


def test_a_bad_value_is_not_shown_at_length() -> None:
    for name, value in (
        ("stop", [5] * 1000),
        ("logit_bias", [0] * 10**6),
        ("stop_token_ids", "5" * 9999),
    ):
        with pytest.raises(ValueError) as caught:
            SamplingParams(**{name: value})
        assert len(str(caught.value)) < 700


def test_texts_of_a_class_of_ones_own_are_plain_texts_afterwards() -> None:
    class Shouting(str):
        def __len__(self) -> int:
            return 1

        def __str__(self) -> str:
            return "loud"

    params = SamplingParams(stop=Shouting("quiet"), bad_words=[Shouting("quiet")])
    assert [type(text) for text in (params.stop, *params.bad_words)] == [str, str]
    assert params.stop == "quiet" and params.bad_words == ["quiet"]
    with pytest.raises(ValueError, match="stop has 16385 characters"):
        SamplingParams(stop=[Shouting("x" * 16_385)])


def to_the_end(engine: GuardedEngine) -> tuple[list[int], str]:
    (completion,) = run(engine)["r"].outputs
    return completion.token_ids, completion.text


CHANGES = {
    "stop": (["zz"], lambda stop: stop.append("d")),
    "bad_words": (["zz"], lambda words: words.append("d")),
    "stop_token_ids": ([7], lambda ids: ids.append(ord("d"))),
    "allowed_token_ids": (list(range(VOCAB_SIZE)), lambda ids: ids.clear()),
    "logit_bias": ({7: 1.0}, lambda bias: bias.update({10**6: 3.0})),
    "logits_processors": ([lambda ids, logits: logits], lambda functions: functions.append(None)),
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("when", ["before the request", "after it"])
def test_what_the_caller_does_to_his_lists_later_is_his_own_affair(name: str, when: str) -> None:
    value, change = CHANGES[name]
    mine = value.copy()
    params = SamplingParams(max_tokens=6, **{name: mine})
    engine, prompt = make_engine(byte_tokenizer()), [97, 98]
    if when == "before the request":
        change(mine)  # which the parameters have copied
    engine.add_request("r", prompt, params)
    if when == "after it":
        change(mine)
        change(getattr(params, name))
    prompt.append(5)
    (request,) = engine.output_processor.requests.values()
    assert getattr(request.params, name) == value
    assert getattr(request.sequences[0].params, name) == value
    assert to_the_end(engine) == ([99, 100, 101, 102, 103, 104], "cdefgh")


# ---------------------------------------------------------------- numpy's numbers

SMALL = [np.int8, np.uint8, np.int16, np.int32, np.uint32, np.int64, np.uint64]


@pytest.mark.parametrize("integer", SMALL)
def test_integers_of_any_size_are_pythons_afterwards(integer: type) -> None:
    names = ("top_k", "seed", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs", "n")
    params = SamplingParams(**{name: integer(2) for name in names})
    assert {type(getattr(params, name)) for name in names} == {int}
    config = EngineConfig("none", max_num_seqs=integer(4), block_size=integer(16))
    engine = make_engine(
        max_num_seqs=integer(2),
        max_num_batched_tokens=integer(100),
        max_model_len=integer(100),
        block_size=integer(4),
        scheduling_policy="priority",
    )
    for value in (*vars(config).values(), *vars(engine.config).values()):
        assert not isinstance(value, np.generic)
    greedy = SamplingParams(temperature=0, max_tokens=integer(100))
    engine.add_request("r", np.arange(60, dtype=integer), greedy, priority=integer(3))
    (sequence,) = engine.output_processor.requests["r"].sequences
    assert type(sequence.priority) is int and {*map(type, sequence.token_ids)} == {int}
    assert to_the_end(engine)[0] == [*range(60, 100)]


def test_the_largest_seed_is_kept() -> None:
    assert SamplingParams(seed=np.uint64(2**64 - 1)).seed == 2**64 - 1
    assert SamplingParams(seed=np.int8(-1)).seed == -1


@pytest.mark.parametrize("number", [np.float16, np.float32, np.float64])
def test_numbers_of_any_size_are_pythons_afterwards(number: type) -> None:
    names = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty")
    params = SamplingParams(**{name: number(0.5) for name in names}, logit_bias={1: number(2)})
    assert [type(getattr(params, name)) for name in names] == [float] * 5
    assert [type(value) for value in params.logit_bias.values()] == [float]
    with pytest.raises(ValueError, match="temperature="):
        SamplingParams(temperature=number("nan"))
    assert SamplingParams(temperature=np.float16(6e-8)).is_greedy
