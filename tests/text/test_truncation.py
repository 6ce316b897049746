"""A text is cut to a number of tokens where transformers cuts it."""

import pytest
from tokenizers import Tokenizer, processors
from transformers import PreTrainedTokenizerFast

from nanoserve.checkpoint.checkpoint import bundled_checkpoint
from nanoserve.text.truncation import encoded_within

BEGIN, END = "<|im_start|>", "<|endoftext|>"
TEXT = "What is a block table, and what is a KV cache? " * 4


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("template", ["$A", f"{BEGIN} $A", f"$A {END}", f"{BEGIN} $A {END} {END}"])
def test_special_tokens_are_kept(template: str, side: str) -> None:
    source = bundled_checkpoint("tiny-qwen3")
    assert source is not None
    backend = Tokenizer.from_file(str(source / "tokenizer.json"))
    specials = [(token, backend.token_to_id(token)) for token in (BEGIN, END)]
    backend.post_processor = processors.TemplateProcessing(single=template, special_tokens=specials)
    theirs = PreTrainedTokenizerFast(tokenizer_object=backend, truncation_side=side)
    num_added, length = len(theirs.encode("")), len(theirs.encode(TEXT))
    for most in (num_added + 1, num_added + 2, 20, length - 1, length, length + 1):
        expected = theirs.encode(TEXT, truncation=True, max_length=most)
        found = encoded_within(theirs, TEXT, most, "max_length", from_left=side == "left")
        assert found == expected and len(found) == min(most, length)
    with pytest.raises(ValueError, match=f"^max_length={num_added} leaves no token of the text"):
        encoded_within(theirs, TEXT, num_added, "max_length")
