"""Prompt embeddings in the engine: chunks, preemption, caches, drafts, penalties, aborts."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from embedded_prompts import Prompt, greedy, mixed_prompts, random_rows, tokens_of
from shadow_kv import Corruption, ShadowRun
from tiny_checkpoints import make_qwen3

from nanoserve import LLM, SamplingParams
from nanoserve.engine import prefix_cache
from nanoserve.engine.executor import SlotUpdate
from nanoserve.engine.prompt_embeds import PromptEmbeds, StepEmbeds
from nanoserve.engine.sequence import Sequence
from nanoserve.features.kv_transfer.host_tier import HostTier
from nanoserve.features.prompt_embeds import PromptEmbedsInput

OPTIONS: dict[str, Any] = {
    **{"skip_tokenizer_init": True, "enable_prompt_embeds": True, "dtype": "float32"},
    **{"block_size": 4, "max_model_len": 120, "num_kv_blocks": 200, "max_num_seqs": 4},
    **{"max_num_batched_tokens": 48},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("embeds")
    return folder, make_qwen3(folder)


@pytest.fixture(scope="module")
def expected(model: tuple[Path, Any]) -> list[list[int]]:
    """Tokens of each of `mixed_prompts` by itself, without a prefix cache."""
    folder, reference = model
    options = OPTIONS | {"enable_prefix_caching": False, "max_num_seqs": 1}
    with LLM(str(folder), **options) as llm:
        return tokens_of(llm, mixed_prompts(reference))


SCHEDULES: dict[str, dict[str, Any]] = {
    "small chunks": {"max_num_batched_tokens": 5},
    "one token at a time": {"long_prefill_token_threshold": 1},
    "a tiny pool": {"num_kv_blocks": 31},
    "async": {"async_scheduling": True},
    "async, a tiny pool": {"async_scheduling": True, "num_kv_blocks": 31},
    "large blocks": {"block_size": 32, "num_kv_blocks": 16},
    "ngram": {"speculative_config": {"method": "ngram", "adaptive": False}},
    "suffix, async": {
        "speculative_config": {"method": "suffix", "adaptive": False},
        "async_scheduling": True,
    },
    "host tier": {"num_kv_blocks": 31, "kv_offloading_size": 0.001},
    "torch": {"attention_backend": "torch"},
    "int8 cache": {"kv_cache_dtype": "int8"},
}


@pytest.mark.small(name=["small chunks", "async, a tiny pool", "ngram", "host tier"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_and_hits_change_nothing(
    name: str, model: tuple[Path, Any], expected: list[list[int]]
) -> None:
    folder, reference = model
    prompts = mixed_prompts(reference)
    with LLM(str(folder), **OPTIONS | SCHEDULES[name]) as llm:
        first, again = tokens_of(llm, prompts), tokens_of(llm, prompts[::-1])[::-1]
        hits, preemptions = llm.stats.prefix_cache_hits, llm.stats.num_preemptions
        llm.engine.scheduler.check()
        tiers = [each for each in llm.engine.extensions if isinstance(each, HostTier)]
    assert all(tier.stats.hits > 0 for tier in tiers) and bool(tiers) == (name == "host tier")
    if name != "int8 cache":
        assert first == expected
    assert again == first
    assert hits > 0
    assert (preemptions > 0) == ("tiny" in name or name == "host tier")


def test_equal_embeddings_hit_and_others_never_do(model: tuple[Path, Any]) -> None:
    folder, reference = model
    rows = random_rows(reference, 22)
    ids = list(range(24))
    changed = rows.clone()
    changed[6, 5] += 1e-3
    cases: list[tuple[Prompt, int]] = [
        ({"prompt_embeds": rows}, 20),
        ({"prompt_embeds": rows.clone()[:13]}, 12),  # a prefix of the rows
        ({"prompt_embeds": torch.cat([rows, rows])}, 20),
        ({"prompt_embeds": changed}, 4),
        ({"prompt_embeds": rows.flip(0)}, 0),
        ({"prompt_embeds": rows[[1, 0, *range(2, 22)]]}, 0),  # the same rows in another order
        ({"prompt_embeds": rows[4:]}, 0),
        ({"prompt_embeds": rows, "cache_salt": "a"}, 0),
        ({"prompt_token_ids": [0] * 22}, 0),  # the ids of the placeholders
        ({"prompt_token_ids": [0] * 22, "prompt_embeds_pieces": [(0, rows[:12])]}, 12),
        ({"prompt_token_ids": [0] * 22, "prompt_embeds_pieces": [(0, rows[:3])]}, 0),
    ]
    for prompt, num_hits in cases:
        with LLM(str(folder), **OPTIONS) as llm:
            llm.generate({"prompt_embeds": rows}, greedy(1), use_tqdm=False)
            (output,) = llm.generate(prompt, greedy(1), use_tqdm=False)
            assert output.num_cached_tokens == num_hits, prompt
    pieces = [(9, rows[:5])]
    others: list[tuple[Prompt, int]] = [
        ({"prompt_token_ids": ids, "prompt_embeds_pieces": pieces}, 20),
        ({"prompt_token_ids": ids}, 8),  # the blocks before the piece
        ({"prompt_token_ids": ids, "prompt_embeds_pieces": [(9, rows[:4])]}, 12),
        ({"prompt_token_ids": ids, "prompt_embeds_pieces": [(10, rows[:5])]}, 8),
        ({"prompt_token_ids": ids, "prompt_embeds_pieces": [(9, rows[:2]), (11, rows[2:5])]}, 20),
        ({"prompt_token_ids": [*ids[:16], *ids[:8]], "prompt_embeds_pieces": pieces}, 16),
    ]
    for prompt, num_hits in others:
        with LLM(str(folder), **OPTIONS) as llm:
            first = {"prompt_token_ids": ids, "prompt_embeds_pieces": pieces}
            llm.generate(first, greedy(1), use_tqdm=False)
            (output,) = llm.generate(prompt, greedy(1), use_tqdm=False)
            assert output.num_cached_tokens == num_hits, prompt


def test_hashes_that_collide_are_no_hits(
    model: tuple[Path, Any], expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hash of a block finds it; ids and SHA-256 of its embeddings are compared."""
    folder, reference = model
    monkeypatch.setattr(prefix_cache, "chain_hash", lambda parent, ids: b"same")
    prompts = mixed_prompts(reference)
    with LLM(str(folder), **OPTIONS) as llm:
        assert tokens_of(llm, prompts) == tokens_of(llm, prompts) == expected


