"""Things found by name: the registry, and what it takes to add one of each kind."""

import ast
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import toy_attention
import toy_command
import toy_drafts
import toy_extension
import toy_grammar
import toy_stage
from counting_executor import run
from reading import lines_of_code
from toy_attention import BlindAttention

import nanoserve
from nanoserve import LLM, SamplingParams, StructuredOutputsParams
from nanoserve.attention.registry import (
    ATTENTION_BACKENDS,
    OPERATIONS,
    register_attention_backend,
)
from nanoserve.build import FEATURES
from nanoserve.cli.main import _PURPOSES, COMMANDS, main, register_command
from nanoserve.config import EngineConfig
from nanoserve.engine.extension import EXTENSIONS, register_extension
from nanoserve.features.speculative.config import METHODS, SpeculativeConfig
from nanoserve.features.structured.config import (
    GRAMMAR_BACKENDS,
    StructuredOutputsConfig,
    register_grammar_backend,
)
from nanoserve.models.registry import MODELS
from nanoserve.sampling import stages
from nanoserve.sampling.stages import STAGES, register_stage
from nanoserve.utils.registry import Registry
from nanoserve.worker.heads import HEADS
from nanoserve.worker.worker_functions import WORKER_FUNCTIONS

REGISTRIES: dict[str, Registry[Any]] = {
    registry.kind: registry
    for registry in (
        *(MODELS, HEADS, ATTENTION_BACKENDS, OPERATIONS, STAGES, EXTENSIONS, FEATURES, METHODS),
        *(GRAMMAR_BACKENDS, COMMANDS, WORKER_FUNCTIONS),
    )
}
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PACKAGE = Path(nanoserve.__file__).parent


@contextmanager
def restored(*registries: Registry[Any]) -> Iterator[None]:
    """What is registered inside is gone afterwards."""
    with pytest.MonkeyPatch.context() as patch:
        for registry in registries:
            patch.setattr(registry, "_entries", registry.entries())
        yield


# ---------------------------------------------------------------- the registry itself


def test_an_unknown_name_is_answered_with_those_that_there_are() -> None:
    registry = Registry("colour", {"red": 1, "blue": 2})
    assert registry.names() == ["red", "blue"] and registry.get("blue") == 2
    for find in (registry.get, registry.entry):
        with pytest.raises(ValueError, match=r"colour 'green' is not one of \['red', 'blue'\]"):
            find("green")


def test_a_name_has_one_entry() -> None:
    registry = Registry("colour", {"red": "paint:Red"})
    registry.register("red", "paint:Red")  # the same
    with pytest.raises(ValueError, match="colour 'red' is already registered"):
        registry.register("red", "paint:Crimson")
    assert registry.entries() == {"red": "paint:Red"}


@pytest.mark.parametrize("location", ["paint", "paint.Red", ":Red", "paint:", "a:b:c", ""])
def test_a_location_has_a_module_and_a_name(location: str) -> None:
    registry: Registry[Any] = Registry("colour", {})
    with pytest.raises(ValueError, match=r"must be a class or 'package\.module:Class'"):
        registry.register("red", location)
    assert registry.names() == []


