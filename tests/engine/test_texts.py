"""Texts of random tokens with tokenizers of every kind: byte fallback, byte-level BPE, others.

Oracle: the tokenizers library decodes prompt and output together.
"""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from counting_executor import CountingExecutor, Handle, byte_tokenizer, make_engine
from real_tokenizers import MISTRAL, READ, mistral, vocabulary
from spm_tokenizers import FIRST_BYTE, FORMS, as_tokenizer, make_backend
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

import nanoserve
from nanoserve import RequestOutput, RequestOutputKind, SamplingParams
from nanoserve.engine.bad_words import BadWords
from nanoserve.engine.executor import StepResult
from nanoserve.engine.guard import GuardedEngine
from nanoserve.engine.sequence import Sequence, SequenceStatus
from nanoserve.outputs import TokenLogprobs
from nanoserve.text.detokenizer import Detokenizer
from nanoserve.text.tokenizer import Tokenizer

CUMULATIVE, DELTA, FINAL_ONLY = RequestOutputKind
UNKNOWN = "\ufffd"
PIECES = [
    "\U0001f600", "你", " a", "\n\n", "  x", "é", "\u200d", "<s>", "</s>", UNKNOWN, "\t", "yes no",
    "\U0001f468\u200d\U0001f469", "the Paris", "你好 x", "\r\n", "የ", "ខ្មែរ",
]  # fmt: skip


def wordpiece() -> Backend:
    """A decoder that is no sum: it writes spaces between words, and none before "##"."""
    words = ["[UNK]", "<s>", "</s>", "the", "##re", "do", "n't", "a", ",", ".", "##\ufffd"]
    model = models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]")
    backend = Backend(model)
    backend.decoder = decoders.WordPiece(cleanup=True)
    backend.add_special_tokens(["<s>", "</s>"])
    return backend


def old_metaspace() -> Backend:
    backend = make_backend("metaspace")
    backend.decoder = decoders.Metaspace("▁", "always", split=False)
    return backend


def bundled() -> Backend:
    folder = Path(nanoserve.__file__).parent / "checkpoint" / "tiny_qwen3"
    return Backend.from_file(str(next(folder.rglob("tokenizer.json"))))


SMALL = {form: lambda form=form: make_backend(form) for form in FORMS} | {
    "bytes": lambda: byte_tokenizer().backend,
    "bundled": bundled,
    "metaspace decoder": old_metaspace,
    "wordpiece": wordpiece,
}
REAL = {name: lambda name=name: mistral(name) for name in MISTRAL} | {
    name: lambda name=name: Tokenizer(vocabulary(name)).backend for name in READ
}


