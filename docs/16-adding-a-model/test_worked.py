"""Numbers of the chapter on adding a model, against a count by hand."""

from pathlib import Path

import pytest
from reading import lines_of_code

from . import worked

SOURCE = '''"""A docstring,
of two lines."""

import math  # a comment behind code


class Circle(Shape, metaclass=Kind):
    """Round."""

    # A comment.
    unit = """not a
docstring"""

    def area(
        self,
    ) -> float:
        return math.pi
'''


def test_blank_lines_comments_and_docstrings_are_not_counted(tmp_path: Path) -> None:
    """import; class; two lines of `unit`; three of def; return."""
    path = tmp_path / "circle.py"
    path.write_text(SOURCE)
    assert lines_of_code(path) == 8
    assert worked.classes_of(SOURCE) == ["Circle(Shape)"]


def test_llama_takes_three_lines() -> None:
    """An import, a class, what differs. The toy model: three imports, two classes of 3 and 2."""
    assert worked.lines_in("nanoserve/models/llama.py") == 3
    assert worked.lines_in("tests/support/toy_model.py") == 8
    table = worked.models_table()
    assert "| `nanoserve/models/llama.py` | 3 | `LlamaForCausalLM(Qwen3ForCausalLM)` |" in table
    assert len(table.splitlines()) == 2 + 20 + 1


def test_settings_are_those_of_the_architecture() -> None:
    assert len(worked.architectures()) == 22
    assert worked.own_settings("Phi3ForCausalLM") == ["sliding_window"]
    assert worked.own_settings("LlamaForCausalLM") == ["attention_bias", "mlp_bias"]
    assert worked.implied_value("Qwen3ForCausalLM", "head_dim") == 128
    assert worked.implied_value("LlamaForCausalLM", "head_dim") is None
    assert worked.implied_value("LlamaForCausalLM", "sliding_window") is None
    assert "| `MistralForCausalLM` | `sliding_window` |" in worked.settings_table()


def test_the_bundled_checkpoint_has_eleven_tensors_a_layer() -> None:
    """q, k, v, o, gate, up, down, two norms, two head norms; in all, an embedding and a norm."""
    stored = worked.stored_tensors()
    assert len(stored) == 6 * 11 + 2
    assert stored["model.layers.0.self_attn.q_proj.weight"] == [256, 192]
    assert stored["model.layers.5.self_attn.k_proj.weight"] == [64, 192]
    assert stored["model.layers.0.self_attn.q_norm.weight"] == [32]
    assert "lm_head.weight" not in stored
    assert len(worked.layer_table().splitlines()) == 2 + 11


def test_a_fused_tensor_contains_its_parts_one_after_the_other() -> None:
    """64 rows of q, then 32 of k, then 32 of v; rank 1 of 2 has the second half of each."""
    sizes = {"q_proj": 64, "k_proj": 32, "v_proj": 32}
    rows = worked.fused_rows(sizes, rank=1, size=2)
    assert rows == {"q_proj": range(32, 64), "k_proj": range(80, 96), "v_proj": range(112, 128)}
    assert "| 1 | 32 to 63 | 80 to 95 | 112 to 127 |" in worked.fused_table(sizes, 2)


def test_differences_of_gemma() -> None:
    assert worked.norm_factor(0.25, adds_one=True) == 1.25
    assert worked.soft_cap(1.0, 30.0) == pytest.approx(0.99963, abs=1e-5)
    assert worked.soft_cap(300.0, 30.0) == pytest.approx(30.0, abs=1e-6)
