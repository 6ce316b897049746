"""However it is computed, a guided output is the same one."""

import logging
import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from model_fuzz import MAX_MODEL_LEN, VOCAB_SIZE, Case, Difference, ModelRun
from proposers import Mixed, Wrong, speculation_of
from tiny_checkpoints import make_qwen3

from nanoserve import LLM, SamplingParams, StructuredOutputsParams

pytest.importorskip("llguidance", reason="pip install 'nanoserve[guided]'")
from grammars import GRAMMARS, FromScratch

from nanoserve.engine.extension import Extension
from nanoserve.features.speculative.config import SpeculativeConfig
from nanoserve.features.speculative.extension import Speculation
from nanoserve.features.speculative.suffix import SuffixProposer
from nanoserve.features.structured.config import StructuredOutputsConfig
from nanoserve.features.structured.extension import StructuredOutputs
from nanoserve.features.structured.guidance import to_llguidance

NGRAM = {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("guided")
    make_qwen3(path, vocab_size=VOCAB_SIZE)
    return path


@pytest.fixture(scope="module")
def reference(path: Path) -> Iterator[LLM]:
    """One for all: nothing is shared in it, nothing is drafted, and each request is alone."""
    with LLM(
        path,
        tokenizer="tiny-qwen3",
        max_model_len=MAX_MODEL_LEN,
        num_kv_blocks=128,
        enable_prefix_caching=False,
        attention_backend="torch",
        structured_outputs_config={"jump_forward": False},
    ) as llm:
        yield llm


def left_behind(extension: Extension) -> object:
    """Return what an extension still keeps of sequences that have ended."""
    if isinstance(extension, StructuredOutputs):
        return extension._guided or extension._forced or extension._compilations
    return extension._records if isinstance(extension, Speculation) else None


class GuidedRun(ModelRun):
    """A random life in which most requests have a grammar."""

    def _random_case(self) -> Case:
        case = super()._random_case()
        if self.rng.random() < 0.75:
            guide = self.rng.choice(GRAMMARS)
            case.settings["structured_outputs"] = StructuredOutputsParams(**guide)
            case.settings["max_tokens"] = self.rng.randint(1, 40)
            case.settings.pop("min_tokens", None)
            # A stop token may be the only one that comes next, and be held back.
            if self.rng.random() < 0.3 and "stop_token_ids" not in case.settings:
                case.settings["min_tokens"] = self.rng.randint(0, case.settings["max_tokens"])
            # With these nothing might be left to choose: a test of its own.
            case.settings.pop("allowed_token_ids", None)
            self.counts["guided requests"] += 1
        return case


def guided_run(seed: int, path: Path, reference: LLM) -> GuidedRun:
    rng = random.Random(f"grammars of {seed}")
    options: dict[str, Any] = {"structured_outputs_config": {"jump_forward": rng.random() < 0.8}}
    if rng.random() < 0.6:
        draft = {"method": "draft_model", "model": str(path), "dtype": "float32"}
        options["speculative_config"] = rng.choice([NGRAM, {"method": "suffix"}, draft]) | {
            "num_speculative_tokens": rng.choice([1, 4, 20]),
            "adaptive": rng.random() < 0.3,
        }
    run = GuidedRun(seed, path, reference, **options)
    if "speculative_config" in options:
        speculation = speculation_of(run.llm)
        suffix = SuffixProposer(SpeculativeConfig(method="suffix"))
        own = speculation.proposer
        mixed = Mixed(rng, VOCAB_SIZE, [own, suffix])
        if not own.is_model:
            speculation.proposer = rng.choice([own, Wrong(VOCAB_SIZE), mixed, mixed])
    return run


def test_every_request_gets_what_it_gets_alone(
    path: Path, reference: LLM, by_size: Callable[..., int], caplog: pytest.LogCaptureFixture
) -> None:
    """With jump-forward and draft tokens, a step ahead, preemption, aborts and failures."""
    caplog.set_level(logging.CRITICAL, logger="nanoserve")  # requests are made to fail
    counts: Counter[str] = Counter()
    for seed in range(by_size(4, 40, 200)):
        try:
            run = guided_run(seed, path, reference)
            run.run()
        except (Difference, RuntimeError) as error:
            pytest.fail(f"seed {seed}, {run.options}: {error!r}")
        counts += run.counts
        stats = run.llm.stats
        counts["draft tokens"] += getattr(stats, "num_draft_tokens", 0)
        counts["accepted ones"] += getattr(stats, "num_accepted_tokens", 0)
        assert not any(map(left_behind, run.engine.extensions)), "a grammar has stayed behind"
    print(dict(counts))
    # The runs must be hard enough to mean something.
    wanted = ["requests", "guided requests", "aborts", "preemptions", "hit tokens", "streams"]
    assert all(counts[name] for name in [*wanted, "draft tokens", "accepted ones"]), counts


# In few tries those of all kinds that come to their end; the others may go on for ever.
@pytest.mark.small(number=[0, 1, 4, 7, 8, 9])
@pytest.mark.parametrize("number", range(len(GRAMMARS)))
def test_alone_it_gets_what_masks_from_scratch_leave(
    number: int, reference: LLM, by_size: Callable[..., int]
) -> None:
    """The mask comes last, and before the filters."""
    rng = random.Random(number)
    guide = StructuredOutputsParams(**GRAMMARS[number])
    grammar = to_llguidance(guide.source(StructuredOutputsConfig()))
    ended = 0
    for seed in range(by_size(2, 8, 40)):
        stops = [rng.randrange(VOCAB_SIZE) for _ in range(rng.choice([0, 0, 30]))]
        settings: dict[str, Any] = {
            "temperature": rng.choice([0, 0.7, 1.5]),
            "seed": seed,
            "max_tokens": 60,
            "logprobs": 2,
            "stop_token_ids": stops,
            "top_k": rng.choice([0, 0, 20]),
            "top_p": rng.choice([1, 1, 0.9]),
            "min_p": rng.choice([0, 0, 0.05]),
            "repetition_penalty": rng.choice([1, 1, 1.3]),
            "logit_bias": rng.choice([None, {rng.randrange(VOCAB_SIZE): 9 for _ in range(20)}]),
        }
        prompt = [rng.randrange(VOCAB_SIZE) for _ in range(10)]
        scratch = FromScratch(reference.engine.tokenizer._hf, grammar, stops)
        guided = SamplingParams(structured_outputs=guide, **settings)
        masked = SamplingParams(logits_processors=[scratch], **settings)
        ours, theirs = (
            reference.generate([prompt], params, use_tqdm=False)[0] for params in (guided, masked)
        )
        assert ours.error is None and theirs.error is None
        (ours,), (theirs,) = ours.outputs, theirs.outputs
        assert ours.token_ids == theirs.token_ids and ours.text == theirs.text
        assert [*map(list, ours.logprobs)] == [*map(list, theirs.logprobs)]
        # The masks do not know that nothing can come any more.
        assert ours.finish_reason == theirs.finish_reason or ours.finish_reason == "stop"
        ended += ours.finish_reason == "stop"
    has_end = guide.json_object is None and guide.disable_any_whitespace is None
    assert ended > 0 or not has_end  # else strings and spaces may go on for ever
