"""Log-probabilities of outputs and prompts against transformers' own, in float32."""

from pathlib import Path
from typing import Any

import pytest
import torch
from counting_executor import byte_tokenizer
from tiny_checkpoints import edit_json, make_qwen3
from transformers import PreTrainedModel

from nanoserve import LLM, SamplingParams
from nanoserve.engine.guard import GuardedEngine
from nanoserve.outputs import CompletionOutput, Logprob, RequestOutput
from nanoserve.sampling_params import RequestOutputKind

VOCAB_SIZE = 256  # as many as there are bytes, so that every token has a text
KS = [0, 1, 5, 20]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory):
    path = tmp_path_factory.mktemp("qwen3")
    return path, make_qwen3(path, vocab_size=VOCAB_SIZE)


def open_llm(path: Path, **options: Any) -> LLM:
    return LLM(
        path, **{"dtype": "float32", "skip_tokenizer_init": True, "num_kv_blocks": 100, **options}
    )


def random_tokens(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCAB_SIZE, (length,), generator=generator).tolist()


@torch.inference_mode()
def reference_logprobs(model: PreTrainedModel, token_ids: list[int]) -> torch.Tensor:
    """[num_tokens, vocab_size]; row i is what follows token i."""
    return model(torch.tensor([token_ids])).logits[0].float().log_softmax(-1)


def check_candidates(
    candidates: dict[int, Logprob], token_id: int, row: torch.Tensor, k: int
) -> None:
    """The chosen token comes first, and with it are the k most likely, each with its rank."""
    order = row.argsort(descending=True).tolist()
    assert next(iter(candidates)) == token_id
    assert set(candidates) == {token_id, *order[:k]}
    for candidate, found in candidates.items():
        assert found.logprob == pytest.approx(row[candidate].item(), abs=1e-4)
        assert found.rank == order.index(candidate) + 1


def check_output(
    model: PreTrainedModel, prompt: list[int], completion: CompletionOutput, k: int
) -> None:
    token_ids = completion.token_ids
    assert len(completion.logprobs) == len(token_ids)
    rows = reference_logprobs(model, prompt + token_ids)[len(prompt) - 1 :]
    for candidates, token_id, row in zip(completion.logprobs, token_ids, rows, strict=False):
        check_candidates(candidates, token_id, row, k)
    chosen = [row[token_id].item() for row, token_id in zip(rows, token_ids, strict=False)]
    assert completion.cumulative_logprob == pytest.approx(sum(chosen), abs=1e-3)


def check_prompt(model: PreTrainedModel, output: RequestOutput, k: int) -> None:
    prompt, entries = output.prompt_token_ids, output.prompt_logprobs
    assert len(entries) == len(prompt)
    assert entries[0] is None
    rows = reference_logprobs(model, prompt)
    for candidates, token_id, row in zip(entries[1:], prompt[1:], rows, strict=False):
        check_candidates(candidates, token_id, row, k)


def greedy(max_tokens: int = 6, **params: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, **params)


# -- Of the output ------------------------------------------------------------------------------


