"""Models by their names on the hub: what is fetched, what is not, what is refused and how."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_hub import FakeHub, Repository, fake_hub
from huggingface_hub import constants
from tiny_checkpoints import edit_json, make_qwen3

from nanoserve import LLM, SamplingParams
from nanoserve.checkpoint import hub
from nanoserve.checkpoint.checkpoint import bundled_checkpoint
from nanoserve.cli.describe import describe

OPTIONS: dict[str, Any] = {"num_kv_blocks": 8, "max_num_seqs": 4}
SMALL = ["chat_template.jinja", "config.json", "generation_config.json"]
SMALL += ["tokenizer.json", "tokenizer_config.json"]
NAME = "org/tiny-model"
DECOYS = [
    "README.md", "pytorch_model.bin", "consolidated.safetensors", "consolidated.00.pth",
    "model.fp16.safetensors", "model.gguf", "tekken.json", "tokenization_mine.py",
    "original/params.json", "original/model.safetensors", "onnx/config.json",
]  # fmt: skip


def make_repository(folder: Path, seed: int = 0, shard_size: str = "1GB") -> None:
    """A tiny model with the bundled tokenizer, and all that other programs like to find."""
    model = make_qwen3(folder, seed, vocab_size=2048)
    for file in folder.glob("model*"):
        file.unlink()
    model.save_pretrained(folder, max_shard_size=shard_size)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(bundled_checkpoint("tiny-qwen3") / name, folder)
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    for name in DECOYS:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("{}")


def greedy(model: str | Path, **options: Any) -> list[int]:
    with LLM(model, **OPTIONS | options) as llm:
        assert llm.engine.config.model == str(model)
        params = SamplingParams(temperature=0, max_tokens=8)
        (output,) = llm.generate("What is a KV cache?", params, use_tqdm=False)
    return output.outputs[0].token_ids


def refusal(model: str | Path = NAME, **options: Any) -> str:
    start = time.monotonic()
    with pytest.raises(ValueError) as caught:
        LLM(model, **OPTIONS | options)
    assert time.monotonic() - start < 9  # a busy machine is slow, but nobody waits the usual 10 s
    return str(caught.value)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the repository of most tests holds."""
    path = tmp_path_factory.mktemp("source")
    make_repository(path)
    return path


@pytest.fixture
def own_source(source: Path, tmp_path: Path) -> Path:
    """A copy of it, for a test to change."""
    return Path(shutil.copytree(source, tmp_path / "own_source"))


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """An empty hub, an empty cache, and nothing in the working folder."""
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "home" / "hub"))
    with fake_hub() as server:
        _use(server.endpoint, monkeypatch)
        yield server


def _use(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    template = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)


# ---------------------------------------------------------------- what is fetched


def test_only_what_is_read_is_fetched(server: FakeHub, source: Path) -> None:
    server.repositories[NAME] = Repository({"main": source})
    assert greedy(NAME) == greedy(source)
    assert server.fetched == sorted([*SMALL, "model.safetensors"])
    server.requests.clear()
    assert greedy(NAME) == greedy(source)  # from the cache, after a look at the version
    assert server.fetched == [] and len(server.requests) <= 3


def test_of_a_sharded_model_the_files_of_its_index_are_fetched(
    server: FakeHub, tmp_path: Path
) -> None:
    make_repository(tmp_path / "sharded", shard_size="200KB")
    index = json.loads((tmp_path / "sharded" / "model.safetensors.index.json").read_text())
    shards = set(index["weight_map"].values())
    assert len(shards) > 2
    server.repositories[NAME] = Repository({"main": tmp_path / "sharded"})
    assert greedy(NAME) == greedy(tmp_path / "sharded")
    assert server.fetched == sorted([*SMALL, "model.safetensors.index.json", *shards])


def test_a_download_dir_takes_the_place_of_the_hubs_cache(
    server: FakeHub, source: Path, tmp_path: Path
) -> None:
    server.repositories[NAME] = Repository({"main": source})
    assert greedy(NAME, download_dir=str(tmp_path / "elsewhere")) == greedy(source)
    assert list((tmp_path / "elsewhere").rglob("model.safetensors"))
    assert not (tmp_path / "home").exists()


