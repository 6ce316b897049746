"""One step ahead, nothing waits for a GPU but for the tokens of the step before.

    pytest -m gpu tests/gpu/test_waiting_gpu.py

torch refuses copies that wait (`set_sync_debug_mode`), but lets those through that say
`non_blocking=True`, be their memory pinned or not. So each step begins with a kernel that does
nothing for a while, and must be launched and sampled before that one has ended.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from no_waiting import no_waiting
from seen_answers import Seen, are_same, seen
from tiny_checkpoints import make_qwen3

from nanoserve import LLM, RequestOutput, SamplingParams, StructuredOutputsParams
from nanoserve.engine.batch import Batch
from nanoserve.engine.executor import ForwardInputs, SampleInputs
from nanoserve.worker.model_runner import Handle

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

SLEEP_CYCLES = 60_000_000  # about 30 ms; a step of this model is launched in a tenth of that
NUM_ROWS = 8
PLAIN: dict[str, Any] = {"temperature": 0.8, "seed": 1, "max_tokens": 16, "ignore_eos": True}
LETTERS = StructuredOutputsParams(regex="[a-z]{40}")
# What two requests of eight ask for.
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "greedy": {"temperature": 0},
    "filtered": {"top_k": 20, "top_p": 0.9},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.2},
    "logit_bias": {"logit_bias": {7: 3.0, 9: -1.0}},
    "min_tokens": {"min_tokens": 15, "stop_token_ids": [3, 4]},
    "bad_words": {"bad_words": ["a", "the"]},
    "allowed_token_ids": {"allowed_token_ids": [*range(40, 90)]},
    "logprobs": {"logprobs": 2},
    "prompt_logprobs": {"prompt_logprobs": 2, "logprobs": 0},
    "grammar": {"structured_outputs": LETTERS},
    "grammar and top_k": {"structured_outputs": LETTERS, "top_k": 9},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen3")
    make_qwen3(path, vocab_size=2048, num_hidden_layers=2)
    return path


class Watched:
    """An engine's executor, whose steps must be launched while the GPU is busy with them.

    rows: by step, (all rows, decode rows, pending ones). waited: the steps, by number, that were
    launched only when the GPU had come to them.
    """

    def __init__(
        self,
        llm: LLM,
        monkeypatch: pytest.MonkeyPatch,
        context: Callable[[], AbstractContextManager[None]] = no_waiting,
    ) -> None:
        self._context = context
        self.rows: list[tuple[int, int, int]] = []
        self.waited: list[int] = []
        self._slept: list[torch.cuda.Event] = []
        executor = llm.engine.executor
        self._forward, self._sample = executor.forward, executor.sample
        monkeypatch.setattr(executor, "forward", self.forward)
        monkeypatch.setattr(executor, "sample", self.sample)

    def forward(self, batch: Batch, inputs: ForwardInputs) -> Handle:
        header = batch.header
        self.rows.append((header.num_rows, header.num_decode_rows, header.num_pending))
        torch.cuda._sleep(SLEEP_CYCLES)
        self._slept.append(torch.cuda.Event())
        self._slept[-1].record()
        with self._context():
            return self._forward(batch, inputs)

    def sample(self, handle: Handle, inputs: SampleInputs) -> None:
        with self._context():
            self._sample(handle, inputs)
        # One step ahead, the step before has been collected meanwhile, too.
        if self._slept[-1].query():
            self.waited.append(len(self.rows) - 1)


def answers(llm: LLM, kind: str) -> list[Seen]:
    """Answer eight requests, the last of which comes while the others decode."""
    params = [
        SamplingParams(**PLAIN | (KINDS[kind] if i % 4 == 3 else {})) for i in range(NUM_ROWS)
    ]
    done: dict[str, RequestOutput] = {}

    def step() -> None:
        for output in llm.engine.step():
            if output.finished:
                done[output.request_id] = output

    for i in range(NUM_ROWS - 1):
        llm.engine.add_request(str(i), [i + 1] * (3 + i), params[i])
    for _ in range(3):
        step()
    llm.engine.add_request(str(NUM_ROWS - 1), [j % 300 for j in range(60)], params[-1])
    while llm.engine.has_unfinished_requests():
        step()
    return [seen(done[str(i)]) for i in range(NUM_ROWS)]


@pytest.mark.parametrize(
    "graphs",
    [
        {},
        {"enforce_eager": True},
        {"capture_sampling": True},
        {"capture_mixed_steps": False},
    ],
    ids=str,
)
def test_no_row_has_the_others_wait(
    model: Path, graphs: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts, decode steps and steps of both are launched while the step before still runs."""
    has_grammars = find_spec("llguidance") is not None
    kinds = [kind for kind in KINDS if has_grammars or not kind.startswith("grammar")]
    options: dict[str, Any] = {"device": "cuda", "dtype": "float32", "tokenizer": "tiny-qwen3"}
    options |= {"max_num_seqs": NUM_ROWS, "num_kv_blocks": 100, "max_num_batched_tokens": 40}
    options |= {"enable_prefix_caching": False, "seed": 0, **graphs}
    # A row that might jump forward is left out of the step ahead.
    options["structured_outputs_config"] = {"jump_forward": False}
    with LLM(model, async_scheduling=False, **options) as llm:
        in_turn = {kind: answers(llm, kind) for kind in kinds}
    waited, num_decode_steps, num_mixed_steps = {}, {}, {}
    with LLM(model, async_scheduling=True, **options) as llm:
        for kind in kinds:  # once before: kernels, modules, pinned memory
            assert are_same(answers(llm, kind), in_turn[kind]), kind
        watched = Watched(llm, monkeypatch)
        for kind in kinds:
            watched.rows, watched.waited = [], []
            assert are_same(answers(llm, kind), in_turn[kind]), kind
            # Decode steps whose tokens were all pending, and steps with a prompt beside such rows.
            num_decode_steps[kind] = watched.rows.count((NUM_ROWS, NUM_ROWS, NUM_ROWS))
            num_mixed_steps[kind] = sum(r > decodes > 0 for r, decodes, _ in watched.rows)
            waited[kind] = watched.waited
    assert waited == {kind: [] for kind in kinds}
    assert min(num_decode_steps.values()) >= 5 and min(num_mixed_steps.values()) >= 2
    if not has_grammars:
        pytest.skip("all but grammars passed; for those, pip install 'nanoserve[guided]'")


def test_a_step_that_waits_is_seen(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what torch would see switched off: it does not see everything."""
    options: dict[str, Any] = {"device": "cuda", "dtype": "float32", "skip_tokenizer_init": True}
    with LLM(model, async_scheduling=True, num_kv_blocks=100, **options) as llm:
        executor = llm.engine.executor
        sample = executor.sample

        def waits(handle: Handle, inputs: SampleInputs) -> None:
            torch.cuda.current_stream().synchronize()
            sample(handle, inputs)

        monkeypatch.setattr(executor, "sample", waits)
        watched = Watched(llm, monkeypatch, nullcontext)
        llm.engine.add_request("0", [1, 2, 3], SamplingParams(max_tokens=4, ignore_eos=True))
        while llm.engine.has_unfinished_requests():
            llm.engine.step()
    assert watched.waited == [*range(len(watched.rows))] and len(watched.rows) >= 4
