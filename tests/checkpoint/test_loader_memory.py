"""What loading costs: memory for the model once, and a few pieces of its files."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging

logging.disable_progress_bar()

CONFIG = {
    "vocab_size": 20_000,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}

# Prints by how much the process grew at most while it loaded, as parts of the model's size: memory
# of its own, and that plus pages of files.
SCRIPT = """
import sys, threading, time
from pathlib import Path
import torch
from nanoserve.models.layers.context import LayerContext
from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.models.qwen3 import Qwen3ForCausalLM
from nanoserve.checkpoint.loader import load_weights

def memory():
    lines = dict(line.split(":") for line in open("/proc/self/status") if ":" in line)
    own, files = (int(lines[name].split()[0]) * 1024 for name in ("RssAnon", "RssFile"))
    return own, own + files

def watch():
    while not is_loaded.wait(0.001):
        seen.append(memory())

path, dtype = Path(sys.argv[1]), sys.argv[2]
config = ModelConfig.from_checkpoint(path, dtype)
model = Qwen3ForCausalLM(config, LayerContext(getattr(torch, dtype)))
torch.zeros(10**6).to(torch.bfloat16)  # whatever torch allocates once
is_loaded, seen = threading.Event(), [memory()]
watcher = threading.Thread(target=watch)
watcher.start()
load_weights(model, path)
is_loaded.set()
watcher.join()
seen.append(memory())
size = sum(parameter.nbytes for parameter in model.parameters())
print(size, *((max(column) - column[0]) / size for column in zip(*seen)))
"""


@pytest.fixture(scope="module")
def reference() -> Qwen3ForCausalLM:
    with torch.device("meta"):
        model = Qwen3ForCausalLM(Qwen3Config(**CONFIG))
    model = model.to_empty(device="cpu").to(torch.bfloat16)
    for parameter in model.parameters():
        parameter.data.fill_(0.5)
    return model


# Of a model large enough to be seen beside a process. That pieces are small, test_loader.py shows.
@pytest.mark.size("full")
@pytest.mark.full(dtype=["float32"], shard_size=["60MB"])
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("shard_size", ["1GB", "60MB"])
def test_loading_never_holds_the_model_twice(
    reference: Qwen3ForCausalLM, tmp_path: Path, shard_size: str, dtype: str
) -> None:
    reference.save_pretrained(tmp_path, max_shard_size=shard_size)
    files = list(tmp_path.glob("*.safetensors"))
    assert len(files) == 1 if shard_size == "1GB" else len(files) > 4
    command = [sys.executable, "-c", SCRIPT, str(tmp_path), dtype]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for file in files:
        file.unlink()  # not to be kept with what pytest keeps
    size, own, total = map(float, shown.split())
    print(f"{size / 1e6:.0f} MB: own memory {own:.3f}, with files {total:.3f}")
    assert size > 300e6 and 0.95 < own < 1.1 and total < 1.1


# Prints by how much the process has grown when integers are loaded, and by how much at most.
INTEGER_SCRIPT = """
import sys
from pathlib import Path
import torch
from nanoserve import LLM

def memory(name):
    lines = dict(line.split(":") for line in open("/proc/self/status") if ":" in line)
    return int(lines[name].split()[0]) * 1024

def load(path, **options):
    return LLM(path, device="cpu", skip_tokenizer_init=True, num_kv_blocks=2, **options)

first = load("tiny-qwen3", quantization=sys.argv[2])  # imports, and compiles
before = memory("VmRSS")
Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
llm = load(sys.argv[1], quantization=sys.argv[2])
print(memory("VmRSS") - before, memory("VmHWM") - before)
"""


@pytest.mark.size("full")
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("bits", [8, 4])
def test_integers_take_what_they_are_and_what_one_weight_is_made_of(
    reference: Qwen3ForCausalLM, tmp_path: Path, bits: int
) -> None:
    pytest.importorskip("numba")
    reference.save_pretrained(tmp_path)
    command = [sys.executable, "-c", INTEGER_SCRIPT, str(tmp_path), f"int{bits}"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    largest = reference.lm_head.weight.numel()
    num_values = sum(p.numel() for p in reference.parameters()) - largest  # without the embedding
    for file in tmp_path.glob("*.safetensors"):
        file.unlink()
    result = num_values * (bits + 0.5 * (bits == 4)) / 8 + 2 * largest
    grown, peak = map(float, shown.split())
    print(f"{result / 1e6:.0f} MB: grown {grown / result:.2f}, at most {peak / result:.2f}")
    # The LM head in bfloat16, mapped and copied; its codes; and pieces that are float32 meanwhile.
    assert grown < result + 30e6 and peak < result + 5 * largest + 85e6
