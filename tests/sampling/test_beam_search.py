"""Beam search against transformers' `generate(num_beams=...)`: the same tokens, the same scores."""

from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from tiny_checkpoints import edit_json, make_qwen3
from tqdm import tqdm
from transformers import PreTrainedModel

from nanoserve import LLM, SamplingParams
from nanoserve.features import beam_search
from nanoserve.features.beam_search import BeamSearchOutput

PAD = 0
# transformers keeps the EOS that ends a beam.
BeamSearchParams = partial(beam_search.BeamSearchParams, include_stop_str_in_output=True)
MODELS = {
    "ends often": {"vocab_size": 40, "seed": 3},
    "large vocabulary": {"vocab_size": 300, "seed": 1},
    "tied, GQA 4": {
        "vocab_size": 60,
        "seed": 2,
        "num_key_value_heads": 1,
        "tie_word_embeddings": True,
    },
}
PROMPTS = [[5], [PAD, 7, 3, PAD, 11], [*range(20)], [9] * 33]


@pytest.fixture(scope="module", params=MODELS, ids=str)
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """A checkpoint, transformers' model of it, and its tokens, the most frequent one first."""
    path = tmp_path_factory.mktemp("qwen3")
    model = make_qwen3(path, **MODELS[request.param])
    return path, model, frequent_tokens(model)


def frequent_tokens(model: PreTrainedModel) -> list[int]:
    """What beams without EOS run into: as EOS they end some beams and not others."""
    seen = Counter(
        token_id
        for prompt in PROMPTS
        for tokens, _ in theirs(model, prompt, BeamSearchParams(4, 8), [])
        for token_id in tokens[len(prompt) :]
    )
    return [token_id for token_id, _ in seen.most_common()]


def open_llm(path: Path, eos: list[int], **options: Any) -> LLM:
    edit_json(path / "config.json", eos_token_id=eos[0] if len(eos) == 1 else eos or None)
    (path / "generation_config.json").unlink(missing_ok=True)
    return LLM(path, dtype="float32", skip_tokenizer_init=True, num_kv_blocks=400, **options)


@torch.inference_mode()
def theirs(
    model: PreTrainedModel, prompt: list[int], params: beam_search.BeamSearchParams, eos: list[int]
) -> list[tuple[list[int], float]]:
    """Tokens, without padding, and score of each sequence, the best first.

    The attention mask is given because transformers would hide pad ids inside the prompt.
    """
    input_ids = torch.tensor([prompt])
    result = model.generate(
        input_ids,
        attention_mask=torch.ones_like(input_ids),
        num_beams=params.beam_width,
        num_return_sequences=params.beam_width,
        do_sample=False,
        max_new_tokens=params.max_tokens,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
        eos_token_id=(eos or None) if not params.ignore_eos else None,
        pad_token_id=PAD,
        return_dict_in_generate=True,
        output_scores=True,
    )
    sequences = []
    for tokens, beams, score in zip(
        result.sequences.tolist(),
        result.beam_indices,
        result.sequences_scores.tolist(),
        strict=True,
    ):
        length = int((beams >= 0).sum())
        sequences.append((tokens[: len(prompt) + length], score))
    return sequences


def assert_equal(
    output: BeamSearchOutput,
    expected: list[tuple[list[int], float]],
    prompt: list[int],
    params: beam_search.BeamSearchParams,
    eos: list[int],
) -> None:
    ours = output.sequences
    assert [sequence.tokens for sequence in ours] == [tokens for tokens, _ in expected]
    assert [s.score for s in ours] == pytest.approx([score for _, score in expected], abs=1e-4)
    for sequence in ours:
        length = len(sequence.tokens) - len(prompt)
        assert sequence.tokens[: len(prompt)] == prompt
        assert sequence.cum_logprob == pytest.approx(
            sequence.score * length**params.length_penalty, abs=1e-4
        )
        ended = sequence.tokens[-1] in eos and not params.ignore_eos
        assert sequence.finish_reason == ("stop" if ended else "length")
        assert ended or length == params.max_tokens


