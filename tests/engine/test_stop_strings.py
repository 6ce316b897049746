"""Stop strings: the right one, however the text is cut, at a cost that does not depend on them."""

import itertools
import random
import time

import pytest
from counting_executor import byte_tokenizer, make_engine, run

from nanoserve import SamplingParams
from nanoserve.engine.sequence import Sequence
from nanoserve.sampling_params import RequestOutputKind
from nanoserve.text.detokenizer import Detokenizer
from nanoserve.text.stop_strings import StopStrings


def naive_search(text: str, num_old: int, strings: list[str]) -> tuple[int, int] | None:
    """(Where it ends, index) of the string that begins first, of those that end in what is new."""
    found = [
        (begin, index, begin + len(string))
        for index, string in enumerate(strings)
        for begin in range(len(text))
        if text.startswith(string, begin) and begin + len(string) > num_old
    ]
    return min(found)[:0:-1] if found else None


def naive_held_back(text: str, strings: list[str]) -> int:
    return max(
        (n for s in strings for n in range(1, len(s)) if text.endswith(s[:n])),
        default=0,
    )


def cut(rng: random.Random, text: str) -> list[str]:
    borders = sorted(rng.randrange(len(text) + 1) for _ in range(rng.randrange(1, 8)))
    return [text[a:b] for a, b in itertools.pairwise([0, *borders, len(text)])]


@pytest.mark.parametrize("alphabet", ["a", "ab", "ab中", "abcdef\n"])
def test_random_strings_are_found_as_by_looking_everywhere(alphabet: str, full_size: bool) -> None:
    rng = random.Random(alphabet)
    num_found = 0
    for _ in range(5000 if full_size else 700):
        strings = [
            "".join(rng.choices(alphabet, k=rng.randrange(1, 7)))
            for _ in range(rng.randrange(1, 6))
        ]
        stops, state, text = StopStrings(tuple(strings)), 0, ""
        for piece in cut(rng, "".join(rng.choices(alphabet, k=rng.randrange(1, 40)))):
            state, found = stops.advance(state, piece)
            expected = naive_search(text + piece, len(text), strings)
            assert (found and (found[0] + len(text), found[1])) == expected, (strings, text, piece)
            text += piece
            assert stops.num_begun(state) == naive_held_back(text, strings), (strings, text)
            num_found += found is not None
    assert num_found > 100


class CountingDict(dict):
    """A state's ways on, which count how often they are asked."""

    num_asked = 0

    def __contains__(self, key: object) -> bool:
        CountingDict.num_asked += 1
        return super().__contains__(key)


@pytest.mark.parametrize(
    ("strings", "text"),
    [
        (["a" * 3000 + "b"], "a" * 20_000),
        (["ab" * 1000 + "c", "b" * 500], "ab" * 10_000),
        ([f"{n}x" for n in range(1000)], "0123456789" * 2000),
        (["a" * n + "b" for n in range(1, 120)], "a" * 20_000),
    ],
    ids=["one long", "two that repeat themselves", "many", "many that are ends of each other"],
)
def test_a_character_costs_two_moves_at_most(strings: list[str], text: str) -> None:
    stops = StopStrings(tuple(strings))
    stops._next = [CountingDict(ways) for ways in stops._next]
    CountingDict.num_asked, state = 0, 0
    for piece in (text[i : i + 5] for i in range(0, len(text), 5)):
        state, found = stops.advance(state, piece)
        assert found is None
    assert len(text) / 2 < CountingDict.num_asked <= 2 * len(text)


def seconds_to_stream(stop: list[str], num_tokens: int = 500) -> float:
    detokenizer = Detokenizer(byte_tokenizer())
    params = SamplingParams(stop=stop, max_tokens=None, output_kind=RequestOutputKind.DELTA)
    seq = Sequence("r", [1], params, max_model_len=10**6, eos_token_ids=frozenset())
    shown, start = "", time.perf_counter()
    for _ in range(num_tokens):
        seq.append(ord("x"))
        assert detokenizer.advance(seq) is None
        shown += detokenizer.text(seq)
    seconds = time.perf_counter() - start
    assert len(shown) == num_tokens - naive_held_back("x" * num_tokens, stop)
    return seconds


def test_long_stop_strings_and_many_cost_a_stream_no_more_than_short_ones() -> None:
    """Looking at each beginning of each string took a hundred times as long."""
    short = min(seconds_to_stream(["xy"]) for _ in range(3))
    for stop in (["x" * 16_000], [f"{n}zz" for n in range(1000)]):
        # To build it takes its time once, and is little for 500 tokens.
        assert min(seconds_to_stream(stop) for _ in range(3)) < 10 * short + 0.2


def test_requests_with_the_same_stop_strings_share_what_was_built_of_them(monkeypatch) -> None:
    built = []

    class Counted(StopStrings):
        def __init__(self, strings: tuple[str, ...]) -> None:
            built.append(strings)
            super().__init__(strings)

    monkeypatch.setattr("nanoserve.text.detokenizer.StopStrings", Counted)
    engine = make_engine(byte_tokenizer())
    for name in "abc":
        engine.add_request(name, name, SamplingParams(n=3, max_tokens=3, stop=["never", "seen"]))
    run(engine)
    assert built == [("never", "seen")]
    for n in range(40):
        engine.add_request(str(n), "a", SamplingParams(max_tokens=3, stop=[str(n)]))
    run(engine)
    detokenizer = engine.output_processor._detokenizer
    assert len(built) == 41 and len(detokenizer._stops) == 16 and not detokenizer._streams
