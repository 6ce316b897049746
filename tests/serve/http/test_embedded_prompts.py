"""`prompt_embeds` of /v1/completions: base64 of `torch.save`, and what must not be loaded."""

import base64
import io
import pickle
import random
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from embedded_prompts import greedy
from serving import Served, ask, served

pytest.importorskip("fastapi", reason="a server needs pip install 'nanoserve[serve]'")

from nanoserve import LLM, AsyncLLM
from nanoserve.serve.http.completions import completion_requests
from nanoserve.serve.http.protocol import CompletionBody
from nanoserve.serve.http.tensor_field import tensor_of

OPTIONS: dict[str, Any] = {"dtype": "float32", "num_kv_blocks": 64, "max_model_len": 256}
IN_PROCESS = pytest.param(True, marks=pytest.mark.size("full"), id="process")


@pytest.fixture(scope="module", params=[pytest.param(False, id="thread"), IN_PROCESS])
def server(request: pytest.FixtureRequest) -> Iterator[Served]:
    options = OPTIONS | {"enable_prompt_embeds": True, "engine_process": request.param}
    llm = AsyncLLM("tiny-qwen3", **options)
    with served(llm, max_prompts=20) as one:
        yield one
        if not request.param:
            one.wait_until_idle()
    llm.shutdown()


@pytest.fixture(scope="module")
def expected() -> tuple[list[torch.Tensor], list[str]]:
    """Two prompts, and how the library continues them."""
    generator = torch.Generator().manual_seed(0)
    with LLM("tiny-qwen3", enable_prompt_embeds=True, **OPTIONS) as llm:
        embedding, tokenizer = llm.engine.executor.model.model.embed_tokens, llm.engine.tokenizer
        ids = tokenizer.encode("A block table lists the blocks of a sequence.")
        with torch.inference_mode():
            own = embedding(torch.tensor(ids, dtype=torch.int32)).clone()
        noise = own.std() * torch.randn(20, own.shape[1], generator=generator)
        prompts = [own.detach(), noise]
        outputs = llm.generate(
            [{"prompt_embeds": rows} for rows in prompts], greedy(8), use_tqdm=False
        )
    return prompts, [output.outputs[0].text for output in outputs]


def encoded(value: Any, **options: Any) -> str:
    file = io.BytesIO()
    torch.save(value, file, **options)
    return base64.b64encode(file.getvalue()).decode()