@pytest.mark.parametrize("k", KS)
def test_logprobs_equal_transformers(reference, k: int) -> None:
    path, model = reference
    prompts = [random_tokens(n, seed=n) for n in (1, 17, 40)]
    with open_llm(path, max_num_batched_tokens=16, max_num_seqs=4) as llm:
        outputs = llm.generate(prompts, greedy(logprobs=k), use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.prompt_logprobs is None
        check_output(model, prompt, output.outputs[0], k)


def test_neighbours_get_what_each_asked_for(reference) -> None:
    """None, none and as many as the most curious: rows are shared, results are not."""
    path, model = reference
    prompts = [random_tokens(9, seed=n) for n in range(8)]
    ks = [None, 3, 0, None, 20, 1, 5, None]
    params = [greedy(4 + n, logprobs=k) for n, k in enumerate(ks)]
    with open_llm(path) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        without = llm.generate(prompts, [greedy(4 + n) for n in range(8)], use_tqdm=False)
    for prompt, output, plain, k in zip(prompts, outputs, without, ks, strict=True):
        (completion,) = output.outputs
        assert completion.token_ids == plain.outputs[0].token_ids
        if k is None:
            assert completion.logprobs is None and completion.cumulative_logprob is None
        else:
            check_output(model, prompt, completion, k)


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 2.0, "seed": 1},
        {"temperature": 1.5, "top_k": 4, "seed": 2},
        {"temperature": 0, "presence_penalty": 2.0, "frequency_penalty": 2.0},
        {"temperature": 0, "repetition_penalty": 10.0},
        {"temperature": 0, "logit_bias": {7: 100.0}},
        {"temperature": 1.0, "seed": 3, "allowed_token_ids": [1, 2, 3]},
        {"temperature": 0, "logits_processors": [lambda output_token_ids, logits: -logits]},
    ],
    ids=lambda params: next(reversed(params)),
)
def test_logprobs_are_those_of_the_models_own_distribution(reference, params: dict) -> None:
    """Whatever chose the token: it is often not the most likely one, and its rank says so."""
    path, model = reference
    prompt = random_tokens(12)
    with open_llm(path) as llm:
        sampling = SamplingParams(**params, max_tokens=12, logprobs=2, prompt_logprobs=2)
        (output,) = llm.generate([prompt], sampling, use_tqdm=False)
    (completion,) = output.outputs
    check_output(model, prompt, completion, 2)
    check_prompt(model, output, 2)
    pairs = zip(completion.logprobs, completion.token_ids, strict=True)
    assert any(candidates[token_id].rank > 1 for candidates, token_id in pairs)


@pytest.mark.parametrize("kind", RequestOutputKind)
@pytest.mark.parametrize("how", ["EOS", "stop token"])
def test_a_stop_token_has_no_entry_because_it_does_not_join(tmp_path: Path, kind, how: str) -> None:
    model = make_qwen3(tmp_path, vocab_size=VOCAB_SIZE)
    prompt = random_tokens(10)
    with open_llm(tmp_path) as llm:
        (free,) = llm.generate([prompt], greedy(8), use_tqdm=False)
    token_ids = free.outputs[0].token_ids
    end = max(token_ids.index(token_id) for token_id in token_ids)  # late, and for the first time
    assert end > 1
    params = greedy(8, logprobs=3, output_kind=kind)
    if how == "EOS":
        edit_json(tmp_path / "config.json", eos_token_id=token_ids[end])
    else:
        params.stop_token_ids = [token_ids[end]]
    with open_llm(tmp_path) as llm:
        completion = join(run(llm, prompt, params), kind)
    assert completion.finish_reason == "stop"
    assert completion.token_ids == token_ids[:end]
    check_output(model, prompt, completion, 3)


def test_a_completion_without_tokens_has_no_entries(tmp_path: Path) -> None:
    make_qwen3(tmp_path, vocab_size=VOCAB_SIZE)
    with open_llm(tmp_path) as llm:
        (first,) = llm.generate([[1, 2]], greedy(1), use_tqdm=False)
        params = greedy(4, logprobs=2, stop_token_ids=first.outputs[0].token_ids)
        (output,) = llm.generate([[1, 2]], params, use_tqdm=False)
    (completion,) = output.outputs
    assert (completion.token_ids, completion.logprobs) == ([], [])
    assert completion.cumulative_logprob == 0


def run(llm: LLM, prompt: list[int], params: SamplingParams) -> list[RequestOutput]:
    """Every output of a request as the engine hands it out."""
    llm.engine.add_request("r", prompt, params)
    outputs = []
    while llm.engine.has_unfinished_requests():
        outputs += llm.engine.step()
    return outputs


