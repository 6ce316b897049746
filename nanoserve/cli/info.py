"""Describe a model, the memory it needs, and whether it would run, without loading weights.

nanoserve info tiny-qwen3                                  a bundled model, a folder, a GGUF file
nanoserve info Qwen/Qwen3-0.6B --max-model-len 4096        reads only headers of weights on the Hub
nanoserve info Qwen/Qwen3-0.6B --quantization int8 --json  output for programs

The exit status is 1 if LLM(...) would reject the model. A GGUF file on the Hub is downloaded.
"""

import argparse
import json
from typing import Any

from nanoserve.cli.engine_flags import add_engine_flags, engine_options
from nanoserve.cli.parser import Parser, add_model, model_of

_UNITS = ("KiB", "MiB", "GiB", "TiB")


def main(arguments: list[str]) -> int:
    args = _parser().parse_args(arguments)
    from nanoserve.cli.describe import describe  # imports torch, which --help does not need

    facts = describe(model_of(args, "tiny-qwen3"), **engine_options(args))
    print(json.dumps(facts, indent=2) if args.json else as_text(facts))
    return 1 if facts["refused"] else 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="nanoserve info",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_model(parser, "Folder, file or name of the model, as for LLM(). Default: tiny-qwen3.")
    parser.add_argument("--json", action="store_true", help="Print JSON, with sizes in bytes.")
    add_engine_flags(parser)
    return parser


def as_text(facts: dict[str, Any]) -> str:
    """Return a line for each known property, and for each reason to reject the model."""
    parts = (_model_rows, _weight_rows, _pool_rows, _text_rows)
    rows = [row for part in parts for row in part(facts)]
    lines = [f"{name:<16}{value}" for name, value in rows]
    lines += [f"{'refused':<16}{reason}" for reason in facts["refused"]]
    return "\n".join(lines)


Rows = list[tuple[str, str]]


def _model_rows(facts: dict[str, Any]) -> Rows:
    rows = [("model", facts["model"])]
    if "path" in facts:
        rows.append(("path", facts["path"]))
    if "architecture" not in facts:
        return rows
    heads = f"{facts['num_attention_heads']} ({facts['num_key_value_heads']} of K and V)"
    if facts["latent_dims"] is not None:
        latent, rotated = facts["latent_dims"]
        heads = f"{facts['num_attention_heads']} (one latent, of {latent} + {rotated} numbers)"
    rows += [
        ("architecture", _architecture(facts)),
        ("layers", f"{facts['num_hidden_layers']}, {facts['hidden_size']} wide"),
        ("heads", f"{heads}, of {facts['head_dim']}"),
        ("vocabulary", f"{facts['vocab_size']} tokens"),
        ("context", f"{facts['max_position_embeddings']} tokens"),
    ]
    if facts["rope"] is not None:
        rows.append(("RoPE", _rope(facts["rope"])))
    if facts["layers_without_rope"]:
        rows.append(("no RoPE", "in layers " + ", ".join(map(str, facts["layers_without_rope"]))))
    if facts["num_recurrent_layers"]:
        rows.append(("recurrent", f"{facts['num_recurrent_layers']} layers have a state, no KV"))
    if facts["num_experts"] is not None:
        rows.append(("experts", str(facts["num_experts"])))
    if facts["sliding_windows"]:
        rows.append(("windows", ", ".join(map(str, facts["sliding_windows"]))))
    return rows


def _architecture(facts: dict[str, Any]) -> str:
    whole = facts["multimodal_architecture"]
    how = ", through transformers" if facts["model_impl"] == "transformers" else ""
    return facts["architecture"] + (f", the text part of {whole}" if whole else how)


def _rope(rope: dict[str, Any]) -> str:
    settings = {k: v for k, v in rope.items() if k not in ("rope_type", "theta")}
    lists = {k: f"of {len(v)} values" for k, v in settings.items() if isinstance(v, tuple)}
    shown = [f"{name} {value}" for name, value in (settings | lists).items()]
    return ", ".join([rope["rope_type"], f"theta {rope['theta']:g}", *shown])


def _weight_rows(facts: dict[str, Any]) -> Rows:
    rows = []
    if "num_parameters" in facts:
        rows.append(("parameters", f"{facts['num_parameters']:,}"))
    if "stored_bytes" in facts:
        types = ", ".join(facts["stored_bytes_by_type"])
        rows.append(("stored", f"{_size(facts['stored_bytes'])} in {types}"))
    if "kept_bytes" in facts:
        rows.append(("kept", f"{_size(facts['kept_bytes'])}, dtype {facts['dtype']}"))
    if facts.get("quantization"):
        rows.append(("quantization", facts["quantization"]))
    if "rounding" in facts:
        rows.append(("rounding", "; ".join(f"{k} {how}" for k, how in facts["rounding"].items())))
    return rows


def _pool_rows(facts: dict[str, Any]) -> Rows:
    rows = []
    if "kv_bytes_per_token" in facts:
        sizes = facts["kv_bytes_per_token"].items()
        texts = [f"{_size(size)} in {facts['dtype'] if k == 'auto' else k}" for k, size in sizes]
        rows.append(("KV of a token", ", ".join(texts)))
    if "kv_block_bytes" in facts:
        chosen = facts["dtype"] if facts["kv_cache_dtype"] == "auto" else facts["kv_cache_dtype"]
        text = f"{_size(facts['kv_block_bytes'])}, {facts['block_size']} tokens in {chosen}"
        rows.append(("KV block", text))
    if facts.get("state_bytes"):
        each = _size(facts["state_bytes_per_sequence"])
        rows.append(("states", f"{_size(facts['state_bytes'])}, {each} a sequence"))
    if "num_kv_blocks" in facts:
        whole = facts["num_kv_blocks"] * facts["kv_block_bytes"]
        text = f"{facts['num_kv_blocks']:,} blocks, {_size(whole)}"
        rows.append(("pool", f"{text}, for {facts['num_kv_tokens']:,} tokens"))
    if "max_model_len" in facts:
        text = f"{facts['num_full_sequences']:,} sequences of {facts['max_model_len']} tokens"
        rows.append(("which holds", text))
    return rows


def _text_rows(facts: dict[str, Any]) -> Rows:
    rows = []
    if "tokenizer" in facts:
        rows.append(("tokenizer", f"{facts['tokenizer']} of {facts['tokenizer_size']} tokens"))
        rows.append(("chat template", "yes" if facts["chat_template"] else "no"))
    if "eos_token_ids" in facts:
        rows.append(("EOS", ", ".join(map(str, facts["eos_token_ids"])) or "none"))
    return rows


def _size(num_bytes: int) -> str:
    size, unit = float(num_bytes), "bytes"
    for larger in _UNITS:
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.4g} {unit}"