class Case:
    """Random tokens that follow a prompt, and every way to get their text."""

    def __init__(self, backend: Backend, rng: random.Random, pieces: list[list[int]]) -> None:
        self.rng, self.backend = rng, backend
        self.prompt = self._tokens(pieces, rng.randint(1, 6)) if rng.random() < 0.8 else [1]
        self.token_ids = self._tokens(pieces, rng.randint(1, 25))
        self.settings: dict[str, Any] = {"skip_special_tokens": rng.random() < 0.5}

    def _tokens(self, pieces: list[list[int]], length: int) -> list[int]:
        token_ids: list[int] = []
        size = self.backend.get_vocab_size()
        while len(token_ids) < length:
            kind = self.rng.random()
            if kind < 0.5:
                token_ids += self.rng.choice(pieces)[: self.rng.randint(1, 5)]
            else:
                token_ids.append(self.rng.randrange(size if kind < 0.75 else min(size, 300)))
        return token_ids[:length]

    def decode(self, token_ids: list[int]) -> str:
        skip = self.settings["skip_special_tokens"]
        return self.backend.decode(token_ids, skip_special_tokens=skip)

    def run(
        self, detokenizer: Detokenizer, kind: RequestOutputKind, most: int = 1, **more: Any
    ) -> tuple[str, int | str | None]:
        """The text, and the stop string that ended it; steps bring up to `most` tokens each."""
        params = SamplingParams(
            max_tokens=len(self.token_ids), output_kind=kind, **self.settings, **more
        )
        seq = Sequence("r", list(self.prompt), params, 10**6)
        text = ""
        while not seq.finished:
            num = self.rng.randint(1, most)
            seq.token_ids += self.token_ids[seq.num_output_tokens :][:num]
            stop = detokenizer.advance(seq)
            if stop is not None or seq.num_output_tokens == len(self.token_ids):
                seq.status, seq.stop_reason = SequenceStatus.FINISHED, stop
            if seq.finished or kind is not FINAL_ONLY:
                new = detokenizer.text(seq)
                shown = text + new if kind is DELTA else new
                assert shown.startswith(text), "what was shown is taken back"
                text = shown
        return text, seq.stop_reason

    def check(self, detokenizer: Detokenizer, is_sum: bool) -> None:
        final, _ = self.run(detokenizer, FINAL_ONLY)
        for kind in (DELTA, CUMULATIVE):
            for most in (1, 4):
                assert self.run(detokenizer, kind, most) == (final, None)
        before, whole = self.decode(self.prompt), self.decode(self.prompt + self.token_ids)
        if is_sum and UNKNOWN not in before and whole.startswith(before):
            assert before + final == whole
        if len(final) > 3:
            self.check_stop(detokenizer, final)

    def check_stop(self, detokenizer: Detokenizer, final: str) -> None:
        begin = self.rng.randrange(len(final) - 1)
        stop = final[begin : begin + self.rng.randint(1, 3)]
        found = {
            self.run(detokenizer, kind, most, stop=stop)
            for kind in (FINAL_ONLY, DELTA, CUMULATIVE)
            for most in (1, 4)
        }
        assert len(found) == 1
        ((text, reason),) = found
        # Bytes that never became a character are known as such only at the end.
        if UNKNOWN not in final:
            assert (text, reason) == (final[: final.index(stop)], stop)


def check_cases(backend: Backend, num_cases: int, is_sum: bool = True) -> None:
    detokenizer, rng = Detokenizer(as_tokenizer(backend)), random.Random(3)
    pieces = [backend.encode(text, add_special_tokens=False).ids or [0] for text in PIECES]
    for number in range(num_cases):
        case = Case(backend, rng, pieces)
        try:
            case.check(detokenizer, is_sum)
        except Exception as error:
            raise AssertionError(f"{number}: {case.prompt}, {case.token_ids}") from error
    assert not detokenizer._streams


@pytest.mark.parametrize("name", SMALL)
def test_streams_and_stop_strings_agree_with_the_whole_text(
    name: str, by_size: Callable[..., int]
) -> None:
    check_cases(SMALL[name](), by_size(200, 3000, 10_000), is_sum=name != "wordpiece")


@pytest.mark.size("full")
@pytest.mark.parametrize("name", REAL)
def test_the_same_with_tokenizers_of_real_models(name: str, by_size: Callable[..., int]) -> None:
    check_cases(REAL[name](), by_size(200, 2000, 10_000))


# -- Byte tokens --------------------------------------------------------------------------------

BACKEND = make_backend()
NEWLINE = FIRST_BYTE + 0x0A


def ids(text: str) -> list[int]:
    """Tokens of what stands within a text."""
    before, whole = (BACKEND.encode(t, add_special_tokens=False).ids for t in ("x", "x" + text))
    return whole[len(before) :]


def byte_ids(content: bytes) -> list[int]:
    return [FIRST_BYTE + byte for byte in content]


class Scripted(CountingExecutor):
    """The request whose seed is s gets the tokens `scripts[s]`, and log-probabilities if asked."""

    scripts: dict[int, list[int]]
    prompt_length = 1

    def collect(self, handle: Handle) -> StepResult:
        batch, num = handle.batch, handle.batch.header.num_sampled
        changes = {change.slot: change for change in self.sampling}
        found, asked = [], 0
        for slot, position in zip(
            batch.output_slots[:num].tolist(),
            batch.positions[batch.output_rows[:num]].tolist(),
            strict=True,
        ):
            change = changes[slot]
            script = self.scripts[change.seed]
            found.append([script[(position + 1 - self.prompt_length) % len(script)]])
            asked += change.params.logprobs is not None
        chosen = np.repeat(np.array(found), 2, axis=1)  # all ask for log-probabilities, or nobody
        values = TokenLogprobs(chosen, np.full(chosen.shape, -1.0), np.ones(len(found)))
        return StepResult(found, values if asked else None, [(row, 0) for row in range(num)])