def compare(path: Path, model: PreTrainedModel, eos: list[int], all_params: list) -> Counter:
    """All prompts as one batch, for each of the parameters; returns how the beams ended."""
    ends: Counter = Counter()
    with open_llm(path, eos) as llm:
        for params in all_params:
            outputs = llm.beam_search(PROMPTS, params)
            assert len(outputs) == len(PROMPTS)
            for prompt, output in zip(PROMPTS, outputs, strict=True):
                expected = theirs(model, prompt, params, eos)
                assert_equal(output, expected, prompt, params, eos)
                ends.update(
                    (sequence.finish_reason, len(sequence.tokens) - len(prompt))
                    for sequence in output.sequences
                )
        assert llm.engine.scheduler.block_manager.num_free_blocks == 400
    return ends


@pytest.mark.small(reference=["ends often"], num_eos=[2])
@pytest.mark.parametrize("num_eos", [1, 2])
@pytest.mark.parametrize("early_stopping", [False, True])
def test_tokens_and_scores_equal_transformers(
    reference, num_eos: int, early_stopping: bool
) -> None:
    path, model, frequent = reference
    eos = frequent[:num_eos]
    ends = compare(
        path,
        model,
        eos,
        [
            BeamSearchParams(4, 8, length_penalty=penalty, early_stopping=early_stopping)
            for penalty in (0.5, 1.0, 2.0)
        ],
    )
    reasons = {reason for reason, _ in ends}
    lengths = {length for reason, length in ends if reason == "stop"}
    assert reasons == {"stop", "length"} or len(lengths) >= 3  # else the comparison is too easy


@pytest.mark.small(reference=["tied, GQA 4"])
@pytest.mark.parametrize("beam_width", [1, 2, 3, 5])
def test_any_beam_width_equals_transformers(reference, beam_width: int) -> None:
    """A width of 1 is greedy search for transformers, which has no scores."""
    path, model, frequent = reference
    eos = frequent[:1]
    params = BeamSearchParams(beam_width, 10)
    if beam_width > 1:
        assert compare(path, model, eos, [params])
        return
    with open_llm(path, []) as llm:
        for prompt, output in zip(PROMPTS, llm.beam_search(PROMPTS, params), strict=True):
            greedy = model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                do_sample=False,
                max_new_tokens=10,
                eos_token_id=None,
                pad_token_id=PAD,
            )
            assert [sequence.tokens for sequence in output.sequences] == greedy.tolist()


def test_enough_beams_run_on_even_if_many_eos_are_the_most_likely(
    tmp_path: Path, by_size: Callable[..., int]
) -> None:
    """With 4 EOS of 20 tokens, 2 candidates per beam would often all be at their end."""
    for seed in range(by_size(2, 4)):
        model = make_qwen3(tmp_path, vocab_size=20, seed=seed)
        eos = frequent_tokens(model)[:4]
        assert compare(tmp_path, model, eos, [BeamSearchParams(4, 8, length_penalty=2.0)])


@pytest.mark.small(reference=["large vocabulary"])
def test_ignoring_eos_and_having_none_equal_transformers_without_it(reference) -> None:
    path, model, frequent = reference
    eos = frequent[0]
    ignoring = compare(path, model, [eos], [BeamSearchParams(4, 6, ignore_eos=True)])
    having_none = compare(path, model, [], [BeamSearchParams(4, 6)])
    assert ignoring == having_none == {("length", 6): 4 * len(PROMPTS)}


@pytest.mark.small(reference=["ends often"])
def test_one_token_and_negative_or_no_length_penalty_equal_transformers(reference) -> None:
    path, model, frequent = reference
    eos = frequent[:1]
    some = [BeamSearchParams(4, 8, length_penalty=penalty) for penalty in (0.0, -1.0)]
    ends = compare(path, model, eos, [*some, BeamSearchParams(4, 1), BeamSearchParams(4, 2)])
    assert ends["length", 1] > 0