def join(outputs: list[RequestOutput], kind: RequestOutputKind, index: int = 0) -> CompletionOutput:
    """One completion from all its pieces; each piece has one entry for each of its tokens."""
    pieces = [c for output in outputs for c in output.outputs if c.index == index]
    for piece in pieces:
        assert len(piece.logprobs) == len(piece.token_ids)
        for candidates, token_id in zip(piece.logprobs, piece.token_ids, strict=True):
            assert token_id in candidates
    last = pieces[-1]
    if kind is RequestOutputKind.DELTA:
        last.token_ids = [i for piece in pieces for i in piece.token_ids]
        last.logprobs = [entry for piece in pieces for entry in piece.logprobs]
    return last


def test_a_streams_entries_come_with_their_tokens(reference) -> None:
    path, model = reference
    prompt = random_tokens(20)
    with open_llm(path) as llm:
        outputs = list(llm.stream(prompt, greedy(7, logprobs=2, prompt_logprobs=1)))
    pieces = [output.outputs[0] for output in outputs]
    assert [len(piece.logprobs) for piece in pieces] == [1] * 7
    token_ids = [piece.token_ids[0] for piece in pieces]
    logprobs = [piece.logprobs[0] for piece in pieces]
    for n, piece in enumerate(pieces, start=1):  # the sum is over all tokens so far
        so_far = CompletionOutput(0, "", token_ids[:n], logprobs=logprobs[:n])
        so_far.cumulative_logprob = piece.cumulative_logprob
        check_output(model, prompt, so_far, 2)
    for output in outputs:
        check_prompt(model, output, 1)


def test_what_was_handed_out_does_not_grow_afterwards(reference) -> None:
    path, _ = reference
    with open_llm(path) as llm:
        params = greedy(5, logprobs=1, output_kind=RequestOutputKind.CUMULATIVE)
        outputs = run(llm, random_tokens(5), params)
    assert [len(output.outputs[0].logprobs) for output in outputs] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_every_completion_of_a_prompt_has_its_own(reference, kind: RequestOutputKind) -> None:
    path, model = reference
    prompt = random_tokens(21)
    params = SamplingParams(
        n=2, seed=5, temperature=1.5, max_tokens=6, logprobs=3, prompt_logprobs=2, output_kind=kind
    )
    with open_llm(path, max_num_batched_tokens=8, max_num_seqs=8) as llm:
        outputs = run(llm, prompt, params)
    completions = [join(outputs, kind, index) for index in range(2)]
    assert completions[0].token_ids != completions[1].token_ids
    for completion in completions:
        assert len(completion.token_ids) == 6
        check_output(model, prompt, completion, 3)
    check_prompt(model, outputs[-1], 2)


def test_decoded_tokens_are_the_texts_of_single_tokens(reference) -> None:
    """A byte that is no character by itself shows as U+FFFD, as in vLLM."""
    path, _ = reference
    with open_llm(path) as llm:
        (blank,) = llm.generate([[65, 66]], greedy(3, logprobs=20), use_tqdm=False)
        engine = llm.engine
        llm.engine = GuardedEngine(
            engine.config, engine.model_config, engine.executor, byte_tokenizer()
        )
        params = greedy(3, logprobs=20, prompt_logprobs=5)
        (output,) = llm.generate([[65, 228, 66]], params, use_tqdm=False)
    entries = [*output.outputs[0].logprobs, *output.prompt_logprobs[1:]]
    assert len(entries) == 5
    for token_id, candidate in (item for entry in entries for item in entry.items()):
        assert candidate.decoded_token == bytes([token_id]).decode("utf-8", "replace")
    assert any(len(entry) > 1 for entry in entries)
    texts = [c.decoded_token for entry in blank.outputs[0].logprobs for c in entry.values()]
    assert set(texts) == {""}  # no tokenizer, no text


# -- Of the prompt ------------------------------------------------------------------------------