def make_scripted(backend: Backend, scripts: dict[int, list[int]]) -> GuardedEngine:
    engine = make_engine(as_tokenizer(backend, None), num_kv_blocks=64)
    engine.input_processor.vocab_size = 1000
    executor = Scripted(engine.config, 64)
    executor.scripts = scripts
    engine.replace_executor(executor)
    return engine


def run_all(engine: GuardedEngine) -> dict[str, list[RequestOutput]]:
    outputs: dict[str, list[RequestOutput]] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
    return outputs


BROKEN = {
    "line end, half a character": ([NEWLINE, *byte_ids(b"\xf0"), *ids(" the")], "�� the"),
    "line end, a whole one": ([NEWLINE, *byte_ids("😀".encode()), *ids(" the")], "\n😀 the"),
    "half a character": ([*byte_ids(b"\xf0"), *ids(" the")], "� the"),
    "line end, cut": ([NEWLINE, *byte_ids(b"\xe4\xbd"), *ids(" the")], "��� the"),
    "two, the second one cut": ([*byte_ids("😀😀".encode()[:6]), *ids(" a")], "������ a"),
    "at the end": ([*ids(" a"), *byte_ids(b"\t\xe4")], " a��"),
    "a special token between": ([*byte_ids(b"\xf0\x9f"), 2, *byte_ids(b"\x98\x80")], "😀"),
}


@pytest.mark.parametrize("kind", list(RequestOutputKind))
@pytest.mark.parametrize("name", BROKEN)
def test_broken_characters_are_no_error(name: str, kind: RequestOutputKind) -> None:
    """DecodeStream raises "Invalid prefix encountered" at some of these."""
    token_ids, text = BROKEN[name]
    settings = {"max_tokens": len(token_ids), "output_kind": kind}
    engine = make_scripted(BACKEND, {0: token_ids})
    engine.add_request("plain", [FIRST_BYTE + 65], SamplingParams(seed=0, **settings))
    engine.add_request("stop", [FIRST_BYTE + 65], SamplingParams(seed=0, stop="zzz", **settings))
    for outputs in run_all(engine).values():
        pieces = [output.outputs[0].text for output in outputs]
        assert (pieces[-1] if kind is not DELTA else "".join(pieces)) == text
        assert outputs[-1].outputs[0].finish_reason == "length"


def test_a_line_end_that_is_a_byte_ends_an_answer_at_once() -> None:
    """A stream shows it one token later, because a byte behind it may still change it."""
    token_ids = [*ids(" a"), NEWLINE, *ids(" the")]
    engine = make_scripted(BACKEND, {0: token_ids})
    params = {"seed": 0, "max_tokens": 3, "output_kind": DELTA}
    engine.add_request("stream", [FIRST_BYTE + 65], SamplingParams(**params))
    engine.add_request("stop", [FIRST_BYTE + 65], SamplingParams(stop="\n", **params))
    early = SamplingParams(stop="\n", min_tokens=2, **params)  # it is completed too early to count
    engine.add_request("min_tokens", [FIRST_BYTE + 65], early)
    outputs = run_all(engine)
    assert [o.outputs[0].text for o in outputs["stream"]] == [" a", "", "\n the"]
    last = outputs["stop"][-1].outputs[0]
    assert (last.finish_reason, last.stop_reason) == ("stop", "\n")
    assert "".join(o.outputs[0].text for o in outputs["stop"]) == " a"
    assert sum(len(o.outputs[0].token_ids) for o in outputs["stop"]) == 2
    assert outputs["min_tokens"][-1].outputs[0].finish_reason == "length"