@pytest.mark.small(reference=["large vocabulary"])
def test_prompts_do_not_disturb_each_other_even_if_beams_must_queue(reference) -> None:
    """Three sequences at a time, and a pool in which beams are preempted."""
    path, model, frequent = reference
    eos, params = frequent[:1], BeamSearchParams(4, 8, length_penalty=2.0)
    options = {"max_num_seqs": 3, "max_num_batched_tokens": 8, "block_size": 4}
    with open_llm(path, eos, **options) as llm:
        together = llm.beam_search(PROMPTS, params)
        alone = [llm.beam_search(prompt, params)[0] for prompt in PROMPTS]
    for prompt, one, other in zip(PROMPTS, together, alone, strict=True):
        expected = theirs(model, prompt, params, eos)
        assert_equal(one, expected, prompt, params, eos)
        assert_equal(other, expected, prompt, params, eos)


def test_beams_share_what_they_have_in_common_through_the_prefix_cache(tmp_path: Path) -> None:
    make_qwen3(tmp_path)
    with open_llm(tmp_path, []) as llm:
        llm.beam_search([[3] * 64], BeamSearchParams(4, 4))
        # 64 tokens once, then at most the 16 of the last block and the new ones for each beam.
        assert llm.stats.num_computed_tokens <= 64 + 3 * 4 * (16 + 4)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("beam_width", 0),
        ("beam_width", -1),
        ("beam_width", 2.0),
        ("beam_width", True),
        ("beam_width", None),
        ("max_tokens", 0),
        ("max_tokens", "8"),
        ("max_tokens", None),
        ("length_penalty", float("nan")),
        ("length_penalty", float("inf")),
        ("length_penalty", "1"),
        ("length_penalty", None),
        ("early_stopping", "never"),  # transformers has it; here it must not pass for True
        ("early_stopping", None),
        ("ignore_eos", "no"),
    ],
)
def test_a_bad_parameter_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name):
        BeamSearchParams(**{"beam_width": 2, "max_tokens": 4, name: value})


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory):
    path = tmp_path_factory.mktemp("small")
    make_qwen3(path, vocab_size=30)
    with open_llm(path, [4], max_logprobs=20) as llm:
        yield llm


def test_max_logprobs_bounds_those_who_send_requests_and_no_beams(small: LLM) -> None:
    """Width w needs 2 w log-probabilities."""
    (output,) = small.beam_search([[1, 2]], BeamSearchParams(15, 3))
    assert len(output.sequences) == 15
    with pytest.raises(ValueError, match=r"logprobs=21.*max_logprobs=20"):
        small.generate([[1, 2]], SamplingParams(logprobs=21), use_tqdm=False)
    assert not small.engine.has_unfinished_requests()


def test_two_searches_in_two_threads_change_nothing_of_each_other(small: LLM) -> None:
    """The narrow one begins first and is over before the wide one has made its first step."""
    narrow, wide = BeamSearchParams(11, 2), BeamSearchParams(15, 3)
    expected = [small.beam_search([[1, 2]], params) for params in (narrow, wide)]
    limit = small.engine.input_processor.max_logprobs
    has_begun, may_go_on = (Event(), Event()), (Event(), Event())

    def search(number: int, params: beam_search.BeamSearchParams) -> list[BeamSearchOutput]:
        def make_bar(**options: Any) -> tqdm:
            has_begun[number].set()
            assert may_go_on[number].wait(60)
            return tqdm(**options, disable=True)

        return small.beam_search([[1, 2]], params, use_tqdm=make_bar)

    with ThreadPoolExecutor(2) as threads:
        searches = []
        for number, params in enumerate((narrow, wide)):
            searches.append(threads.submit(search, number, params))
            assert has_begun[number].wait(60)
        found = []
        for number in range(2):
            may_go_on[number].set()
            found.append(searches[number].result(60))
    assert found == expected
    assert small.engine.input_processor.max_logprobs == limit
    with pytest.raises(ValueError, match=r"logprobs=21.*max_logprobs=20"):
        small.generate([[1, 2]], SamplingParams(logprobs=21), use_tqdm=False)