@pytest.fixture(scope="module")
def gguf_source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with one model twice, in one file and in three, and nothing else but decoys."""
    pytest.importorskip("gguf", reason="pip install 'nanoserve[gguf]'")
    from gguf_models import ModelWriter

    path = tmp_path_factory.mktemp("gguf_source")
    writer = ModelWriter(
        make_qwen3(path / "made", hidden_size=64, intermediate_size=96), "qwen3", "Q8_0"
    )
    writer.write(path / "tiny-Q8_0.gguf")
    writer.write(path / "split.gguf", split_max_tensors=9)
    shutil.rmtree(path / "made")
    (path / "README.md").write_text("")
    return path


def test_of_a_gguf_repository_one_model_is_fetched(server: FakeHub, gguf_source: Path) -> None:
    server.repositories[NAME] = Repository({"main": gguf_source})
    no_text = {"skip_tokenizer_init": True, "max_num_seqs": 4, "num_kv_blocks": 8}
    with LLM(f"{NAME}/tiny-Q8_0.gguf", **no_text) as llm:
        assert llm.engine.model_config.hidden_size == 64
    assert server.fetched == ["tiny-Q8_0.gguf"]
    server.requests.clear()
    LLM(f"{NAME}/split-00001-of-00003.gguf", **no_text)
    assert server.fetched == [f"split-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    assert "has no absent.gguf" in refusal(f"{NAME}/absent.gguf", **no_text)
    assert "not the name of a file" in refusal(f"{NAME}/*.gguf", **no_text)
    assert "is not the first file of a split GGUF" in refusal(
        f"{NAME}/split-00002-of-00003.gguf", **no_text
    )
    assert "'organisation/model/file.gguf'" in refusal(f"{NAME}/a/tiny.gguf", **no_text)
    assert "no config.json" in refusal(NAME, **no_text)


@pytest.mark.parametrize(
    ("file", "changes", "told"),
    [
        ("config.json", {"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM"),
        ("config.json", {"quantization_config": {"quant_method": "hqq"}}, "hqq"),
        ("generation_config.json", {"temperature": -1}, "temperature=-1"),
        ("tokenizer.json", None, "tokenizer.json"),
    ],
)
def test_what_is_refused_is_refused_before_the_weights_are_fetched(
    server: FakeHub, own_source: Path, file: str, changes: dict[str, Any] | None, told: str
) -> None:
    if changes is None:
        (own_source / file).unlink()
    else:
        edit_json(own_source / file, **changes)
    server.repositories[NAME] = Repository({"main": own_source})
    assert told in refusal()
    assert set(server.fetched) <= set(SMALL)


def test_a_model_without_safetensors_is_refused_with_advice(
    server: FakeHub, own_source: Path
) -> None:
    (own_source / "model.safetensors").unlink()
    server.repositories[NAME] = Repository({"main": own_source})
    message = refusal()
    assert "model.safetensors" in message and "Convert it" in message
    assert server.fetched == SMALL


def test_dummy_weights_are_not_fetched(server: FakeHub, source: Path) -> None:
    server.repositories[NAME] = Repository({"main": source})
    assert len(greedy(NAME, load_format="dummy")) == 8
    assert server.fetched == SMALL


@pytest.mark.small(shard_size=["20KB"])
@pytest.mark.parametrize("shard_size", ["1GB", "20KB"])
def test_of_weights_that_are_only_described_headers_are_read(
    server: FakeHub, tmp_path: Path, shard_size: str
) -> None:
    make_repository(tmp_path / "source", shard_size=shard_size)
    server.repositories[NAME] = Repository({"main": tmp_path / "source"})
    facts = describe(NAME, device="cpu")
    on_disk = describe(str(tmp_path / "source"), device="cpu")
    assert facts["refused"] == [] and facts["stored_bytes"] > 0
    assert facts | {"model": "", "path": ""} == on_disk | {"model": "", "path": ""}
    assert not list(Path(facts["path"]).glob("*.safetensors"))  # nothing of them was kept
    greedy(NAME)
    assert describe(NAME, device="cpu") == facts


def test_a_revision_is_a_branch_a_tag_or_a_commit(
    server: FakeHub, source: Path, tmp_path: Path
) -> None:
    make_repository(tmp_path / "v2", seed=1)
    repository = Repository({"main": source, "v2": tmp_path / "v2", "pr/3": tmp_path / "v2"})
    server.repositories[NAME] = repository
    first, second = greedy(source), greedy(tmp_path / "v2")
    assert first != second
    assert greedy(NAME) == first
    assert greedy(NAME, revision="v2") == second
    assert greedy(NAME, revision="pr/3") == second
    assert greedy(NAME, revision=repository.commit("main")) == first
    repository.versions["main"] = tmp_path / "v2"  # a branch moves
    assert greedy(NAME) == second
    assert greedy(NAME, revision=repository.commit("main")) == second


def test_a_tokenizer_has_a_name_of_its_own(server: FakeHub, source: Path, own_source: Path) -> None:
    (own_source / "tokenizer.json").unlink()
    server.repositories[NAME] = Repository({"main": own_source, "v2": own_source})
    server.repositories["org/words"] = Repository({"main": source})
    # The revision is the model's.
    assert greedy(NAME, tokenizer="org/words", revision="v2") == greedy(source)
    assert greedy(own_source, tokenizer="tiny-qwen3") == greedy(source)
    assert server.fetched.count("model.safetensors") == 1


@pytest.mark.size("full")
def test_all_ranks_load_from_the_folder_that_the_first_one_found(
    server: FakeHub, source: Path
) -> None:
    """The other processes do not know the patched hub."""
    server.repositories[NAME] = Repository({"main": source})
    assert greedy(NAME, tensor_parallel_size=2, device="cpu") == greedy(source)


# ---------------------------------------------------------------- without a network


@pytest.mark.parametrize(
    "told_by", ["the client", pytest.param("the environment", marks=pytest.mark.size("full"))]
)
def test_offline_a_cached_model_answers_without_a_request(
    server: FakeHub, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told_by: str
) -> None:
    """A process of its own reads the environment; in this one, the client has done so already."""
    server.repositories[NAME] = Repository({"main": source})
    expected = greedy(NAME)
    server.requests.clear()
    if told_by == "the client":
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        assert greedy(NAME) == expected
        assert server.requests == []
        return
    code = (
        "from nanoserve import LLM, SamplingParams;"
        f"llm = LLM({NAME!r}, **{OPTIONS});"
        "params = SamplingParams(temperature=0, max_tokens=8);"
        "print(llm.generate('What is a KV cache?', params, False)[0].outputs[0].token_ids)"
    )
    settings = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}
    settings |= {"HF_ENDPOINT": server.endpoint, "PYTHONPATH": str(Path(hub.__file__).parents[2])}
    shown = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | settings, capture_output=True, text=True
    )
    assert shown.stdout.strip() == str(expected), shown.stderr
    assert server.requests == []


@pytest.fixture(params=["refuses", "is silent", "is broken"])
def lost_network(
    request: pytest.FixtureRequest, server: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """From here on the hub is of no use."""
    monkeypatch.setattr(hub, "_TIMEOUT", 0.1)
    if request.param == "is broken":
        monkeypatch.setattr(FakeHub, "answer", lambda *_: (500, {}, b""))
        yield
        return
    listener = socket.create_server(("127.0.0.1", 0))
    _use(f"http://127.0.0.1:{listener.getsockname()[1]}", monkeypatch)
    if request.param == "refuses":
        listener.close()
    yield
    listener.close()


@pytest.fixture
def cached(server: FakeHub, source: Path) -> None:
    server.repositories[NAME] = Repository({"main": source})
    LLM(NAME, **OPTIONS).close()


def test_a_cached_model_survives_the_loss_of_the_network(
    cached: None, lost_network: None, source: Path
) -> None:
    assert greedy(NAME) == greedy(source)


def test_without_network_and_cache_a_model_is_refused(lost_network: None) -> None:
    message = refusal()
    assert NAME in message and "neither a folder" in message and "cache" in message


@pytest.mark.small(lost_network=["refuses"])
def test_a_cache_that_lacks_only_what_nobody_reads_is_enough(
    cached: None, lost_network: None, source: Path, tmp_path: Path
) -> None:
    """Other programs share the cache, and fetch other files."""
    (snapshot,) = (tmp_path / "home").rglob("snapshots/*")
    (snapshot / "chat_template.jinja").unlink()
    assert greedy(NAME) == greedy(source)


@pytest.mark.small(lost_network=["is broken"])
def test_a_cache_without_the_weights_is_refused(
    cached: None, lost_network: None, tmp_path: Path
) -> None:
    (snapshot,) = (tmp_path / "home").rglob("snapshots/*")
    (snapshot / "model.safetensors").unlink()
    message = refusal()
    assert NAME in message and "network" in message


# ---------------------------------------------------------------- what cannot be had


def test_a_model_that_does_not_exist_is_refused(server: FakeHub) -> None:
    message = refusal()
    assert f"'{NAME}' is neither a folder nor a bundled checkpoint" in message
    assert "no such model" in message and "hf auth login" in message


def test_a_gated_model_is_refused_with_the_way_in(server: FakeHub, source: Path) -> None:
    server.repositories[NAME] = Repository({"main": source}, is_gated=True)
    message = refusal()
    assert "gated" in message and f"{server.endpoint}/{NAME}" in message and "HF_TOKEN" in message


def test_a_revision_that_does_not_exist_is_refused(server: FakeHub, source: Path) -> None:
    server.repositories[NAME] = Repository({"main": source})
    assert "no revision 'v9'" in refusal(revision="v9")


def test_the_hubs_own_error_is_the_cause(server: FakeHub) -> None:
    with pytest.raises(ValueError) as caught:
        LLM(NAME)
    assert type(caught.value.__cause__).__name__ == "RepositoryNotFoundError"


@pytest.mark.parametrize(
    "name",
    [
        "", "gpt2", "org/", "/model", "org/model/file", "org/my model", "org/mödel?", "~/model",
        "..", "../model", "org/..", "org/../model", "./model", "org/model.git", "org\0/model",
        "x" * 300, "org/" + "x" * 300, "x/" * 3000,
    ],
)  # fmt: skip
def test_a_name_that_the_hub_cannot_have_is_refused_without_asking(
    server: FakeHub, name: str
) -> None:
    if name == "..":
        name = "../nowhere"
    message = refusal(name)
    assert "neither a folder nor a bundled checkpoint" in message and "organisation/" in message
    assert refusal(Path(NAME)).count("neither a folder") == 1  # a Path is no name
    assert server.requests == []


def test_a_folder_wins_over_a_name(server: FakeHub, source: Path) -> None:
    shutil.copytree(source, NAME)
    assert greedy(NAME) == greedy(source)
    assert server.requests == []
    assert "revision='v2'" in refusal(revision="v2")
    assert "revision='v2'" in refusal("tiny-qwen3", revision="v2")


# ---------------------------------------------------------------- code that comes along

FAST = """
from pathlib import Path
from transformers import PreTrainedTokenizerFast

