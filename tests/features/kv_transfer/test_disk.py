"""KV blocks on disk: an engine that starts again finds them, and never a wrong one."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kv_workload import OPTIONS, answers
from tiny_checkpoints import make_qwen3

from nanoserve import LLM, SamplingParams
from nanoserve.features.kv_transfer.config import KVTransferConfig
from nanoserve.features.kv_transfer.connector import BlockKey, ConnectorContext
from nanoserve.features.kv_transfer.disk import BLOCKS, DiskConnector
from nanoserve.features.kv_transfer.disk_index import INDEX
from nanoserve.features.kv_transfer.loads import ConnectorLoads
from nanoserve.worker.model_runner import ModelRunner

ONE = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
BLOCK_BYTES, BLOCK_SIZE = 64, 4


def connect(folder: Path, num_places: int = 50, fingerprint: bytes = b"a" * 32) -> DiskConnector:
    options = {"path": str(folder), "size": num_places * BLOCK_BYTES / 2**30}
    config = KVTransferConfig("disk", kv_connector_extra_config=options)
    return DiskConnector(ConnectorContext(config, BLOCK_BYTES, BLOCK_SIZE, 1, fingerprint, 10))


def chain(number: int, length: int) -> list[BlockKey]:
    """Return the keys of a chain of blocks; all chains begin with the same one."""
    keys, parent = [], b"\0" * 31 + b"r"
    for index in range(length):
        name = f"{number if index else 0}-{index}".encode().ljust(31) + b"\0"
        keys.append(BlockKey(name, parent, (number * index, index, 2, 3), 0))
        parent = name
    return keys


def content_of(key: BlockKey) -> np.ndarray:
    return np.frombuffer(key.block_hash + key.parent_hash, dtype=np.uint8)


def store(connector: DiskConnector, keys: list[BlockKey]) -> None:
    connector.store(keys, [content_of(key) for key in keys])


def load(connector: DiskConnector, keys: list[BlockKey]) -> int:
    """Return how many blocks are loaded; their contents must be right."""
    memory = [np.zeros(BLOCK_BYTES, dtype=np.uint8) for _ in keys]
    num_loaded = connector.load(keys, memory)
    for key, content in zip(keys[:num_loaded], memory, strict=False):
        assert content.tobytes() == content_of(key).tobytes(), "a wrong hit"
    return num_loaded


# ---------------------------------------------------------------- engines


def hits_of(llm: LLM) -> int:
    (loads,) = [each for each in llm.engine.extensions if isinstance(each, ConnectorLoads)]
    return loads.stats.hits


@pytest.mark.small(options=[{}])
@pytest.mark.parametrize(
    "options", [{}, {"async_scheduling": True}, {"kv_cache_dtype": "int8"}], ids=str
)
def test_an_engine_that_starts_again_finds_its_blocks(
    options: dict[str, Any], tmp_path: Path
) -> None:
    make_qwen3(tmp_path)
    with LLM(tmp_path, **OPTIONS, **options) as llm:
        expected = answers(llm)
    for is_first in (True, False):
        path = tmp_path / "blocks"
        with LLM(tmp_path, kv_offloading_path=path, **OPTIONS, **options) as llm:
            assert answers(llm) == expected
            assert is_first or hits_of(llm) > 50


def test_two_engines_do_not_share_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_qwen3(tmp_path)
    with LLM(tmp_path, kv_offloading_path=tmp_path / "blocks", **OPTIONS):
        monkeypatch.setattr(ModelRunner, "load", lambda *args: pytest.fail("weights are read"))
        with pytest.raises(ValueError, match="another engine uses this folder"):
            LLM(tmp_path, kv_offloading_path=tmp_path / "blocks", **OPTIONS)


KILLED = """
import sys
from nanoserve import LLM, SamplingParams
options = eval(sys.argv[2])
llm = LLM(sys.argv[1], kv_offloading_path=sys.argv[3], **options)
print("loaded", flush=True)
for start in range(10**6):
    prompt = [(start * 7 + i) % 64 for i in range(90)]
    llm.generate(prompt, SamplingParams(temperature=0, max_tokens=2), use_tqdm=False)
