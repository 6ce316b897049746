"""The drafts of n-gram and suffix proposers, against plain searches."""

import random
from typing import Any

import pytest

from nanoserve import SamplingParams
from nanoserve.engine.sequence import Sequence
from nanoserve.features.speculative.config import SpeculativeConfig
from nanoserve.features.speculative.ngram import NgramProposer
from nanoserve.features.speculative.suffix import SuffixProposer


def sequence(token_ids: list[int], num_prompt_tokens: int = 1, **fields: Any) -> Sequence:
    seq = Sequence("r", token_ids[:num_prompt_tokens], SamplingParams(), 10_000, **fields)
    seq.token_ids += token_ids[num_prompt_tokens:]
    return seq


def searched(token_ids: list[int], shortest: int, longest: int, most: int) -> list[int]:
    """Return the same, by looking everywhere."""
    for n in range(longest, shortest - 1, -1):
        for end in range(len(token_ids) - 1, n - 1, -1):
            if token_ids[end - n : end] == token_ids[-n:]:
                text = list(token_ids)
                for i in range(most):
                    text.append(text[end + i])
                return text[len(token_ids) :]
    return []


def test_ngrams_are_those_that_a_search_finds() -> None:
    rng = random.Random(0)
    found = 0
    for _ in range(300):
        shortest = rng.randint(1, 4)
        longest = rng.randint(shortest, 5)
        proposer = NgramProposer(shortest, longest)
        vocab = rng.choice([1, 2, 5, 30])
        seq = sequence([rng.randrange(vocab) for _ in range(rng.randint(1, 40))])
        for _ in range(30):
            most = rng.randint(1, 6)
            expected = searched(seq.token_ids, shortest, longest, most)
            assert proposer.draft(seq, most) == expected
            found += bool(expected)
            seq.token_ids += [rng.randrange(vocab) for _ in range(rng.randint(0, 3))]
        proposer.forget(seq)
        assert not proposer._indexes
    assert found > 1000


def test_tokens_that_were_taken_back_are_forgotten() -> None:
    proposer = NgramProposer(1, 2)
    seq = sequence([1, 2, 3, 1, 2, 9, 9, 9])
    proposer.draft(seq, 3)
    del seq.token_ids[5:]
    assert proposer.draft(seq, 3) == [3, 1, 2]


SUFFIX = SpeculativeConfig("suffix")


def test_a_suffix_is_followed_where_the_longest_match_goes() -> None:
    proposer = SuffixProposer(SUFFIX)
    #                      a longer match       a later, shorter one
    seq = sequence([1, 2, 3, 4, 5, 6, 7, 8, 0, 9, 3, 4, 5, 77, 0, 1, 2, 3, 4, 5])
    assert proposer.draft(seq, 3) == [6, 7, 8]


def test_the_most_frequent_continuation_wins_and_the_unlikely_end() -> None:
    proposer = SuffixProposer(SpeculativeConfig("suffix", suffix_decoding_min_token_prob=0.5))
    text = [1, 2, 3, 10, 20, 1, 2, 3, 10, 30, 1, 2, 3, 11, 40, 9, 1, 2, 3]
    # Two of three go on with 10: two thirds. Then it is one third for either, which is too little.
    assert proposer.draft(sequence(text), 5) == [10]


def test_finished_requests_are_searched_too() -> None:
    proposer = SuffixProposer(SUFFIX)
    first = sequence([5, 1, 2, 3, 4, 5, 6, 7])
    proposer.forget(first)
    assert proposer.draft(sequence([8, 8, 1, 2, 3]), 8) == [4, 5, 6]  # as long as the match
    assert proposer.draft(sequence([8, 8, 5, 1, 2]), 8) == []  # prompts are not kept


def test_finished_requests_of_another_salt_are_not() -> None:
    """A request that is answered faster would learn what others have got."""
    proposer = SuffixProposer(SUFFIX)
    proposer.forget(sequence([5, 1, 2, 3, 4, 5, 6, 7], cache_key=("cache_salt", "a")))
    assert proposer.draft(sequence([8, 8, 1, 2, 3]), 8) == []
    assert proposer.draft(sequence([8, 1, 2, 3], cache_key=("cache_salt", "b")), 8) == []
    assert proposer.draft(sequence([8, 1, 2, 3], cache_key=("cache_salt", "a")), 8) == [4, 5, 6]


@pytest.mark.parametrize(("kept", "expected"), [(0, []), (4, [4, 5, 6])])
def test_finished_requests_are_bounded(kept: int, expected: list[int]) -> None:
    config = SpeculativeConfig("suffix", suffix_decoding_max_cached_requests=kept)
    proposer = SuffixProposer(config)
    for first in range(100, 1000, 10):
        proposer.forget(sequence([0, *range(first, first + 8)]))
    proposer.forget(sequence([5, 1, 2, 3, 4, 5, 6, 7]))
    assert proposer.draft(sequence([8, 8, 1, 2, 3]), 8) == expected
    assert proposer.draft(sequence([8, 100, 101, 102]), 8) == []  # long gone
    indexes = [i for f in proposer._finished.values() for i in (f._older, f._newer)]
    assert sum(len(index._ends) for index in indexes) <= kept * 8
