"""What it takes to add a head, a sampling parameter and an executor: files of a few lines."""

from itertools import pairwise
from pathlib import Path

import pytest
import toy_executor
import toy_head
import toy_params
from counting_executor import make_engine, run
from reading import lines_of_code
from toy_executor import SevenExecutor
from toy_params import NoEchoParams

from nanoserve import LLM, SamplingParams
from nanoserve.engine.guard import GuardedEngine
from nanoserve.worker.heads import HEADS, register_head


@pytest.mark.parametrize(
    ("module", "most"), [(toy_head, 14), (toy_params, 14), (toy_executor, 20)], ids=str
)
def test_it_takes_a_few_lines(module, most: int) -> None:
    assert lines_of_code(Path(module.__file__)) <= most


@pytest.mark.parametrize("budget", [8, 64])
def test_a_head_gets_the_hidden_states_of_a_prompt(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, budget: int
) -> None:
    monkeypatch.setattr(HEADS, "_entries", HEADS.entries())
    register_head("lengths", "toy_head:HiddenLengths")
    prompt = [3 * i % 50 for i in range(30)]
    settings = {"skip_tokenizer_init": True, "max_num_seqs": 4, "max_num_batched_tokens": budget}
    with LLM(checkpoint, **settings) as llm:
        lengths: list[float] = []
        llm.engine.output_processor.collectors["lengths"] = lambda request, row, values, first: (
            lengths.extend(values[first : first + row.num_outputs - row.num_sampled])
        )
        request = llm.engine.input_processor.process("a", prompt, SamplingParams(max_tokens=2))
        request.sequences[0].prompt_head = "lengths"
        llm.engine.add(request)
        llm.engine.add_request("b", prompt, SamplingParams(max_tokens=2, prompt_logprobs=1))
        outputs = run(llm.engine)
        assert len(lengths) == len(prompt) - 1  # behind the last token comes the sampler
        assert all(length > 0 for length in lengths) and len(set(lengths)) > 20
        assert len(outputs["b"].prompt_logprobs) == len(prompt)


def test_a_sampling_parameter(checkpoint: Path) -> None:
    with LLM(checkpoint, skip_tokenizer_init=True) as llm:
        params = {"temperature": 0, "max_tokens": 30, "ignore_eos": True, "logit_bias": {9: 100}}
        echo, no_echo = (
            llm.generate([[1, 2]], NoEchoParams(**params, no_echo=value), use_tqdm=False)[0]
            for value in (False, True)
        )
    assert set(echo.outputs[0].token_ids) == {9}
    tokens = no_echo.outputs[0].token_ids
    assert all(a != b for a, b in pairwise(tokens)) and 9 in tokens


def test_an_executor() -> None:
    template = make_engine(max_num_seqs=4, max_num_batched_tokens=64)
    engine = GuardedEngine(template.config, template.model_config, SevenExecutor(), None)
    for name in "abcde":
        engine.add_request(name, [1, 2, 3], SamplingParams(max_tokens=5))
    assert all(output.outputs[0].token_ids == [7] * 5 for output in run(engine).values())
