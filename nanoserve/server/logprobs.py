"""Log-probabilities as OpenAI's two endpoints have them."""

from collections.abc import Callable, Iterator
from typing import Any

from nanoserve.outputs import Logprob

Entry = dict[int, Logprob] | None  # of one token; None for a prompt's first, which nothing predicts
_LEAST = -9999.0  # JSON has no infinity


def of_completion(
    token_ids: list[int],
    entries: list[Entry],
    offset: int,
    name: Callable[[int, Logprob | None], str],
) -> dict[str, list[Any]]:
    """For /v1/completions. `offset` is where the first token begins in the answer's text."""
    shown: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": []}
    shown["text_offset"] = []
    for token_id, entry in zip(token_ids, entries, strict=True):
        chosen = None if entry is None else entry[token_id]
        token = name(token_id, chosen)
        shown["tokens"].append(token)
        shown["token_logprobs"].append(None if chosen is None else _finite(chosen))
        top = (
            None
            if entry is None
            else {name(i, other): _finite(other) for i, other in _by_rank(entry)}
        )
        shown["top_logprobs"].append(top)
        shown["text_offset"].append(offset)
        offset += len(token)
    return shown


def of_chat(
    token_ids: list[int],
    entries: list[Entry],
    num_top: int,
    name: Callable[[int, Logprob | None], str],
) -> dict[str, list[Any]]:
    """For /v1/chat/completions."""

    def shown(token_id: int, entry: Logprob) -> dict[str, Any]:
        token = name(token_id, entry)
        return {"token": token, "logprob": _finite(entry), "bytes": list(token.encode())}

    content = []
    for token_id, entry in zip(token_ids, entries, strict=True):
        top = [shown(i, other) for i, other in _by_rank(entry) if other.rank <= num_top]
        content.append(shown(token_id, entry[token_id]) | {"top_logprobs": top})
    return {"content": content}


def of_prompt(entries: list[Entry]) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`."""
    return [
        entry
        and {
            str(i): {"logprob": _finite(one), "rank": one.rank, "decoded_token": one.decoded_token}
            for i, one in _by_rank(entry)
        }
        for entry in entries
    ]


def _by_rank(entry: dict[int, Logprob]) -> Iterator[tuple[int, Logprob]]:
    return iter(sorted(entry.items(), key=lambda item: item[1].rank))


def _finite(entry: Logprob) -> float:
    return max(entry.logprob, _LEAST)