def complete(server: Served, **body: Any) -> tuple[int, Any]:
    base = {"model": "tiny", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    status, _, answer = ask(server, "/v1/completions", base | body)
    return status, answer


def test_embeddings_are_continued_as_in_the_library(
    server: Served, expected: tuple[list[torch.Tensor], list[str]]
) -> None:
    prompts, texts = expected
    given = [encoded(rows) for rows in prompts]
    for extra in ({}, {"prompt": ""}, {"prompt": None}):  # OpenAI's client needs a prompt
        status, answer = complete(server, prompt_embeds=given, **extra)
        assert status == 200, answer
        assert [choice["text"] for choice in answer["choices"]] == texts
        assert answer["usage"]["prompt_tokens"] == sum(map(len, prompts))
    status, answer = complete(server, prompt_embeds=given[1], prompt=["Hello", "x"], n=1)
    assert status == 200 and answer["choices"][0]["text"] == texts[1]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    half = encoded(prompts[0].half()[None])
    status, answer = complete(server, prompt_embeds=half, return_token_ids=True)
    assert status == 200 and answer["choices"][0]["prompt_token_ids"] == [0] * len(prompts[0])


class Runs:
    """A pickle of it opens a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return open, (str(self.path), "w")


def archive(entries: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> str:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as written:
        for name, content in entries.items():
            written.writestr(name, content)
    return base64.b64encode(file.getvalue()).decode()


def parts_of(value: Any) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(base64.b64decode(encoded(value)))) as file:
        return {name: file.read(name) for name in file.namelist()}


def two_directories(entries: dict[str, bytes]) -> str:
    """An archive with compressed entries, and a second directory where they are stored ones.

    zipfile reads the directory before the end of the file, and torch the one at the offset that is
    noted there.
    """
    content = base64.b64decode(archive(entries, zipfile.ZIP_DEFLATED))
    first = int.from_bytes(content[-6:-2], "little")
    compressed, end = content[first:-22], content[-22:]
    stored, entry = bytearray(compressed), compressed.find(b"PK\x01\x02")
    while entry >= 0:
        stored[entry + 10 : entry + 12] = bytes(2)  # the method
        stored[entry + 24 : entry + 28] = stored[entry + 20 : entry + 24]  # the size
        entry = compressed.find(b"PK\x01\x02", entry + 4)
    return base64.b64encode(content[:first] + compressed + stored + end).decode()


def nested_key() -> bytes:
    """A pickle of a dictionary whose key has 2^200 empty tuples, which are hashed one by one."""
    put, get, pair = b"q\0", b"h\0", b"\x86"
    return b"\x80\x02})" + 200 * (put + get + pair) + b"Ns."


def hostile(marker: Path) -> dict[str, tuple[str, str]]:
    """Fields, and what the message about each has to say."""
    good = torch.zeros(3, 8)
    few = parts_of(good)
    pickled = next(name for name in few if name.endswith("data.pkl"))
    order = next(name for name in few if name.endswith("byteorder"))
    longer = few | {pickled: few[pickled].replace(b"K\x18", b"J\x00\x00\x10\x00", 1)}
    assert longer != few
    return {
        "code in an archive": (encoded(Runs(marker)), "other operations"),
        "code in a bare pickle": (
            base64.b64encode(pickle.dumps(Runs(marker))).decode(),
            "not one dense tensor",
        ),
        "code in an old file": (
            encoded(Runs(marker), _use_new_zipfile_serialization=False),
            "not one dense tensor",
        ),
        "old file": (encoded(good, _use_new_zipfile_serialization=False), "not a zip file"),
        "no base64": ("?" * 20, "not base64"),
        "empty": ("", "not a zip file"),
        "text": (base64.b64encode(b"hello").decode(), "not a zip file"),
        "a bomb": (
            archive(few | {"archive/data/0": bytes(2**26)}, zipfile.ZIP_DEFLATED),
            "is compressed",
        ),
        "two directories": (two_directories(few), "not one dense tensor"),
        "a key of tuples": (archive(few | {pickled: nested_key()}), "other operations"),
        "a long pickle": (archive(few | {pickled: bytes(5000)}), "a pickle of 5000 bytes"),
        "other bytes": (archive(few | {order: b"big"}), "byte order is big"),
        "integers": (encoded(good.int()), "IntStorage has other numbers"),
        "no numbers": (encoded(good[:0].clone()), "not one dense tensor"),
        "many entries": (archive({str(i): b"" for i in range(70)}), "70 entries"),
        "more numbers than stored": (archive(longer), "96 bytes of numbers, not 4194304"),
        "a list": (encoded([good]), "other operations"),
        "a dictionary": (encoded({"a": good}), "other operations"),
        "sparse": (encoded(good.to_sparse()), "other operations"),
        "meta": (encoded(good.to("meta")), "other operations"),
        "expanded": (encoded(good[:1].expand(2**30, 8)), "save a contiguous one"),
        "too large": (encoded(torch.zeros(3, 20_000)), "the file has about"),
    }


CASES = [*hostile(Path("none"))]


@pytest.mark.parametrize("name", CASES)
def test_no_file_runs_code_or_takes_more_memory(name: str, tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    field, message = hostile(marker)[name]
    with pytest.raises(ValueError, match=f"^prompt_embeds: .*({message})"):
        tensor_of("prompt_embeds", field, 1000)
    assert not marker.exists()
    assert torch.equal(
        tensor_of("prompt_embeds", encoded(torch.ones(3, 8)), 1000), torch.ones(3, 8)
    )


ROWS = torch.arange(48.0).view(6, 8)
READ: dict[str, torch.Tensor] = {
    "parameter": torch.nn.Parameter(ROWS.clone()),
    "with gradient": ROWS.clone().requires_grad_(),
    "rows of a larger one": ROWS[2:5],
    "columns of a larger one": ROWS[:, 1:4],
    "transposed": ROWS.t(),
    "batch of one": ROWS[None],
    "one row": ROWS[1],
    "float16": ROWS.half(),
    "bfloat16": ROWS.bfloat16(),
    "many rows": torch.ones(70_000, 1),
}


@pytest.mark.parametrize("name", READ)
def test_what_torch_has_saved_is_read(name: str) -> None:
    tensor = READ[name]
    read = tensor_of("prompt_embeds", encoded(tensor), 100_000)
    assert read.dtype == tensor.dtype and torch.equal(read, tensor.detach())
    assert type(read) is torch.Tensor and not read.requires_grad


def test_damaged_files_are_tensors_or_errors() -> None:
    content, rng = base64.b64decode(encoded(ROWS)), random.Random(0)
    num_read = 0
    for _ in range(400):
        damaged = bytearray(content)
        for _ in range(rng.randrange(1, 4)):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        try:
            read = tensor_of("x", base64.b64encode(damaged).decode(), 1000)
            num_read += read.sum().isfinite().numel()
        except ValueError as error:
            assert str(error).startswith("x: ")
    assert 0 < num_read < 400


def test_the_pickle_would_run(tmp_path: Path) -> None:
    """Else the test above shows nothing."""
    marker = tmp_path / "ran"
    pickle.loads(pickle.dumps(Runs(marker))).close()
    assert marker.exists()


def test_what_is_wrong_is_named(server: Served, tmp_path: Path) -> None:
    size = server.api.llm.engine.model_config.hidden_size
    good = encoded(torch.zeros(3, size))
    nan = torch.zeros(3, size)
    nan[1, 2] = float("nan")
    cases: list[tuple[dict[str, Any], str, str]] = [
        ({"prompt_embeds": encoded(Runs(tmp_path / "ran"))}, "prompt_embeds", "other operations"),
        ({"prompt_embeds": encoded(torch.zeros(3, 5))}, "prompt_embeds", "[3, 5]"),
        ({"prompt_embeds": encoded(nan)}, "prompt_embeds", "row 1 has nan"),
        ({"prompt_embeds": 5}, "prompt_embeds", "string"),
        ({"prompt_embeds": []}, "prompt", "0 prompts"),
        ({"prompt_embeds": good, "echo": True}, "echo", "prompts of text"),
        ({"prompt_embeds": good, "prompt_logprobs": 1}, "prompt_logprobs", "needs a prompt"),
        ({"prompt_embeds": [good] * 21}, "prompt", "21 prompts"),
        ({}, "prompt", "required"),
    ]
    for body, param, message in cases:
        status, answer = complete(server, **body)
        assert status == 400, (message, answer)
        error = answer["error"]
        assert error["param"] == param and message in error["message"], error
    long = encoded(torch.zeros(256, size))
    status, answer = complete(server, prompt_embeds=long)
    assert status == 400 and answer["error"]["code"] == "context_length_exceeded"
    chat = {"messages": [{"role": "user", "content": "hi"}], "prompt_embeds": good}
    status, _, answer = ask(server, "/v1/chat/completions", chat)
    assert status == 400 and answer["error"]["param"] == "prompt_embeds"
    assert not (tmp_path / "ran").exists()


def test_the_files_are_not_kept_while_a_request_waits(server: Served) -> None:
    engine = server.api.llm.engine
    file = encoded(torch.zeros(3, engine.model_config.hidden_size))
    body = CompletionBody.model_validate({"prompt_embeds": [file, file], "max_tokens": 1})
    requests = list(completion_requests(body, engine, lambda: "r"))
    assert len(requests) == 2 and body.prompt_embeds is None


def test_without_the_option_nothing_is_read(tmp_path: Path) -> None:
    llm = AsyncLLM("tiny-qwen3", **OPTIONS)
    with served(llm) as server:
        status, answer = complete(server, prompt_embeds="?")
        assert status == 400 and answer["error"]["param"] == "prompt_embeds"
        assert "--enable-prompt-embeds" in answer["error"]["message"]
    llm.shutdown()