@pytest.mark.small(chunk=[7, 2048], k=[0, 20])
@pytest.mark.parametrize("chunk", [1, 7, 16, 2048])
@pytest.mark.parametrize("k", KS)
def test_prompt_logprobs_equal_transformers_under_chunked_prefill(
    reference, k: int, chunk: int
) -> None:
    path, model = reference
    prompts = [random_tokens(n, seed=n) for n in (2, 16, 33)]
    options = {"max_num_batched_tokens": chunk, "max_num_seqs": min(chunk, 4)}
    with open_llm(path, **options) as llm:
        params = greedy(3, prompt_logprobs=k, logprobs=1)
        outputs = llm.generate(prompts, params, use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        check_prompt(model, output, k)
        check_output(model, prompt, output.outputs[0], 1)


@pytest.mark.parametrize("prompts", [[[5]], [[5], [6, 7]], [[6, 7], [5]]])
def test_a_prompt_of_one_token_has_one_entry_which_is_none(reference, prompts) -> None:
    """Whether or not a neighbour has rows of its own in that step."""
    path, _ = reference
    with open_llm(path) as llm:
        outputs = llm.generate(prompts, greedy(2, prompt_logprobs=1), use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert [entry is None for entry in output.prompt_logprobs] == [True, False][: len(prompt)]


def test_more_prompt_rows_than_sequences_are_worked_on_in_slices(
    reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that the logits of a long prompt never take more memory than those of a decode."""
    path, model = reference
    prompts = [random_tokens(n, seed=n) for n in (40, 23, 5)]
    with open_llm(path, max_num_seqs=3) as llm:
        runner_model = llm.engine.executor.model
        compute_logits, sizes = runner_model.compute_logits, []

        def measured(hidden: torch.Tensor) -> torch.Tensor:
            sizes.append(len(hidden))
            return compute_logits(hidden)

        monkeypatch.setattr(runner_model, "compute_logits", measured)
        params = [greedy(2, prompt_logprobs=k) for k in (4, 0, 20)]
        outputs = llm.generate(prompts, params, use_tqdm=False)
    assert max(sizes) == 3
    assert sum(sizes) == 39 + 22 + 4 + 2 * 3
    for output, k in zip(outputs, (4, 0, 20), strict=True):
        check_prompt(model, output, k)


def test_neighbours_that_ask_for_no_prompt_logprobs_have_none(reference) -> None:
    path, model = reference
    prompts = [random_tokens(10 + n, seed=n) for n in range(7)]
    ks = [None, 3, None, 0, 20, None, 1]
    params = [greedy(5, prompt_logprobs=k, logprobs=2) for k in ks]
    with open_llm(path, max_num_batched_tokens=16, max_num_seqs=5) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    for prompt, output, k in zip(prompts, outputs, ks, strict=True):
        check_output(model, prompt, output.outputs[0], 2)
        if k is None:
            assert output.prompt_logprobs is None
        else:
            check_prompt(model, output, k)


def test_a_prompt_with_logprobs_bypasses_the_prefix_cache_and_others_hit(reference) -> None:
    path, model = reference
    prompt = random_tokens(50)
    with open_llm(path) as llm:
        (first,) = llm.generate([prompt], greedy(), use_tqdm=False)
        both = [greedy(prompt_logprobs=2), greedy(), greedy(prompt_logprobs=0)]
        outputs = llm.generate([prompt] * 3, both, use_tqdm=False)
        (after,) = llm.generate([prompt], greedy(), use_tqdm=False)
    cached = [output.metrics.num_cached_prompt_tokens for output in (first, *outputs, after)]
    assert cached == [0, 0, 48, 0, 48]
    check_prompt(model, outputs[0], 2)
    check_prompt(model, outputs[2], 0)
    assert outputs[1].prompt_logprobs is None
    for output in (*outputs, after):
        assert output.outputs[0].token_ids == first.outputs[0].token_ids


def test_what_a_prompt_with_logprobs_computes_is_there_for_others(reference) -> None:
    path, _ = reference
    prompt = random_tokens(50)
    with open_llm(path) as llm:
        llm.generate([prompt], greedy(prompt_logprobs=2), use_tqdm=False)
        (after,) = llm.generate([prompt], greedy(), use_tqdm=False)
    assert after.metrics.num_cached_prompt_tokens == 48


@pytest.mark.parametrize("caching", [True, False])
def test_preemption_in_the_middle_of_a_prompt_starts_its_entries_again(
    reference, caching: bool
) -> None:
    """Older requests decode and take the blocks of a prompt that is being computed in chunks."""
    path, model = reference
    prompts = [random_tokens(8, seed=n) for n in range(2)] + [random_tokens(60, seed=2)]
    params = [greedy(40, logprobs=1)] * 2 + [greedy(8, logprobs=3, prompt_logprobs=3)]
    options = {"block_size": 4, "num_kv_blocks": 24, "max_num_batched_tokens": 4}
    interrupted = []
    with open_llm(path, max_num_seqs=3, enable_prefix_caching=caching, **options) as llm:

        def watch(plan, batch, result, times) -> None:
            interrupted.extend(seq.needs_prompt_outputs for seq in plan.preempted)

        llm.engine.observers.append(watch)
        outputs = llm.generate(prompts, params, use_tqdm=False)
    assert any(interrupted), "no sequence lost its blocks before its prompt was computed"
    for prompt, output, k in zip(prompts, outputs, (1, 1, 3), strict=True):
        check_output(model, prompt, output.outputs[0], k)
    check_prompt(model, outputs[2], 3)


def test_preemption_after_the_prompt_leaves_its_entries_alone(reference) -> None:
    path, model = reference
    prompts = [random_tokens(20, seed=n) for n in range(3)]
    with open_llm(path, block_size=4, num_kv_blocks=20) as llm:
        params = greedy(30, logprobs=2, prompt_logprobs=2)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert llm.stats.num_preemptions > 0
    for prompt, output in zip(prompts, outputs, strict=True):
        check_prompt(model, output, 2)
        check_output(model, prompt, output.outputs[0], 2)


def test_a_failing_step_in_the_middle_of_a_prompt_costs_no_entry(
    reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, model = reference
    prompt = random_tokens(30)
    with open_llm(path, max_num_batched_tokens=8, max_num_seqs=8) as llm:
        llm.engine.add_request("r", prompt, greedy(4, logprobs=1, prompt_logprobs=1))
        llm.engine.step()
        llm.engine.step()
        with monkeypatch.context() as patched, pytest.raises(ZeroDivisionError):
            patched.setattr(llm.engine.executor, "forward", lambda batch, changes: 1 / 0)
            llm.engine.step()
        outputs = []
        while llm.engine.has_unfinished_requests():
            outputs += llm.engine.step()
    check_prompt(model, outputs[-1], 1)
    check_output(model, prompt, outputs[-1].outputs[0], 1)


# -- Limits -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_more_than_max_logprobs_are_refused(reference, name: str) -> None:
    path, _ = reference
    with open_llm(path, max_logprobs=5) as llm:
        llm.generate([[1, 2]], greedy(**{name: 5}), use_tqdm=False)
        with pytest.raises(ValueError, match=f"{name}=6.*max_logprobs=5"):
            llm.generate([[1, 2]], greedy(**{name: 6}), use_tqdm=False)


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_a_request_for_more_than_the_vocabulary_breaks_no_step(tmp_path: Path, name: str) -> None:
    """It gets all there are, or a `ValueError` before it is queued; it must not fail others."""
    make_qwen3(tmp_path, vocab_size=12)
    with open_llm(tmp_path) as llm:
        try:
            (output,) = llm.generate([[1, 2]], greedy(2, **{name: 15}), use_tqdm=False)
        except ValueError as refusal:
            assert name in str(refusal)
        else:
            entries = output.outputs[0].logprobs or output.prompt_logprobs[1:]
            assert [len(entry) for entry in entries] == [12] * len(entries)