@pytest.mark.parametrize("script", ["你ខ", "\n"])
def test_a_text_of_nothing_but_bytes_is_streamed(script: str) -> None:
    """Whole characters are held back, but not for ever; if a byte breaks then, they stay."""
    token_ids = [*byte_ids(script.encode() * 40), *byte_ids(b"\xf0"), *ids(" a")]
    engine = make_scripted(BACKEND, {0: token_ids})
    params = SamplingParams(seed=0, max_tokens=len(token_ids), output_kind=DELTA)
    engine.add_request("stream", [FIRST_BYTE + 65], params)
    engine.add_request(
        "whole", [FIRST_BYTE + 65], SamplingParams(seed=0, max_tokens=len(token_ids))
    )
    outputs = run_all(engine)
    text, num_tokens = "", 0
    for output in outputs["stream"]:
        text += output.outputs[0].text
        num_tokens += len(output.outputs[0].token_ids)
        assert len(text.encode()) >= min(num_tokens, 40 * len(script.encode())) - 36
    assert text == outputs["whole"][-1].outputs[0].text
    assert text.startswith(script * 20) and text.endswith(UNKNOWN + " a")


# -- What stands before an output ---------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("prompt", "rest"),
    [
        ("the", " Paris."),
        ("def the:\n", "    return a"),
        ("x [", " 1, 2"),
        ("x", "é 你"),
        ("a ", "x"),
    ],
)
def test_an_output_continues_its_prompt(form: str, prompt: str, rest: str) -> None:
    backend = make_backend(form)
    before = backend.encode(prompt).ids
    whole = backend.encode(prompt + rest).ids
    assert whole[: len(before)] == before
    for settings in ({}, {"stop": "zzz"}, {"output_kind": DELTA}, {"skip_special_tokens": False}):
        engine = make_scripted(backend, {0: whole[len(before) :]})
        engine.executor.prompt_length = len(before)
        params = SamplingParams(seed=0, max_tokens=len(whole) - len(before), n=2, **settings)
        engine.add_request("r", before, params)
        texts = ["", ""]
        for output in run_all(engine)["r"]:
            for completion in output.outputs:
                is_delta = params.output_kind is DELTA
                texts[completion.index] = texts[completion.index] * is_delta + completion.text
        assert texts == [rest, rest]


def text_after(prompt: list[int], token_ids: list[int], **settings: Any) -> str:
    detokenizer = Detokenizer(as_tokenizer(BACKEND))
    seq = Sequence("r", prompt + token_ids, SamplingParams(**settings), 10**6)
    seq.num_prompt_tokens, seq.status = len(prompt), SequenceStatus.FINISHED
    return detokenizer.text(seq)


def test_special_tokens_are_a_beginning_where_they_are_skipped() -> None:
    """As decode(prompt + output) has it. A chat's prompt has more: its answer begins with a space,
    if the model wrote one, as in vLLM."""
    yes = ids(" yes")
    assert text_after([1], yes) == text_after([1, 3, 3], yes) == "yes"
    assert text_after([1], yes, skip_special_tokens=False) == " yes"
    assert (
        text_after([1, *ids("[a]"), 3], yes)
        == text_after([*ids("x"), 1, 2, 3, 3, 1], yes)
        == " yes"
    )
    assert text_after([999, 998], yes) == "yes"  # ids beyond the vocabulary have no text


def test_a_character_that_the_prompt_begins_is_finished_by_the_output() -> None:
    emoji = byte_ids("😀".encode())
    assert text_after([*ids("a"), *emoji[:2]], [*emoji[2:], *ids(" a")]) == "😀 a"
    assert text_after([*ids("a"), *emoji[:2]], ids(" a")) == " a"  # its U+FFFD are the prompt's
    assert text_after([*emoji, NEWLINE], [FIRST_BYTE + 65]) == "A"


# -- One text's error ---------------------------------------------------------------------------


class Mishap(Exception):
    """What nobody could expect."""


@pytest.fixture
def cursed(monkeypatch: pytest.MonkeyPatch) -> int:
    """A token of which no text can be made."""
    token_id = BACKEND.token_to_id("▁Paris")
    from nanoserve.text.incremental_decoder import TokenTexts

    text_of = TokenTexts._text_of

    def fail(self: TokenTexts, wanted: int, *how: bool) -> str:
        if wanted == token_id:
            raise Mishap
        return text_of(self, wanted, *how)

    monkeypatch.setattr(TokenTexts, "_text_of", fail)
    return token_id


