"""A model that helps nothing: whatever it says, what is finished is what was asked for."""

import json
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tiny_checkpoints import make_qwen3

from nanoserve import LLM, SamplingParams, StructuredOutputsParams

pytest.importorskip("llguidance", reason="pip install 'nanoserve[guided]'")
pytest.importorskip("jsonschema", reason="pip install jsonschema")
import jsonschema
from random_grammars import RandomSchema, random_regex

EOS = 2


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    path = tmp_path_factory.mktemp("random")
    make_qwen3(path, vocab_size=2048)
    options: dict[str, Any] = {"tokenizer": "tiny-qwen3", "max_model_len": 512}
    with LLM(path, **options, num_kv_blocks=2048) as llm:
        yield llm


def closing_tokens(llm: LLM) -> dict[int, float]:
    """A weakness for the end, and for what closes something."""
    decode = llm.engine.tokenizer.decode
    texts = {token_id: decode([token_id], False) for token_id in range(2048)}
    closing = {i: 20.0 for i, text in texts.items() if text and set(text) <= set('"]}')}
    return closing | {EOS: 100.0}


def finished(llm: LLM, guides: list[dict[str, Any]]) -> tuple[list[tuple[int, str]], Counter[str]]:
    """Texts that came to their end, each with the number of its grammar."""
    # Twice each: without a bias, loops and open objects would hardly come to an end.
    params = [
        SamplingParams(
            temperature=2.0,  # nearly nothing is left of what this model would rather say
            seed=number,
            max_tokens=300,
            logit_bias=closing_tokens(llm) if ends_soon else None,
            structured_outputs=StructuredOutputsParams(**guide),
        )
        for ends_soon in (False, True)
        for number, guide in enumerate(guides)
    ]
    guides = guides * 2
    outputs = llm.generate([[number % 2048 or 1] for number in range(len(guides))], params, False)
    texts, counts = [], Counter()
    for number, output in enumerate(outputs):
        if output.error is not None and "too many expressions" in str(output.error):
            counts["too complex"] += 1  # loops within loops, whose steps are bounded
            continue
        assert output.error is None, (guides[number], output.error)  # a mask that is empty, say
        for completion in output.outputs:
            counts[completion.finish_reason] += 1
            if completion.finish_reason == "stop":
                decode = llm.engine.tokenizer.decode
                assert decode(completion.token_ids, False) == completion.text  # no special token
                texts.append((number % (len(guides) // 2), completion.text))
    return texts, counts


def test_json_validates(llm: LLM, by_size: Callable[..., int]) -> None:
    schemas = [RandomSchema(seed).schema for seed in range(by_size(20, 300, 2000))]
    texts, counts = finished(llm, [{"json": schema} for schema in schemas])
    # A date may be the 29th of any February: calendars are not asked.
    checker = jsonschema.FormatChecker(["uuid", "ipv4"])
    for number, text in texts:
        validator = jsonschema.Draft202012Validator(schemas[number], format_checker=checker)
        validator.validate(json.loads(text))
    print(counts)
    assert len({number for number, _ in texts}) > 0.9 * len(schemas), counts


def test_texts_match(llm: LLM, by_size: Callable[..., int]) -> None:
    regexes = [random_regex(seed) for seed in range(by_size(30, 200, 1000))]
    texts, counts = finished(llm, [{"regex": regex} for regex in regexes])
    for number, text in texts:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # of what Python itself finds doubtful
            assert re.fullmatch(regexes[number], text), (regexes[number], text)
    print(counts)
    # Others must end in a letter that this model does not think of, after as many as it likes.
    assert len({number for number, _ in texts}) > 0.75 * len(regexes), counts
    assert counts["too complex"] <= 0.01 * len(regexes), counts