Path({marker!r}).touch()

class MyTokenizer(PreTrainedTokenizerFast):
    pass
"""
SLOW = """
from transformers import PreTrainedTokenizer

class MyTokenizer(PreTrainedTokenizer):
    vocab_size = 1

    def get_vocab(self):
        return {"a": 0}
"""


def bring_code(folder: Path, code: str) -> None:
    (folder / "tokenization_mine.py").write_text(code)
    classes = {"AutoTokenizer": [None, "tokenization_mine.MyTokenizer"]}
    edit_json(folder / "tokenizer_config.json", auto_map=classes, tokenizer_class="MyTokenizer")


@pytest.fixture
def marker(server: FakeHub, own_source: Path, tmp_path: Path) -> Path:
    """Exists once the code of the repository's tokenizer has run."""
    marker = tmp_path / "code_has_run"
    bring_code(own_source, FAST.format(marker=str(marker)))
    server.repositories[NAME] = Repository({"main": own_source})
    return marker


def test_code_of_a_checkpoint_does_not_run_unasked(
    server: FakeHub, marker: Path, own_source: Path
) -> None:
    greedy(own_source)
    greedy(NAME)
    assert not marker.exists() and "tokenization_mine.py" not in server.fetched


def test_a_tokenizer_that_needs_code_is_refused(
    marker: Path, own_source: Path, tmp_path: Path
) -> None:
    """Without a config.json transformers knows of no other tokenizer than the one with code."""
    (own_source / "config.json").rename(tmp_path / "config.json")
    message = refusal("tiny-qwen3", tokenizer=str(own_source))
    assert "trust_remote_code=True" in message and not marker.exists()


def test_with_trust_the_code_of_a_tokenizer_is_fetched_and_runs(
    server: FakeHub, marker: Path, source: Path
) -> None:
    assert greedy(NAME, trust_remote_code=True) == greedy(source)
    assert marker.exists() and "tokenization_mine.py" in server.fetched


def test_a_tokenizer_in_python_is_refused_even_with_trust(own_source: Path) -> None:
    bring_code(own_source, SLOW)
    message = refusal(own_source, trust_remote_code=True)
    assert "MyTokenizer" in message and "only fast tokenizers" in message
