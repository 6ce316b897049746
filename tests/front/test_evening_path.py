"""The evening path: the files that one reads to understand the engine, and how long they are."""

import subprocess
import sys
from pathlib import Path

import reading
from reading import lines_of_code
from tiny_checkpoints import make_qwen3

import nanoserve

PACKAGE = Path(nanoserve.__file__).parent
# What a greedy request on a CPU loads besides: options, text, loading, sizing.
SUPPORT = {
    "nanoserve/__init__.py",
    "nanoserve/attention/interface.py",
    "nanoserve/checkpoint/checkpoint.py",
    "nanoserve/checkpoint/checkpoint_tensor.py",
    "nanoserve/checkpoint/config_json.py",
    "nanoserve/checkpoint/loader.py",
    "nanoserve/checkpoint/model_config.py",
    "nanoserve/checkpoint/rope_config.py",
    "nanoserve/checkpoint/weight_files.py",
    "nanoserve/checks.py",
    "nanoserve/config.py",
    "nanoserve/engine/batch_layout.py",
    "nanoserve/engine/engine_methods.py",
    "nanoserve/engine/executor.py",
    "nanoserve/engine/input_processor.py",
    "nanoserve/engine/interrupts.py",
    "nanoserve/engine/output_processor.py",
    "nanoserve/engine/request.py",
    "nanoserve/engine/stopwatch.py",
    "nanoserve/kernels_cpu/memory.py",
    "nanoserve/layers/tensor_parallel.py",
    "nanoserve/llm_methods.py",
    "nanoserve/make_engine.py",
    "nanoserve/models/registry.py",
    "nanoserve/outputs.py",
    "nanoserve/parameter_table.py",
    "nanoserve/request_lists.py",
    "nanoserve/sampling/greedy.py",
    "nanoserve/sampling/rows.py",
    "nanoserve/sampling/settings.py",
    "nanoserve/sampling_params.py",
    "nanoserve/tiny_qwen3/__init__.py",
    "nanoserve/worker/batch_tensors.py",
    "nanoserve/worker/device.py",
    "nanoserve/worker/heads.py",
    "nanoserve/worker/host_device.py",
    "nanoserve/worker/kv_cache.py",
    "nanoserve/worker/startup.py",
    "nanoserve/worker/threads.py",
}


def evening_path() -> list[str]:
    return [name for stop in reading.evening_path() for name in stop.files]


def test_the_path_can_be_read_in_an_evening() -> None:
    files = evening_path()
    counts = {name: lines_of_code(PACKAGE.parent / name) for name in files}
    print(counts, sum(counts.values()))
    assert files[0] == "nanoserve/llm.py" and len(files) == len(set(files)) >= 11
    assert sum(counts.values()) < 1450, counts


def test_what_lies_beside_the_path_is_bounded_too() -> None:
    counts = {name: lines_of_code(PACKAGE.parent / name) for name in SUPPORT}
    assert sum(counts.values()) < 2520, counts


def test_a_greedy_request_reads_nothing_else(tmp_path: Path) -> None:
    make_qwen3(tmp_path)
    code = (
        "import sys; from nanoserve import LLM, SamplingParams;"
        f"LLM({str(tmp_path)!r}, skip_tokenizer_init=True, attention_backend='torch').generate("
        "[[1, 2]], SamplingParams(temperature=0), use_tqdm=False);"
        "print(*(m.__file__ for n, m in sys.modules.items() if n.startswith('nanoserve')))"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    imported = {str(Path(file).relative_to(PACKAGE.parent)) for file in shown.stdout.split()}
    empty = {name for name in imported if lines_of_code(PACKAGE.parent / name) == 0}
    assert imported - empty <= {*evening_path(), *SUPPORT}, imported
