"""What a request may ask for, end to end: stop strings, n, priority, processors of the engine."""

from types import SimpleNamespace

import pytest
import torch
from counting_executor import byte_tokenizer, make_engine, run
from tiny_checkpoints import make_qwen3
from tokenizers import AddedToken

from nanoserve import LLM, RequestOutputKind, SamplingParams
from nanoserve.engine.executor import StepResult
from nanoserve.engine.guard import GuardedEngine
from nanoserve.features.trace.reader import read_trace


@pytest.mark.parametrize(
    ("params", "text", "num_tokens", "finish_reason", "stop_reason"),
    [
        ({"stop": "ef"}, "bcd", 5, "stop", "ef"),
        ({"stop": ["xyz", "d"]}, "bc", 3, "stop", "d"),
        ({"stop": "d", "include_stop_str_in_output": True}, "bcd", 3, "stop", "d"),
        ({"stop": ["de", "cde"]}, "b", 4, "stop", "cde"),  # the one that begins first
        ({"stop": "f", "max_tokens": 5}, "bcde", 5, "stop", "f"),  # on the last allowed token
        ({"stop": "c", "min_tokens": 2, "max_tokens": 4}, "bcde", 4, "length", None),
        ({"stop": "zz", "max_tokens": 3}, "bcd", 3, "length", None),
    ],
)
def test_stop_strings(params, text, num_tokens, finish_reason, stop_reason) -> None:
    engine = make_engine(byte_tokenizer())
    engine.add_request("r", "a", SamplingParams(**{"max_tokens": 20, **params}))
    (completion,) = run(engine)["r"].outputs
    assert (completion.text, len(completion.token_ids)) == (text, num_tokens)
    assert (completion.finish_reason, completion.stop_reason) == (finish_reason, stop_reason)
    assert engine.scheduler.block_manager.num_free_blocks == engine.executor.num_kv_blocks


def test_text_is_held_back_while_a_stop_string_may_be_forming() -> None:
    engine = make_engine(byte_tokenizer())
    kind = RequestOutputKind.DELTA
    engine.add_request("r", "a", SamplingParams(max_tokens=6, stop="cde!", output_kind=kind))
    pieces = []
    while engine.has_unfinished_requests():
        pieces += [output.outputs[0].text for output in engine.step()]
    assert pieces == ["b", "", "", "", "cdef", "g"]


@pytest.mark.parametrize("caching", [True, False])
def test_n_completions_come_in_order_and_share_the_prompt(caching: bool) -> None:
    engine = make_engine(enable_prefix_caching=caching)
    engine.add_request("r", list(range(100)), SamplingParams(n=3, max_tokens=4))
    output = run(engine)["r"]
    assert [completion.index for completion in output.outputs] == [0, 1, 2]
    assert all(c.token_ids == [100, 101, 102, 103] for c in output.outputs)
    assert [change.completion for change in engine.executor.sampling] == [0, 1, 2]
    # The prompt once, then 4 tokens of its last block for each sibling, and 3 decode steps each.
    # Without a prefix cache there is nothing to share it by.
    computed_by_siblings = 4 if caching else 100
    assert engine.stats.num_computed_tokens == 100 + 2 * computed_by_siblings + 3 * 3
    assert output.metrics.num_output_tokens == 12


def test_priorities_of_generate(tmp_path) -> None:
    make_qwen3(tmp_path)
    params = SamplingParams(temperature=0, max_tokens=2)
    options = {"skip_tokenizer_init": True, "max_num_seqs": 1}
    with LLM(tmp_path, scheduling_policy="priority", **options) as llm:
        outputs = llm.generate([[1], [2], [3]], params, use_tqdm=False, priority=[2, 0, 1])
        ends = [output.metrics.finished_time for output in outputs]
        assert ends[1] < ends[2] < ends[0]
        with pytest.raises(ValueError, match="3 prompts, but 2 priority"):
            llm.generate([[1], [2], [3]], params, priority=[1, 2])
    with LLM(tmp_path, **options) as llm, pytest.raises(ValueError, match="scheduling_policy"):
        llm.generate([[1]], params, priority=[1])


def test_a_processor_of_the_engine_sees_all_rows_at_once(tmp_path) -> None:
    make_qwen3(tmp_path)
    seen = []

    def only_even(logits: torch.Tensor, states: list) -> None:
        seen.append([(len(s.prompt_token_ids), len(s.output_token_ids)) for s in states])
        logits[:, 1::2] = -torch.inf

    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    with LLM(tmp_path, skip_tokenizer_init=True, logits_processors=[only_even]) as llm:
        outputs = llm.generate([[1, 2], [3]], params, use_tqdm=False)
    assert all(token_id % 2 == 0 for o in outputs for token_id in o.outputs[0].token_ids)
    assert [sorted(step) for step in seen] == [[(1, i), (2, i)] for i in range(3)]
    for wrong, told in ((["no"], "'no' must have"), ([5], "5 is neither"), (5, "callables")):
        with pytest.raises(ValueError, match=told):
            LLM(tmp_path, skip_tokenizer_init=True, logits_processors=wrong)


