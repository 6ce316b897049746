"""Suffix decoding (Oliaro et al. 2024) drafts what most often followed the longest match.

Agents send similar requests again and again, and long stretches of their outputs are the same. So
matches are searched in the outputs of finished requests, too. Of all earlier
occurrences of the last tokens, those with the longest match before them count; they vote for each
draft token in turn, and the draft ends where the vote is too divided.

The paper keeps a suffix tree. Here an index holds the occurrences of each three tokens, the match
is extended backwards from there, and only the latest occurrences are kept, which bounds time and
memory.
"""

from collections import Counter, OrderedDict

from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.config import EngineConfig
from nanoserve.engine.sequence import Sequence
from nanoserve.features.speculative.config import SpeculativeConfig
from nanoserve.features.speculative.proposer import PreparedProposer, TextProposer

_KEY = 3  # tokens of a key: the shortest match
_MOST_PLACES = 8  # occurrences of one key that an index keeps
_MOST_TOKENS = 100_000  # of finished requests with one cache key
_MOST_CACHE_KEYS = 16
_NO_TOKEN = -1  # separator after each finished text

# An occurrence: the tokens of a text, and the position after it.
Place = tuple[list[int], int]


def prepare_suffix(config: EngineConfig, model_config: ModelConfig) -> PreparedProposer:
    """Return the proposer of method "suffix"."""
    options = config.speculative_config
    return PreparedProposer(lambda executor, scheduler: SuffixProposer(options))


class SuffixProposer(TextProposer):
    """Proposes the most frequent continuation of the longest match."""

    def __init__(self, config: SpeculativeConfig) -> None:
        self._depth = config.suffix_decoding_max_tree_depth
        self._spec_factor = config.suffix_decoding_max_spec_factor
        self._min_prob = config.suffix_decoding_min_token_prob
        self._max_requests = config.suffix_decoding_max_cached_requests
        self._own: dict[Sequence, PlaceIndex] = {}
        # An accepted draft token comes sooner, and so reveals what other requests got. So only
        # requests with the same cache key share an index.
        self._finished: OrderedDict[tuple[str, ...], FinishedTexts] = OrderedDict()

    def draft(self, seq: Sequence, most: int) -> list[int]:
        token_ids, own = seq.token_ids, self._own.get(seq)
        if len(token_ids) < _KEY:
            return []
        if own is None or own.num_added > len(token_ids):
            own = self._own[seq] = PlaceIndex(token_ids)
        # Keys that end at the last token are not added yet: the token after them is not known.
        own.add(_KEY, len(token_ids) - 1)
        key = tuple(token_ids[-_KEY:])
        places = own.places(key)
        finished = self._finished.get(seq.cache_key)
        if finished is not None:
            places += finished.places(key)
        if not places:
            return []
        lengths = [self._match_length(token_ids, place) for place in places]
        longest = max(lengths)
        best = [place for place, n in zip(places, lengths, strict=True) if n == longest]
        if seq.prompt_embeds is not None:  # no draft token is a placeholder
            for text, end in best:
                after = seq.prompt_embeds.next_position(end) if text is token_ids else None
                most = most if after is None else min(most, after - end)
        return self._follow(best, token_ids, min(most, int(self._spec_factor * longest)))

    def forget(self, seq: Sequence) -> None:
        self._own.pop(seq, None)
        if self._max_requests and seq.num_output_tokens > _KEY:
            finished = self._finished.pop(seq.cache_key, None) or FinishedTexts(self._max_requests)
            self._finished[seq.cache_key] = finished
            finished.add(seq.output_token_ids)
            if len(self._finished) > _MOST_CACHE_KEYS:
                self._finished.popitem(last=False)

    def _match_length(self, token_ids: list[int], place: Place) -> int:
        text, end = place
        length, most = _KEY, min(self._depth, end, len(token_ids))
        while length < most and text[end - 1 - length] == token_ids[-1 - length]:
            length += 1
        return length

    def _follow(self, places: list[Place], own: list[int], most: int) -> list[int]:
        """Return the tokens that follow most of `places`, while they are likely enough."""
        drafts: list[int] = []
        probability = 1.0
        while len(drafts) < most:
            following = [_following(place, own, drafts) for place in places]
            votes = Counter(token_id for token_id in following if token_id is not None)
            if not votes:
                break
            ((token_id, count),) = votes.most_common(1)
            probability *= count / len(places)
            if probability < self._min_prob:
                break
            places = [p for p, t in zip(places, following, strict=True) if t == token_id]
            drafts.append(token_id)
        return drafts


def _following(place: Place, own: list[int], drafts: list[int]) -> int | None:
    """Return the token at `place` after these draft tokens, or None past the end."""
    text, end = place
    end += len(drafts)
    if end < len(text):
        return text[end] if text[end] != _NO_TOKEN else None
    # The sequence's own tokens are continued by its draft tokens.
    return drafts[end - len(text)] if text is own else None


class PlaceIndex:
    """An index of the latest occurrences of each `_KEY` tokens in a growing list of tokens.

    Most keys occur once. To save memory, one occurrence is kept as a number, several as a list.
    """

    def __init__(self, token_ids: list[int]) -> None:
        self.token_ids = token_ids
        self.num_added = 0
        self._ends: dict[tuple[int, ...], int | list[int]] = {}

    def add(self, first: int, last: int) -> None:
        """Add the keys that end at `first` ... `last`, except those that were added before."""
        first, token_ids, ends = max(first, self.num_added + 1), self.token_ids, self._ends
        tails = (token_ids[first - _KEY + i : last - _KEY + i + 1] for i in range(_KEY))
        for end, key in enumerate(zip(*tails, strict=True), first):
            known = ends.get(key)
            if known is None:
                ends[key] = end
            elif isinstance(known, int):
                ends[key] = [known, end]
            else:
                known.append(end)
                del known[:-_MOST_PLACES]
        self.num_added = max(self.num_added, last)

    def places(self, key: tuple[int, ...]) -> list[Place]:
        """Return the latest occurrences of a key."""
        ends = self._ends.get(key, [])
        return [(self.token_ids, end) for end in ([ends] if isinstance(ends, int) else ends)]


class FinishedTexts:
    """The latest finished outputs, in two halves. The older is dropped when the newer is full."""

    def __init__(self, max_requests: int) -> None:
        self._most_texts = max(1, max_requests // 2)
        self._older, self._newer = PlaceIndex([]), PlaceIndex([])
        self._num_texts = 0

    def add(self, text: list[int]) -> None:
        """Add the output of a finished request."""
        is_full = len(self._newer.token_ids) > _MOST_TOKENS // 2
        if self._num_texts == self._most_texts or is_full:
            self._older, self._newer = self._newer, PlaceIndex([])
            self._num_texts = 0
        self._num_texts += 1
        start = len(self._newer.token_ids)
        self._newer.token_ids += [*text, _NO_TOKEN]
        # No key spans two texts, and none ends at the last token, which nothing follows.
        self._newer.add(start + _KEY, start + len(text) - 1)

    def places(self, key: tuple[int, ...]) -> list[Place]:
        """Return the latest occurrences of a key in both halves."""
        return self._older.places(key) + self._newer.places(key)