class ShadowEmbeds(ShadowRun):
    """Half of the prompts have embeddings at some positions: one of two vectors."""

    rows = np.arange(4, dtype=np.uint8).reshape(2, 2)

    def _embeds_of(self, prompt: list[int]) -> PromptEmbeds | None:
        positions = np.array([i for i in range(len(prompt)) if self.rng.random() < 0.4], np.int64)
        if self.rng.random() < 0.5 or not len(positions):
            return None
        chosen = [self.rng.randrange(2) for _ in positions]
        return PromptEmbeds.of(positions, self.rows[chosen], "float16", self.block_size)

    def _content(self, seq: Sequence, token_ids: list[int]) -> list[Any]:
        content: list[Any] = list(token_ids)
        if seq.prompt_embeds is not None:
            embeds = seq.prompt_embeds
            for position, row in zip(embeds.positions, embeds.rows, strict=True):
                content[position] = row.tobytes()
        return content


def test_no_run_reads_kv_of_other_embeddings(by_size: Callable[..., int]) -> None:
    hit, num_runs = 0, by_size(150, 1500, 10_000)
    for seed in range(num_runs):
        run = ShadowEmbeds(seed)
        try:
            run.run()
        except (Corruption, RuntimeError) as error:
            pytest.fail(f"seed {seed}: {error}")
        hit += run.scheduler.num_hit_tokens > 0
    assert hit > 0.1 * num_runs


def test_the_oracle_sees_keys_without_embeddings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PromptEmbeds, "key_of_block", lambda self, index: b"")
    with pytest.raises(Corruption):
        for seed in range(300):
            ShadowEmbeds(seed).run()


def test_completions_share_the_prompt(model: tuple[Path, Any]) -> None:
    folder, reference = model
    prompt = mixed_prompts(reference)[4]
    params = [SamplingParams(n=3, seed=1, max_tokens=6, temperature=1.0, ignore_eos=True)]
    with LLM(str(folder), **OPTIONS) as llm:
        (output,) = llm.generate([prompt], params, use_tqdm=False)
        computed = llm.stats.num_computed_tokens
    with LLM(str(folder), **OPTIONS | {"num_kv_blocks": 40, "max_num_seqs": 1}) as llm:
        (other,) = llm.generate([prompt], params, use_tqdm=False)
    assert computed < 33 + 3 * 6 + 3 * 4  # the prompt was computed once
    found = [completion.token_ids for completion in output.outputs]
    assert found == [completion.token_ids for completion in other.outputs]
    assert len({tuple(tokens) for tokens in found}) > 1