def test_nothing_is_imported_before_it_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "paint_of_this_test.py").write_text("class Red: ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    registry: Registry[Any] = Registry("colour", {"red": "paint_of_this_test:Red"})
    registry.register("green", "paint_of_this_test:Green")
    registry.names(), registry.entry("red")
    assert "paint_of_this_test" not in sys.modules
    assert registry.get("red").__name__ == "Red"
    with pytest.raises(AttributeError, match="Green"):
        registry.get("green")


# ---------------------------------------------------------------- all registries


@pytest.mark.parametrize("kind", REGISTRIES)
def test_one_of_your_own_is_found(kind: str) -> None:
    registry, before = REGISTRIES[kind], REGISTRIES[kind].names()
    with restored(registry):
        registry.register("my own", "toy_attention:BlindAttention")
        assert registry.get("my own") is BlindAttention
        assert registry.names() == [*before, "my own"]
        with pytest.raises(ValueError, match=f"{kind} 'another' is not one of .*'my own'"):
            registry.get("another")
    assert registry.names() == before


@pytest.mark.parametrize("kind", REGISTRIES)
def test_what_ships_is_where_it_is_said_to_be(kind: str) -> None:
    """Read from the files: some need packages that may not be here."""
    for location in REGISTRIES[kind].entries().values():
        module, _, name = location.partition(":")
        if not module.startswith("nanoserve."):
            continue  # another test has registered it
        file = PACKAGE.parent / f"{module.replace('.', '/')}.py"
        if not file.is_file():
            file = file.with_suffix("") / "__init__.py"
        defined = [getattr(node, "name", None) for node in ast.parse(file.read_text()).body]
        assert name in defined, location


# ---------------------------------------------------------------- one of each kind
# A head, a sampling parameter and an executor are in test_seams.py, models in tests/models.


@pytest.mark.parametrize(
    "module",
    [toy_attention, toy_command, toy_drafts, toy_extension, toy_grammar, toy_stage],
    ids=lambda module: module.__name__,
)
def test_it_takes_a_few_lines(module: Any) -> None:
    assert lines_of_code(Path(module.__file__)) <= (35 if module is toy_grammar else 20)


def tokens(llm: LLM, *prompts: list[int], params: SamplingParams = GREEDY) -> list[list[int]]:
    outputs = llm.generate(list(prompts), params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def test_an_attention_backend(checkpoint: Path) -> None:
    with restored(ATTENTION_BACKENDS, OPERATIONS):
        register_attention_backend("blind", BlindAttention)
        with LLM(checkpoint, skip_tokenizer_init=True, attention_backend="blind") as llm:
            assert type(llm.engine.executor.context.attention) is BlindAttention
            blind = tokens(llm, [5, 6, 7], [40, 30, 20, 7])
    assert blind[0] == blind[1]
    with LLM(checkpoint, skip_tokenizer_init=True, attention_backend="torch") as llm:
        seeing = tokens(llm, [5, 6, 7], [40, 30, 20, 7])
    assert seeing[0] != seeing[1]
    with pytest.raises(ValueError, match="attention_backend='blind' is not one of"):
        EngineConfig("m", attention_backend="blind")


def test_a_draft_method(checkpoint: Path) -> None:
    with LLM(checkpoint, skip_tokenizer_init=True) as llm:
        plain = tokens(llm, [1, 2, 3], [4, 5])
    with restored(METHODS):
        METHODS.register("echo", "toy_drafts:prepare_echo")
        options = {"method": "echo", "num_speculative_tokens": 3, "adaptive": False}
        with LLM(checkpoint, skip_tokenizer_init=True, speculative_config=options) as llm:
            assert tokens(llm, [1, 2, 3], [4, 5]) == plain
            assert llm.stats.num_draft_tokens > 0
    with pytest.raises(ValueError, match="method='echo' is not one of"):
        SpeculativeConfig("echo")


def test_a_grammar_backend() -> None:
    with restored(GRAMMAR_BACKENDS):
        register_grammar_backend("spelling", "toy_grammar:Spelling")
        options = {"structured_outputs_config": {"backend": "spelling"}}
        with LLM("tiny-qwen3", attention_backend="torch", **options) as llm:

            def spell(word: str) -> str:
                wanted = StructuredOutputsParams(regex=word)
                params = SamplingParams(max_tokens=20, structured_outputs=wanted)
                return llm.generate("x", params, use_tqdm=False)[0].outputs[0].text

            assert spell("paged") == "paged"
            with pytest.raises(ValueError, match="a space cannot be spelled"):
                spell("two words")
    with pytest.raises(ValueError, match="backend='spelling' is not one of"):
        StructuredOutputsConfig(backend="spelling")


def test_an_extension_that_a_request_needs(checkpoint: Path) -> None:
    with restored(EXTENSIONS), LLM(checkpoint, skip_tokenizer_init=True) as llm:
        register_extension("token by token", "toy_extension:TokenByToken")
        engine, prompt = llm.engine, [*range(1, 21)]
        plain = tokens(llm, prompt)
        llm.reset_prefix_cache()
        num_steps = llm.stats.num_steps
        request = engine.input_processor.process("a", prompt, GREEDY)
        request.extensions = ("token by token",)
        engine.add(request)
        assert run(engine)["a"].outputs[0].token_ids == plain[0]
        assert llm.stats.num_steps - num_steps >= len(prompt)
        (extension,) = engine.extensions
        assert extension.num_limited == len(prompt) - 1


def test_a_stage_of_the_sampler(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "_OWN", dict(stages._OWN))
    with restored(STAGES):
        register_stage("no digit", "toy_stage:NoDigit")
        with LLM(checkpoint, skip_tokenizer_init=True) as llm:
            (plain,) = tokens(llm, [1, 2, 3])
            digit = plain[0] % 10
            params = SamplingParams(**vars_of(GREEDY), extra_args={"no_digit": digit})
            (without,) = tokens(llm, [1, 2, 3], params=params)
    assert digit not in {token_id % 10 for token_id in without}


def vars_of(params: SamplingParams) -> dict[str, Any]:
    names = ("temperature", "max_tokens", "ignore_eos")
    return {name: getattr(params, name) for name in names}


def test_a_command(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nanoserve.cli.main._PURPOSES", dict(_PURPOSES))
    with restored(COMMANDS):
        register_command("hello", "toy_command:main", "say hello")
        assert main(["hello", "you", "there"]) == 2
        assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("hello you there\n") and "hello     say hello" in shown
    assert main(["hello"]) == 2 and "unknown command 'hello'" in capsys.readouterr().err