@pytest.mark.parametrize("kind", list(RequestOutputKind))
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("settings", [{}, {"stop": "zzz"}, {"logprobs": 1}], ids=str)
@pytest.mark.parametrize("at", [1, 3])
def test_what_one_text_raises_ends_its_request_alone(
    kind: RequestOutputKind, n: int, settings: dict[str, Any], at: int, cursed: int
) -> None:
    good = ids(" the a yes no")
    engine = make_scripted(BACKEND, {0: good, 1: [*good[:at], cursed, *good]})
    params = {"n": n, "max_tokens": at + 1 if at == 1 else 6, "output_kind": kind} | settings
    for name, seed in (("before", 0), ("bad", 1), ("behind", 0)):
        engine.add_request(name, [FIRST_BYTE + 65], SamplingParams(seed=seed, **params))
    outputs = run_all(engine)
    for name in ("before", "behind"):
        last = outputs[name][-1]
        assert last.finished and last.error is None
        assert {c.finish_reason for c in last.outputs} == {"length"}
    last = outputs["bad"][-1]
    assert last.finished and isinstance(last.error, Mishap)
    assert sum(output.finished for output in outputs["bad"]) == 1
    reasons = {c.index: c.finish_reason for output in outputs["bad"] for c in output.outputs}
    assert set(reasons) == set(range(n)) and "error" in reasons.values()
    assert set(reasons.values()) == {"error"}
    assert not engine.output_processor.requests
    assert not engine.output_processor._detokenizer._streams


def test_what_the_text_raises_while_a_request_is_aborted_is_its_error(cursed: int) -> None:
    engine = make_scripted(BACKEND, {1: [cursed]})
    params = SamplingParams(seed=1, max_tokens=9, output_kind=FINAL_ONLY)
    engine.add_request("bad", [FIRST_BYTE + 65], params)
    engine.step()
    output = engine.abort_request("bad")
    assert output.finished and isinstance(output.error, Mishap)
    assert not engine.has_unfinished_requests()


def test_the_logprobs_of_tokens_add_up_to_the_text() -> None:
    token_ids = ids(" the Paris[1]")
    engine = make_scripted(BACKEND, {0: token_ids})
    params = SamplingParams(seed=0, max_tokens=len(token_ids), logprobs=1)
    engine.add_request("r", [FIRST_BYTE + 65], params)
    completion = run_all(engine)["r"][-1].outputs[0]
    texts = [
        entry[i].decoded_token
        for i, entry in zip(completion.token_ids, completion.logprobs, strict=True)
    ]
    assert "".join(texts) == completion.text == " the Paris[1]"
    assert json.dumps(texts)  # no lone surrogates
    detokenizer = Detokenizer(as_tokenizer(BACKEND))
    assert detokenizer.text_of_token(FIRST_BYTE + 0xF0) == UNKNOWN
    assert detokenizer.text_of_token(NEWLINE) == "\n"


# -- Bad words ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*FORMS, "bundled"])
def test_bad_words_are_found_behind_whatever_stands_before_them(name: str) -> None:
    """Whichever way the text is cut, its tokens end with a sequence that is held off."""
    backend = SMALL[name]()
    bad_words = BadWords(as_tokenizer(backend))
    for word in ("Paris", "the Paris", "é", "你好", "</s>", "cache", " is", "x1"):
        held_off = bad_words.sequences([word, "never"])
        for before in (
            "",
            "x ",
            "x\n",
            "(",
            " [",
            ' "',
            "- ",
            "\n\n",
            "\t",
            "* ",
            "**",
            "1. ",
            "> ",
        ):
            token_ids = backend.encode(before + word, add_special_tokens=False).ids
            ends = [token_ids[-len(sequence) :] == sequence for sequence in held_off]
            assert any(ends), (word, before)
        again = bad_words.sequences(["never", word, word])  # from what is known by now
        assert sorted(again) == sorted(held_off)


def test_other_words_are_not_held_off() -> None:
    held_off = BadWords(as_tokenizer(BACKEND)).sequences(["Paris"])
    assert held_off == [[BACKEND.token_to_id("▁Paris")], [BACKEND.token_to_id("Paris")]]
