"""Stage 9: the complete engine."""

import random
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from itertools import takewhile

import pytest
from tokenizers import Tokenizer

from .compare import CHECKPOINT
from .stages import QUESTION, naive_tokens, stage
from .your_engine import Config, Engine, Sequence, until_stop

ANSWER = "The KV cache keeps the keys and values of all earlier tokens in every layer,"


@cache
def engine() -> Engine:
    """One engine for all tests: each must leave it empty."""
    return Engine(CHECKPOINT, Config(num_blocks=40, block_size=4, max_num_seqs=3, budget=32))


@pytest.fixture(autouse=True)
def what_a_failed_test_left_is_aborted() -> Iterator[None]:
    yield
    if engine.cache_info().currsize:
        for seq in [*engine().scheduler.running, *engine().scheduler.waiting]:
            engine().abort(seq)


def texts_of(*sequences: Sequence) -> list[str]:
    """Step until these have ended; return their pieces, joined."""
    texts = dict.fromkeys(sequences, "")
    for _ in range(500):
        if all(seq.finish_reason for seq in sequences):
            return list(texts.values())
        for seq, piece in engine().step().items():
            texts[seq] += piece
    raise AssertionError(f"500 steps were not enough for {sequences}")


def until_eos(seq: Sequence, tokens: list[int]) -> list[int]:
    """The part of `tokens` that is appended to `seq`."""
    return list(takewhile(lambda token: token not in seq.eos, tokens))


@pytest.mark.parametrize(
    ("text", "stops", "is_over", "expected"),
    [
        ("Answer: 42", (), False, ("Answer: 42", None)),
        ("Answer: 42", ("swer",), False, ("An", "swer")),
        ("Answ", ("swer",), False, ("An", None)),
        ("Answ", ("swer",), True, ("Answ", None)),
        ("abxab", ("abab", "xabc"), False, ("ab", None)),
        ("aabb", ("bb", "ab"), True, ("a", "ab")),
        ("one stop two stop", ("stop",), True, ("one ", "stop")),
    ],
)
@stage(9)
def test_text_up_to_a_stop_string(
    text: str, stops: tuple[str, ...], is_over: bool, expected: tuple[str, str | None]
) -> None:
    assert until_stop(text, stops, is_over) == expected, f"until_stop({text!r}, {stops}, {is_over})"


@pytest.mark.parametrize("length", [0, 160, 500])
@stage(9)
def test_a_prompt_that_cannot_run_is_rejected(length: int) -> None:
    with suppress(ValueError):
        engine().add([1] * length)
        raise AssertionError(
            f"add([1] * {length}) raised no ValueError, where 160 tokens fit in all"
        )
    assert not engine().scheduler.waiting, f"a prompt of {length} tokens, where 160 fit in all"


@stage(9)
def test_it_answers() -> None:
    (text,) = texts_of(engine().add(QUESTION))
    assert text.startswith(ANSWER), f"{QUESTION!r} was answered {text!r}"


@stage(9)
def test_chat_renders_the_template() -> None:
    pieces = list(engine().chat("What is a KV cache?"))
    assert "".join(pieces).startswith(ANSWER), f"chat('What is a KV cache?') gave {pieces}"
    assert len(pieces) > 20, f"a piece for each step: {pieces}"


@stage(9)
def test_the_end_of_a_message_ends_the_answer() -> None:
    seq = engine().add(QUESTION, max_tokens=110)
    (text,) = texts_of(seq)
    assert seq.finish_reason == "stop", f"{QUESTION!r} with room for 110 tokens gave {text!r}"
    assert seq.token_ids[-1] not in seq.eos, f"EOS is in {seq.token_ids}"
    assert text.endswith("."), f"an answer is a sentence: {text!r}"


@stage(9)
def test_requests_that_share_steps_get_what_they_get_alone() -> None:
    """More than may run at once and than fit into the pool: some wait, some are preempted."""
    rng = random.Random(0)
    prompts = [[300 + i, *range(400, 400 + rng.randint(1, 40))] for i in range(8)]
    sequences = [engine().add(prompt, max_tokens=20) for prompt in prompts]
    texts_of(*sequences)
    for prompt, seq in zip(prompts, sequences, strict=True):
        expected = until_eos(seq, naive_tokens(tuple(prompt), 20))
        case = f"the tokens after {prompt}, one of {prompts}"
        assert seq.token_ids[len(prompt) :] == expected, case


@stage(9)
def test_a_prompt_may_begin_with_blocks_of_the_same_step() -> None:
    """The row of the second one, one token, comes first, and reads what the first computes."""
    long, short = [*range(600, 620)], [*range(600, 616), 7]
    sequences = [engine().add(prompt, max_tokens=6) for prompt in (long, short)]
    texts_of(*sequences)
    for prompt, seq in zip((long, short), sequences, strict=True):
        expected = until_eos(seq, naive_tokens(tuple(prompt), 6))
        case = f"the tokens after {prompt}; {long} and {short} arrived together"
        assert seq.token_ids[len(prompt) :] == expected, case