def cached(engine: GuardedEngine, salt: str | None) -> int:
    """How much of a prompt that has been computed before is found."""
    prompt = {"prompt_token_ids": list(range(100))}
    if salt is not None:
        prompt["cache_salt"] = salt
    engine.add_request("r", prompt, SamplingParams(max_tokens=2))
    output = run(engine)["r"]
    assert output.outputs[0].token_ids == [100, 101]  # whatever it shares
    return output.metrics.num_cached_prompt_tokens


@pytest.mark.parametrize("salt", [None, "mine"])
def test_requests_share_prefixes_with_those_of_the_same_salt(salt: str | None) -> None:
    engine = make_engine()
    assert [cached(engine, salt) for _ in range(3)] == [0, 96, 96]


@pytest.mark.parametrize(
    ("first", "second"), [("mine", "yours"), ("mine", None), (None, "mine"), ("1", "1 ")]
)
def test_requests_share_nothing_with_those_of_another_salt_or_none(first, second) -> None:
    engine = make_engine()
    assert [cached(engine, first), cached(engine, second)] == [0, 0]
    assert [cached(engine, first), cached(engine, second)] == [96, 96]  # each has its own by now


def test_a_salt_goes_with_text_too_and_none_is_no_salt() -> None:
    engine = make_engine(byte_tokenizer())
    text = "a long enough text to fill a block"
    hits = []
    for salt in ({"cache_salt": "mine"}, {"cache_salt": "mine"}, {"cache_salt": None}, {}):
        engine.add_request("r", {"prompt": text, **salt}, SamplingParams(max_tokens=1))
        hits.append(run(engine)["r"].metrics.num_cached_prompt_tokens)
    assert hits == [0, 32, 0, 32]


def test_completions_of_a_salted_prompt_share_it() -> None:
    engine = make_engine()
    prompt = {"prompt_token_ids": list(range(100)), "cache_salt": "mine"}
    engine.add_request("r", prompt, SamplingParams(n=3, max_tokens=1))
    run(engine)
    assert engine.stats.num_computed_tokens == 100 + 2 * 4


def test_what_was_cached_can_be_kept_from_those_who_ask() -> None:
    engine = make_engine(enable_prompt_tokens_details=False)
    prompt = list(range(100))
    of_one = SamplingParams(max_tokens=2, output_kind=RequestOutputKind.DELTA)
    told = []
    for params in (of_one, of_one, SamplingParams(max_tokens=2), SamplingParams(n=3)):
        engine.add_request("r", prompt, params)
        while engine.has_unfinished_requests():
            told += [output.metrics.num_cached_prompt_tokens for output in engine.step()]
    assert set(told) == {None} and len(told) > 4
    assert engine.stats.prefix_cache_hits == 3 * 96  # the operator's own figures stay


def test_a_model_keeps_what_was_cached_to_itself(tmp_path) -> None:
    make_qwen3(tmp_path)
    options = {"skip_tokenizer_init": True, "enable_prompt_tokens_details": False}
    with LLM(tmp_path, trace=tmp_path / "run.jsonl", **options) as llm:
        prompt, params = list(range(40)), SamplingParams(max_tokens=2)
        outputs = [*llm.generate([prompt] * 2, params, use_tqdm=False), *llm.stream(prompt, params)]
        assert {output.metrics.num_cached_prompt_tokens for output in outputs} == {None}
        assert llm.stats.prefix_cache_hits == 64
    steps = read_trace(tmp_path / "run.jsonl").steps
    assert sum(row["hits"] for step in steps for row in step["rows"]) == 4  # the operator's too


def special_tokenizer() -> SimpleNamespace:
    """Sets a space between words, special ones included; a to z are 97 to 122, <s> is 256."""
    from tokenizers import Tokenizer, models

    backend = Tokenizer(models.WordLevel({chr(i): i for i in range(97, 123)}, unk_token="a"))
    backend.add_special_tokens([AddedToken("<s>", special=True)])
    return SimpleNamespace(
        backend=backend,
        eos_token_id=None,
        encode=lambda text, add_special_tokens=True: backend.encode(text).ids,
        decode=lambda ids, skip=True: backend.decode(ids, skip_special_tokens=skip),
    )


@pytest.mark.parametrize("kind", list(RequestOutputKind))
@pytest.mark.parametrize("spaces", [True, False])
def test_spaces_between_special_tokens(kind: RequestOutputKind, spaces: bool) -> None:
    tokenizer = special_tokenizer()
    special = tokenizer.backend.token_to_id("<s>")
    engine = make_engine(tokenizer)
    script = iter([97, special, special, 98])
    engine.executor.collect = lambda handle: StepResult([[next(script)]])
    params = SamplingParams(
        max_tokens=4,
        skip_special_tokens=False,
        spaces_between_special_tokens=spaces,
        output_kind=kind,
    )
    engine.add_request("r", [99], params)
    texts = []
    while engine.has_unfinished_requests():
        texts += [output.outputs[0].text for output in engine.step()]
    text = "".join(texts) if kind is RequestOutputKind.DELTA else texts[-1]
    # It continues "c", so its first token has its space, too.
    assert text == (" a <s> <s> b" if spaces else " a<s><s>b")
