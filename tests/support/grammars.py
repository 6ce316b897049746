"""Grammars to ask for, and what llguidance itself says of an output: parsed from its beginning."""

from functools import cache
from typing import Any

import llguidance.hf
import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "is_active": {"type": "boolean"},
    },
    "required": ["name", "age", "is_active"],
    "additionalProperties": False,
}
GRAMMARS: list[dict[str, Any]] = [
    {"json": PERSON},
    {"json": {"type": "array", "items": {"enum": ["block", "blocks", 1, None]}, "minItems": 1}},
    {"json": PERSON, "disable_any_whitespace": False},
    {"json_object": True},
    {"regex": r"(yes|no|maybe), [0-9]{2,4}!"},
    {"regex": r"[a-z ]*"},
    {"regex": r"(\d{1,3}\.){3}\d{1,3}"},
    {"choice": ["block table", "block", "KV cache", "preemption", "\u5757\u8868"]},
    {"grammar": 'start: item (", " item)*\nitem: /[a-c]+/ | "(" start ")"'},
    {"grammar": 'root ::= "x" [0-9]+ ("," root)?'},
]


@cache
def _of_library(tokenizer: Any) -> LLTokenizer:
    return llguidance.hf.from_tokenizer(tokenizer, eos_token=tokenizer.eos_token_id)


class FromScratch:
    """A logits processor that forbids what the library does, which it asks about the whole output.

    Nothing of nanoserve's own is in it: neither a state that goes from step to step, nor a mask.
    """

    def __init__(self, tokenizer: Any, grammar: str, stop_token_ids: list[int]) -> None:
        """tokenizer: transformers'. grammar: in llguidance's language."""
        self._tokenizer, self._eos = _of_library(tokenizer), tokenizer.eos_token_id
        self._grammar = grammar
        self._stops = {self._eos, *stop_token_ids}

    def __call__(self, output_token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        matcher = LLMatcher(self._tokenizer, self._grammar, log_level=0)
        assert matcher.consume_tokens(output_token_ids), matcher.get_error()
        mask = np.zeros(-(-len(logits) // 32), dtype=np.int32)
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        allowed = np.unpackbits(mask.view(np.uint8), count=len(logits), bitorder="little") != 0
        if matcher.is_accepting():
            allowed[list(self._stops)] = True
        else:
            assert not allowed[self._eos]
        return logits.masked_fill(~torch.from_numpy(allowed), -torch.inf)