def test_aborts_and_failed_steps_leave_nothing(
    model: tuple[Path, Any], expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, reference = model
    prompts, rng = mixed_prompts(reference), random.Random(0)
    with LLM(str(folder), **OPTIONS | {"max_num_batched_tokens": 7}) as llm:
        engine, finished = llm.engine, {}
        original = engine.executor.forward
        fails = iter([False] * 5 + [True] + [False] * 4 + [True] + [False] * 1000)

        def forward(*args: Any) -> Any:
            handle = original(*args)
            if next(fails):
                raise RuntimeError("planned")
            return handle

        monkeypatch.setattr(engine.executor, "forward", forward)
        for round_ in range(3):
            for index, prompt in enumerate(prompts):
                engine.add_request(f"{round_} {index}", prompt, greedy())
        num_failures = 0
        while engine.has_unfinished_requests():
            try:
                outputs = engine.step()
            except RuntimeError:
                num_failures += 1
                continue
            finished |= {o.request_id: list(o.outputs[0].token_ids) for o in outputs}
            if rng.random() < 0.2:
                engine.abort_request(f"1 {rng.randrange(len(prompts))}")
        engine.scheduler.check()
        manager = engine.scheduler.block_manager
        assert manager.num_free_blocks == manager.num_blocks and num_failures == 2
    for round_ in (0, 2):
        for index in range(len(prompts)):
            assert finished[f"{round_} {index}"] == expected[index]


# ---------------------------------------------------------------- what reads token ids


def test_placeholders_are_in_no_penalty(model: tuple[Path, Any]) -> None:
    """Which ids stand for embeddings makes no difference, whatever reads a prompt's tokens."""
    folder, reference = model
    rows = random_rows(reference, 9)
    params = greedy(20, repetition_penalty=1.5)
    found = []
    with LLM(str(folder), **OPTIONS) as llm:
        plain = tokens_of(llm, [{"prompt_token_ids": [5], "prompt_embeds_pieces": [(0, rows[:1])]}])
        for placeholder in (0, plain[0][0], plain[0][1]):
            ids = [*[placeholder] * 9, 7, 8]
            prompt = {"prompt_token_ids": ids, "prompt_embeds_pieces": [(0, rows)]}
            found.append(tokens_of(llm, [prompt], params)[0])
    assert found[0] == found[1] == found[2]
    embeds = PromptEmbeds.of(np.array([0, 2]), np.zeros((2, 4), np.uint8), "float32", 4)
    seq = Sequence("r", [5, 6, 7, 8], params, 100, prompt_embeds=embeds)
    assert SlotUpdate.of(seq).prompt_token_ids == [6, 8]


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_no_draft_token_is_a_placeholder(method: str, model: tuple[Path, Any]) -> None:
    folder, reference = model
    options = {"method": method, "adaptive": False, "num_speculative_tokens": 4}
    with LLM(str(folder), **OPTIONS, speculative_config=options) as llm:
        (speculation,) = [each for each in llm.engine.extensions if hasattr(each, "proposer")]
        ids = [1, 2, 3, 4, 250, 250, 5, 6, 1, 2, 3, 4]
        plain = Sequence("plain", list(ids), greedy(), 100)
        embeds = PromptEmbeds.of(np.array([4, 5]), np.zeros((2, 8), np.uint8), "float16", 4)
        with_embeds = Sequence("embeds", list(ids), greedy(), 100, prompt_embeds=embeds)
        later = PromptEmbeds.of(np.array([6]), np.zeros((1, 8), np.uint8), "float16", 4)
        cut = Sequence("cut", list(ids), greedy(), 100, prompt_embeds=later)
        wanted = [(seq, 4) for seq in (plain, with_embeds, cut)]
        assert speculation.proposer.propose(wanted) == [[250, 250, 5, 6], [], [250, 250]]
        # A run of placeholders that continues itself proposes nothing either.
        prompt = {"prompt_embeds": random_rows(reference, 30)}
        drafted: list[int] = []
        observe = lambda plan, *_: drafted.extend(t for d in plan.draft_tokens.values() for t in d)  # noqa: E731
        llm.engine.observers.append(observe)
        (tokens,) = tokens_of(llm, [prompt], greedy(60))
        assert set(drafted) <= set(tokens)


def test_outputs_have_the_callers_ids(model: tuple[Path, Any]) -> None:
    folder, reference = model
    rows = random_rows(reference, 3)
    with LLM(str(folder), **OPTIONS) as llm:
        (whole,) = llm.generate({"prompt_embeds": rows, "prompt": "soft"}, greedy(), use_tqdm=False)
        prompt = {"prompt_token_ids": [9, 7, 7, 7, 8], "prompt_embeds_pieces": ((1, rows),)}
        (mixed,) = llm.generate(prompt, greedy(), use_tqdm=False)
    assert (whole.prompt, whole.prompt_token_ids) == ("soft", [0, 0, 0])
    assert mixed.prompt_token_ids == [9, 7, 7, 7, 8]


def test_rows_are_copied(model: tuple[Path, Any], expected: list[list[int]]) -> None:
    folder, reference = model
    with LLM(str(folder), **OPTIONS) as llm:
        for index, prompt in enumerate(mixed_prompts(reference)):
            llm.engine.add_request(str(index), prompt, greedy())
            for rows in [prompt.get("prompt_embeds"), *prompt.get("prompt_embeds_pieces", ())]:
                tensor = rows[1] if isinstance(rows, tuple) else rows
                if tensor is not None:
                    tensor.fill_(7.0)
        found = {}
        while llm.engine.has_unfinished_requests():
            found |= {o.request_id: list(o.outputs[0].token_ids) for o in llm.engine.step()}
    assert [found[str(index)] for index in range(len(expected))] == expected


# ---------------------------------------------------------------- input


def test_steps_without_embeddings_have_no_input(model: tuple[Path, Any]) -> None:
    folder, reference = model
    for has_option in (False, True):
        with LLM(str(folder), **OPTIONS | {"enable_prompt_embeds": has_option}) as llm:
            inputs = []
            original = llm.engine.executor.forward
            llm.engine.executor.forward = lambda batch, given, f=original, seen=inputs: (  # type: ignore[method-assign]
                seen.append(given.embeds) or f(batch, given)
            )
            tokens_of(llm, [{"prompt_token_ids": [1, 2, 3]}])
            assert inputs == [None] * len(inputs) and inputs
            has_extension = any(isinstance(e, PromptEmbedsInput) for e in llm.engine.extensions)
            assert has_extension == has_option
            if has_option:
                inputs.clear()
                tokens_of(llm, [{"prompt_embeds": random_rows(reference, 60)}])
                sizes = [len(embeds.indices) for embeds in inputs if embeds is not None]
                assert sizes == [48, 12]


def test_a_step_travels_as_bytes() -> None:
    rng = np.random.default_rng(0)
    for num_rows, size in ((1, 1), (5, 96), (700, 32)):
        rows = rng.integers(0, 256, (num_rows, size), dtype=np.uint8)
        sent = StepEmbeds(rng.permutation(num_rows), rows)
        came = StepEmbeds.from_bytes(sent.to_bytes())
        assert np.array_equal(came.indices, sent.indices) and np.array_equal(came.rows, rows)
        torch.from_numpy(came.rows).add_(1)  # writable, as torch wants it


def reject(rows: torch.Tensor) -> dict[str, tuple[Any, str]]:
    """Prompts, and what the message about each has to say. `rows` are [5, 48]."""
    ids = [1, 2, 3, 4, 5, 6]
    nan = rows.clone()
    nan[3, 7] = float("nan")
    huge = rows.clone()
    huge[1, 2] = float("inf")

    def pieces(*given: Any) -> Prompt:
        return {"prompt_token_ids": ids, "prompt_embeds_pieces": list(given)}

    return {
        "no tensor": ({"prompt_embeds": [[1.0] * 48]}, "must be a dense torch.Tensor, not list"),
        "numpy": ({"prompt_embeds": rows.numpy()}, "not ndarray"),
        "sparse": ({"prompt_embeds": rows.to_sparse()}, "dense"),
        "meta": ({"prompt_embeds": rows.to("meta")}, "on the device .meta. has no numbers"),
        "integers": ({"prompt_embeds": rows.int()}, "dtype int32 must be one of"),
        "float64": ({"prompt_embeds": rows.double()}, "float64"),
        "width": ({"prompt_embeds": rows[:, :47]}, r"\[5, 47\].*\[number of tokens, 48\]"),
        "no rows": ({"prompt_embeds": rows[:0]}, r"\[0, 48\]"),
        "one row": ({"prompt_embeds": rows[0]}, r"shape \[48\]"),
        "batch": ({"prompt_embeds": rows.expand(2, 5, 48)}, r"\[2, 5, 48\]"),
        "nan": ({"prompt_embeds": nan}, "row 3 has nan at 7.* 1 of 240"),
        "infinite": ({"prompt_embeds": huge}, "row 1 has inf at 2"),
        "long": ({"prompt_embeds": rows[:1].expand(120, 48)}, "120"),
        "huge": ({"prompt_embeds": rows[:1].expand(2**40, 48)}, str(2**40)),
        "both": ({"prompt_embeds": rows, "prompt_token_ids": ids}, "pass 'prompt_token_ids' and"),
        "all": (pieces((0, rows)) | {"prompt_embeds": rows}, "pass either"),
        "no ids": ({"prompt_embeds_pieces": [(0, rows)]}, "needs 'prompt_token_ids'"),
        "text": ({"prompt": "x", "prompt_embeds_pieces": [(0, rows)]}, "needs 'prompt_token_ids'"),
        "no pieces": (pieces(), "must be a list of"),
        "no list": ({"prompt_token_ids": ids, "prompt_embeds_pieces": rows}, "must be a list of"),
        "no pair": (pieces((0, rows), rows), r"pieces\[1\] must be \(position, tensor\)"),
        "position": (pieces((1.5, rows)), r"pieces\[0\] must be \(position, tensor\)"),
        "negative": (pieces((-1, rows)), "positions -1 to 3, but the prompt has 6"),
        "outside": (pieces((2, rows)), "positions 2 to 6, but the prompt has 6"),
        "overlap": (pieces((2, rows[:2]), (0, rows[:3])), "positions 0 to 2, and another.* at 2"),
        "same place": (pieces((1, rows[:1]), (1, rows[:1])), "overlap"),
    }


def test_bad_embeddings_are_refused_with_numbers(model: tuple[Path, Any]) -> None:
    folder, reference = model
    cases = reject(random_rows(reference, 5))
    with LLM(str(folder), **OPTIONS) as llm:
        for name, (prompt, message) in cases.items():
            with pytest.raises(ValueError, match=message):
                llm.generate(prompt, greedy(), use_tqdm=False)
                pytest.fail(name)
        with pytest.raises(ValueError, match="prompt_logprobs=2 needs a prompt of tokens"):
            prompt = {"prompt_embeds": random_rows(reference, 5)}
            llm.generate(prompt, greedy(prompt_logprobs=2), use_tqdm=False)
        with pytest.raises(ValueError, match="beam search takes text and token ids"):
            from nanoserve import BeamSearchParams

            llm.beam_search([prompt], BeamSearchParams(beam_width=2, max_tokens=2))
        with pytest.raises(ValueError, match="'prompt_embeds' cannot be truncated"):
            kwargs = {"truncate_prompt_tokens": 2}
            llm.generate(prompt, greedy(), use_tqdm=False, tokenization_kwargs=kwargs)
        assert not llm.engine.has_unfinished_requests()
        assert len(tokens_of(llm, [prompt])[0]) == 10
        nothing = {"prompt_token_ids": [1], "prompt_embeds": None, "prompt_embeds_pieces": None}
        assert len(tokens_of(llm, [nothing])[0]) == 10


def test_without_the_option_it_is_named(model: tuple[Path, Any]) -> None:
    folder, reference = model
    rows = random_rows(reference, 5)
    with LLM(str(folder), **OPTIONS | {"enable_prompt_embeds": False}) as llm:
        for prompt in (
            {"prompt_embeds": rows},
            {"prompt_token_ids": [1] * 5, "prompt_embeds_pieces": [(0, rows)]},
        ):
            with pytest.raises(ValueError, match="enable_prompt_embeds=True"):
                llm.generate(prompt, greedy(), use_tqdm=False)