@pytest.mark.parametrize("concurrency_limit", [1, 2, 9])
def test_how_many_are_searched_at_once_changes_nothing(small: LLM, concurrency_limit: int) -> None:
    prompts, params, bars = [[1, 2], [5], [7, 8, 9]], BeamSearchParams(3, 5), []

    def make_bar(**options: Any) -> tqdm:
        bars.append(tqdm(**options, disable=True))
        return bars[-1]

    expected = small.beam_search(prompts, params)
    found = small.beam_search(prompts, params, None, make_bar, concurrency_limit)
    assert found == expected and len(bars) == 1


def test_a_beam_has_the_candidates_that_it_was_chosen_from(small: LLM) -> None:
    (output,) = small.beam_search([[1, 2]], BeamSearchParams(3, 6))
    for sequence in output.sequences:
        chosen = sequence.tokens[2:]
        steps = zip(chosen, sequence.logprobs, strict=True)
        total = sum(candidates[token_id].logprob for token_id, candidates in steps)
        assert total == pytest.approx(sequence.cum_logprob, abs=1e-5)
        is_stopped = sequence.finish_reason == "stop"
        assert sequence.stop_reason == (chosen[-1] if is_stopped else None)


@pytest.mark.small(reference=["ends often"])
def test_without_its_eos_a_beam_is_as_vllm_has_it(reference) -> None:
    path, _, frequent = reference
    params = BeamSearchParams(4, 8, length_penalty=-1.0)
    with open_llm(path, frequent[:2]) as llm:
        whole = [sequence for out in llm.beam_search(PROMPTS, params) for sequence in out.sequences]
        params = replace(params, include_stop_str_in_output=False)
        cut = [sequence for out in llm.beam_search(PROMPTS, params) for sequence in out.sequences]
    assert {sequence.finish_reason for sequence in whole} >= {"stop"}
    for with_eos, without in zip(whole, cut, strict=True):
        is_stopped = with_eos.finish_reason == "stop"
        assert without.tokens == (with_eos.tokens[:-1] if is_stopped else with_eos.tokens)
        assert without == replace(with_eos, tokens=without.tokens)


@pytest.mark.parametrize(
    ("prompt", "told"), [([], "empty"), ([30], "30"), ("text", "tokenizer"), ([1] * 510, "510")]
)
def test_a_bad_prompt_among_good_ones_is_refused(small: LLM, prompt: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        small.beam_search([[1, 2], prompt], BeamSearchParams(2, 8))
    assert not small.engine.has_unfinished_requests()


def test_no_prompts_are_no_beams(small: LLM) -> None:
    assert small.beam_search([], BeamSearchParams(2, 8)) == []


@pytest.mark.parametrize("beam_width", [3, 4])
def test_a_beam_wider_than_half_the_vocabulary_equals_transformers(
    tmp_path: Path, beam_width: int
) -> None:
    """The first step has fewer candidates than would be kept."""
    model = make_qwen3(tmp_path, vocab_size=6)
    params = BeamSearchParams(beam_width, 5)
    with open_llm(tmp_path, [2]) as llm:
        (output,) = llm.beam_search([[1, 5]], params)
    assert_equal(output, theirs(model, [1, 5], params, [2]), [1, 5], params, [2])


def test_the_text_of_a_beam_is_that_of_prompt_and_continuation() -> None:
    with LLM("tiny-qwen3", dtype="float32", num_kv_blocks=200) as llm:
        prompt = "<|im_start|>user\nWhat is a KV cache?<|im_end|>\n<|im_start|>assistant\n"
        (output,) = llm.beam_search(prompt, BeamSearchParams(2, 12))
        for sequence in output.sequences:
            assert sequence.text == llm.get_tokenizer().decode(sequence.tokens)
            assert sequence.text.startswith(prompt) and len(sequence.text) > len(prompt)