"""


def test_a_killed_engine_leaves_no_wrong_block(by_size: Callable[..., int], tmp_path: Path) -> None:
    make_qwen3(tmp_path)
    prompts = [[(start * 7 + i) % 64 for i in range(90)] for start in range(40)]
    with LLM(tmp_path, **OPTIONS) as llm:
        expected = [o.outputs[0].token_ids for o in llm.generate(prompts, ONE, use_tqdm=False)]
    rng, hits = random.Random(0), 0
    for _ in range(by_size(1, 5, 50)):
        arguments = [str(tmp_path), repr(OPTIONS), str(tmp_path / "blocks")]
        with subprocess.Popen(
            [sys.executable, "-c", KILLED, *arguments], stdout=subprocess.PIPE
        ) as process:
            assert process.stdout is not None and process.stdout.readline() == b"loaded\n"
            time.sleep(rng.uniform(0.05, 1.0))
            process.send_signal(signal.SIGKILL)
        with LLM(tmp_path, kv_offloading_path=tmp_path / "blocks", **OPTIONS) as llm:
            outputs = llm.generate(prompts, ONE, use_tqdm=False)
            assert [output.outputs[0].token_ids for output in outputs] == expected
            hits += hits_of(llm)
    assert hits


# ---------------------------------------------------------------- files


def test_what_is_stored_is_found_again(tmp_path: Path) -> None:
    connector, keys = connect(tmp_path), chain(1, 6)
    assert connector.find(keys) == 0
    store(connector, keys)
    assert connector.find(keys) == load(connector, keys) == 6
    assert connector.find(chain(2, 6)) == 1
    connector.close()
    connector = connect(tmp_path)
    assert connector.find(keys) == load(connector, keys) == 6
    connector.close()
    assert (tmp_path / BLOCKS).stat().st_mode & 0o777 == 0o600


def test_other_token_ids_are_not_found(tmp_path: Path) -> None:
    connector, keys = connect(tmp_path), chain(1, 3)
    store(connector, keys)
    others = [key._replace(token_ids=(9, 9, 9, 9)) for key in keys]
    assert connector.find(others) == load(connector, others) == 0
    connector.close()


def test_files_of_other_weights_are_emptied(tmp_path: Path) -> None:
    connector, keys = connect(tmp_path), chain(1, 6)
    store(connector, keys)
    connector.close()
    for fingerprint in (b"b" * 32, b"a" * 32):
        connector = connect(tmp_path, fingerprint=fingerprint)
        assert connector.find(keys) == 0
        connector.close()


def test_chains_lose_their_tails_first(tmp_path: Path) -> None:
    connector = connect(tmp_path, num_places=12)
    first, second, third = (chain(number, 6) for number in (1, 2, 3))
    store(connector, first)
    store(connector, second)  # 11 blocks: they share the head
    assert load(connector, first) == 6  # now the second one is older
    store(connector, third)
    connector._index.check()
    assert connector.find(first) == 6 and connector.find(second) == 2
    assert connector.find(third) == 6
    connector.close()
    connector = connect(tmp_path, num_places=12)
    assert [connector.find(keys) for keys in (first, second, third)] == [6, 2, 6]
    connector.close()


def test_a_smaller_file_keeps_what_fits(tmp_path: Path) -> None:
    connector, keys = connect(tmp_path, 50), chain(1, 20)
    store(connector, keys)
    connector.close()
    connector = connect(tmp_path, 8)
    assert connector.find(keys) == load(connector, keys) == 8
    assert (tmp_path / BLOCKS).stat().st_size == 8 * BLOCK_BYTES
    store(connector, chain(2, 8))
    connector._index.check()
    connector.close()


def test_damaged_files_give_no_wrong_hit(by_size: Callable[..., int], tmp_path: Path) -> None:
    keys = [*chain(1, 12), *chain(2, 12)[1:]]
    connector = connect(tmp_path)
    store(connector, keys)
    connector.close()
    good = {name: (tmp_path / name).read_bytes() for name in (BLOCKS, INDEX)}
    rng, num_missed = random.Random(1), 0
    for _ in range(by_size(200, 2000)):
        name = rng.choice([BLOCKS, INDEX])
        content = bytearray(good[name])
        first = rng.randrange(len(content))
        length = min(rng.choice([1, 1, 8, 64, 500]), len(content) - first)
        damage = rng.choice(["flip", "zero", "cut", "swap", "insert"])
        if damage == "cut":
            del content[first:]
        elif damage == "zero":
            content[first : first + length] = bytes(length)
        elif damage == "flip":
            content[first] ^= 1 << rng.randrange(8)
        elif damage == "insert":
            content[first:first] = rng.randbytes(length)
        else:  # a piece of the file at another place
            other = rng.randrange(len(content) - length + 1)
            content[first : first + length] = content[other : other + length]
        for each, was in good.items():
            (tmp_path / each).write_bytes(content if each == name else was)
        connector = connect(tmp_path)
        for tail in (chain(1, 12), chain(2, 12)):
            num_missed += load(connector, tail) < 12
        for _ in range(12):  # each load finds the first damaged block of its chain
            store(connector, keys)
            lengths = [load(connector, chain(number, 12)) for number in (1, 2)]
        assert lengths == [12, 12]
        connector._index.check()
        connector.close()
    assert num_missed > 50


def test_a_full_disk_stops_storing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    connector, keys = connect(tmp_path), chain(1, 10)
    pwrite, room = os.pwrite, 5 * BLOCK_BYTES + 20

    def write(file: int, content: Any, offset: int) -> int:
        """Write a part, as the system does, and then nothing."""
        if file != connector._file:
            return pwrite(file, content, offset)
        fits = max(0, min(len(content), room - offset))
        if not fits:
            raise OSError(28, "No space left on device")
        return pwrite(file, content[:fits], offset)

    monkeypatch.setattr(os, "pwrite", write)
    store(connector, keys)
    store(connector, chain(2, 4))
    assert connector.find(keys) == load(connector, keys) == 5
    connector._index.check()
    connector.close()
    monkeypatch.undo()
    connector = connect(tmp_path)
    assert load(connector, keys) == 5
    connector.close()


def test_threads_load_while_others_store(by_size: Callable[..., int], tmp_path: Path) -> None:
    """In a small file, so that places change hands while they are read."""
    connector, num_rounds = connect(tmp_path, num_places=20), by_size(300, 3000)
    num_loaded, errors = 0, []

    def read(seed: int) -> None:
        nonlocal num_loaded
        rng = random.Random(seed)
        try:
            while not is_over.is_set():
                num_loaded += load(connector, chain(rng.randrange(8), 8))
        except BaseException as error:
            errors.append(error)

    is_over, rng = threading.Event(), random.Random(0)
    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(num_rounds):
        store(connector, chain(rng.randrange(8), 8))
    is_over.set()
    for thread in threads:
        thread.join()
    assert not errors and num_loaded
    connector._index.check()
    connector.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "needs a folder as its option 'path' .got None"),
        ({"path": "", "size": 1}, "needs a folder as its option 'path' .got ''"),
        ({"path": 3}, "needs a folder as its option 'path' .got 3"),
        ({"path": "x", "size": 0}, "size=0"),
        ({"path": "x", "size": 1e-9}, "holds no KV block"),
        ({"path": "x", "places": 3}, "has no options .'places'."),
        ({"path": "/proc/x"}, "cannot be stored in '/proc/x'"),
        ({"path": "a file"}, "cannot be stored in"),
    ],
)
def test_bad_options_are_rejected_before_weights_are_read(
    options: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_qwen3(tmp_path)
    if options.get("path") in ("x", "a file"):
        options = {**options, "path": str(tmp_path / options["path"])}
    (tmp_path / "a file").write_text("")
    monkeypatch.setattr(ModelRunner, "load", lambda *args: pytest.fail("weights are read"))
    config = {"kv_connector": "disk", "kv_connector_extra_config": options}
    with pytest.raises(ValueError, match=message):
        LLM(tmp_path, kv_transfer_config=config, **OPTIONS)