@pytest.mark.parametrize("stop", ["values", "and v", "KV", " of all"])
@stage(9)
def test_a_stop_string_ends_the_text_before_it(stop: str) -> None:
    first = engine().add(QUESTION)
    (whole,) = texts_of(first)
    seq = engine().add(QUESTION, stop=(stop, "never seen"))
    (text,) = texts_of(seq)
    assert text == whole[: whole.index(stop)], f"stop {stop!r} in {whole!r}"
    assert seq.finish_reason == "stop", f"stop {stop!r}"
    # "and v" ends in the middle of a token, " values", which is the last one all the same.
    decode, tokens = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json")).decode, seq.token_ids
    right = next(n for n in range(99) if stop in decode(first.token_ids[first.num_prompt :][:n]))
    found = len(tokens) - seq.num_prompt
    assert found == right, f"{found} tokens until stop {stop!r} in {whole!r}, right {right}"
    assert not engine().scheduler.running and seq.block_table == [], f"after stop {stop!r}"


@stage(9)
def test_a_stop_string_on_the_last_token_is_the_reason() -> None:
    """The token that reaches the maximum length also completes the stop string."""
    first = engine().add(QUESTION, stop=("keys",))
    texts_of(first)
    num_tokens = len(first.token_ids) - first.num_prompt
    seq = engine().add(QUESTION, max_tokens=num_tokens, stop=("keys",))
    (text,) = texts_of(seq)
    case = f"add({QUESTION!r}, max_tokens={num_tokens}, stop=('keys',))"
    assert text == "The KV cache keeps the ", case
    assert seq.finish_reason == "stop", f"{case}: the last of the tokens makes 'keys'"


@stage(9)
def test_characters_are_never_returned_in_halves() -> None:
    """The answer has Chinese in it, whose characters are several tokens each."""
    pieces = list(engine().chat("什么是KV缓存？"))
    case = f"chat('什么是KV缓存？') gave {pieces}"
    assert any("\u4e00" <= character <= "\u9fff" for character in "".join(pieces)), case
    assert "\ufffd" not in "".join(pieces), f"half a character: {case}"


@stage(9)
def test_half_a_character_is_returned_at_the_end() -> None:
    """Nothing is held back at the end: the pieces are the text of all tokens."""
    tokenizer = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
    prompt = QUESTION.replace("What is a KV cache?", "什么是KV缓存？")
    num_halves = 0
    for num_tokens in range(18, 26):
        seq = engine().add(prompt, max_tokens=num_tokens)
        (text,) = texts_of(seq)
        right = tokenizer.decode(seq.token_ids[seq.num_prompt :])
        assert text == right, f"the text of add({prompt!r}, max_tokens={num_tokens})"
        num_halves += text.endswith("\ufffd")
    assert num_halves, f"18 to 25 tokens after {prompt!r}: one of these ends is half a character"


@stage(9)
def test_closing_the_generator_of_chat_aborts() -> None:
    pieces = engine().chat("What is a KV cache?")
    next(pieces)
    pieces.close()
    case = "pieces = chat('What is a KV cache?'); next(pieces); pieces.close()"
    left = len(engine().scheduler.running) + len(engine().scheduler.waiting)
    assert left == 0, f"{case}: {left} requests are left"


@stage(9)
def test_an_aborted_request_leaves_nothing() -> None:
    first, second = engine().add(QUESTION), engine().add([5, 6, 7], max_tokens=5)
    for _ in range(3):
        engine().step()
    engine().abort(first)
    assert (first.finish_reason, first.block_table) == ("abort", []), "aborted after 3 steps"
    texts_of(second)
    engine().abort(second)
    assert second.finish_reason != "abort", "it had ended before it was aborted"
    assert engine().step() == {}, "nothing is left to do"


@stage(9)
def test_a_request_ends_where_the_pool_does() -> None:
    """Otherwise it needs a block that can never be free, and preempts itself forever."""
    seq, num_steps = engine().add([5] * 150, max_tokens=100), 0
    seq.eos = frozenset()  # so that only the length ends it
    while not seq.finish_reason and num_steps < 50:
        engine().step()
        num_steps += 1
    case = "add([5] * 150, max_tokens=100) in a pool of 160 tokens, no token is EOS"
    found = (seq.finish_reason, len(seq.token_ids))
    assert found == ("length", 160), f"reason and tokens after {num_steps} steps: {case}"


@stage(9)
def test_a_seeded_request_gets_the_same_tokens_in_any_batch() -> None:
    sampling = {"temperature": 1.5, "seed": 11, "top_k": 50}
    alone = engine().add(QUESTION, max_tokens=15, **sampling)
    texts_of(alone)
    others = [engine().add([9] * n, max_tokens=10) for n in (30, 3)]
    again = engine().add(QUESTION, max_tokens=15, **sampling)
    texts_of(again, *others)
    assert again.token_ids == alone.token_ids, f"{sampling}, alone and beside two others"
