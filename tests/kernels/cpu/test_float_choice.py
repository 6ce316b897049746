"""Which form float weights get, on made-up machines, and the file of how fast a machine is."""

import functools
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("numba")

from nanoserve.kernels.cpu import calibration, float_linear, gemm_select, packed_linear
from nanoserve.kernels.cpu.float_linear import FloatPanels, SharedPanels
from nanoserve.kernels.cpu.gemm_select import choose_form, forms
from nanoserve.kernels.cpu.torch_linear import Packed, Plain, WidenedTiles

OURS, ONEDNN = "own tiles", "oneDNN packed"
BF16, LARGE = torch.bfloat16, 2**30
Rates = dict[str, dict[int, float]]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """And a matrix of 256 KiB."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(calibration, "MATRIX_BYTES", 2**18)
    return tmp_path / "nanoserve"


class Machine:
    """Forms whose seconds are known; counts how many products it is asked for."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, seconds: dict[str, dict[int, float]]
    ) -> None:
        self.asked: list[tuple[str, int]] = []
        self._seconds = seconds
        self.forms = {name: functools.partial(self._make, name) for name in seconds}
        monkeypatch.setattr(calibration, "_seconds", lambda form, x: form(x))

    def _make(self, name: str, weight: Tensor) -> Callable[[Tensor], float]:
        def form(x: Tensor) -> float:
            self.asked.append((name, len(x)))
            return self._seconds[name][len(x)]

        return form


EVEN = dict.fromkeys(calibration.ROWS, 1.0)


def test_what_was_measured_is_kept(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    machine = Machine(monkeypatch, {"a": EVEN, "b": EVEN | {256: 2.0}})
    measured = calibration.rates(torch.float32, machine.forms)
    # Two operations for each row and weight; of many rows, a sixteenth of the weights.
    numbers = 2**18 // 4
    expected = {1: 2 * numbers, 16: 32 * numbers, 256: 32 * numbers}
    assert measured == {"a": expected, "b": expected | {256: 16 * numbers}}
    assert len(machine.asked) == 2 * 3 * 3
    assert calibration.rates(torch.float32, machine.forms) == measured
    assert len(machine.asked) == 2 * 3 * 3  # read
    (file,) = cache.iterdir()
    assert file.match("products-*.json")


def test_another_machine_or_dtype_has_another_file(
    monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    machine = Machine(monkeypatch, {"a": EVEN, "b": EVEN})
    calibration.rates(torch.float32, machine.forms)
    calibration.rates(BF16, machine.forms)
    calibration.rates(torch.float32, dict(list(machine.forms.items())[:1]))
    monkeypatch.setattr(calibration, "_processor", lambda: "another")
    calibration.rates(torch.float32, machine.forms)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "another")
    calibration.rates(torch.float32, machine.forms)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    calibration.rates(torch.float32, machine.forms)
    assert len(list(cache.iterdir())) == 6


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "{}", "null", '"a"', '{"a": 3}', '{"a": {"1": 2.0}}', '{"a": {"x": 1}}',
     '{"a": {"1": null, "16": 1, "256": 1}}', '{"a": {"1": [], "16": 1, "256": 1}}',
     '{"b": {"1": 1, "16": 1, "256": 1}}'],
)  # fmt: skip
def test_a_file_that_is_none_of_ours_is_written_anew(
    monkeypatch: pytest.MonkeyPatch, cache: Path, content: str
) -> None:
    machine = Machine(monkeypatch, {"a": EVEN, "b": EVEN})
    measured = calibration.rates(torch.float32, machine.forms)
    (file,) = cache.iterdir()
    for bad in (content.encode(), b"\xff\xfe"):
        file.write_bytes(bad)
        assert calibration.rates(torch.float32, machine.forms) == measured
        assert json.loads(file.read_text()).keys() == {"a", "b"}


def test_where_nothing_can_be_written_it_is_measured_each_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "a file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "a file"))
    machine = Machine(monkeypatch, {"a": EVEN})
    first = calibration.rates(torch.float32, machine.forms)
    assert calibration.rates(torch.float32, machine.forms) == first and len(machine.asked) == 18


def test_without_the_variable_it_is_in_the_users_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    calibration.rates(torch.float32, Machine(monkeypatch, {"a": EVEN}).forms)
    assert len(list((tmp_path / "home/.cache/nanoserve").glob("products-*.json"))) == 1


def test_what_is_hopeless_is_not_measured_to_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """On some machines, torch's bfloat16 would take minutes."""
    seconds = {"a": EVEN, "b": {1: 5.0}, "c": {1: 3.0, 16: 9.0}, "d": EVEN}
    machine = Machine(monkeypatch, seconds)
    assert calibration.rates(torch.float32, machine.forms).keys() == {"a", "d"}
    assert ("b", 16) not in machine.asked and ("c", 256) not in machine.asked


def test_real_forms_are_measured() -> None:
    found = forms(torch.float32)
    measured = calibration.rates(torch.float32, found)
    assert next(iter(measured)) == OURS and set(measured) <= {OURS, "torch"}
    assert all(rate > 1e6 for of in measured.values() for rate in of.values())


# ---------------------------------------------------------------- the choice


def choose(
    monkeypatch: pytest.MonkeyPatch, measured: Rates, *, shares: bool = True
) -> gemm_select.Choice:
    found = {
        OURS: FloatPanels,
        ONEDNN: Packed,
        "torch, widened tiles": WidenedTiles,
        "torch": Plain,
    }
    monkeypatch.setattr(gemm_select, "forms", lambda dtype: found)
    monkeypatch.setattr(calibration, "rates", lambda dtype, forms: measured)
    monkeypatch.setattr(float_linear, "shares_memory", lambda: shares)
    return choose_form(BF16, LARGE)


def of(*at_rows: float) -> dict[int, float]:
    return dict(zip(calibration.ROWS, (rate * 1e9 for rate in at_rows), strict=True))


@pytest.mark.parametrize(
    ("measured", "name", "make"),
    [
        ({OURS: of(9, 90, 300), ONEDNN: of(8, 80, 200), "torch": of(1, 1, 1)}, OURS, FloatPanels),
        ({OURS: of(9, 90, 300), ONEDNN: of(9.8, 98, 320)}, OURS, FloatPanels),  # noise
        ({OURS: of(9, 90, 300), ONEDNN: of(20, 200, 900)}, ONEDNN, Packed),
        ({OURS: of(9, 90, 300), "torch": of(9, 200, 900)}, "torch", Plain),
        # Each is the better one somewhere: never far from the best is ours.
        ({OURS: of(9, 90, 300), "torch": of(3, 90, 500)}, OURS, FloatPanels),
        ({OURS: of(9, 10, 10), "torch, widened tiles": of(8, 80, 80)}, "torch, widened tiles",
         WidenedTiles),
        ({OURS: of(9, 90, 300)}, OURS, FloatPanels),
        # Another than these two is the best, whatever the two could share.
        ({OURS: of(1, 9, 30), ONEDNN: of(1, 9, 90), "torch": of(9, 90, 900)}, "torch", Plain),
    ],
)  # fmt: skip
def test_the_form_is_the_one_that_is_never_far_from_the_best(
    monkeypatch: pytest.MonkeyPatch, measured: Rates, name: str, make: Any
) -> None:
    choice = choose(monkeypatch, measured)
    assert (choice.name, choice.make) == (name, make)


@pytest.mark.parametrize(
    ("theirs", "num_rows"), [(of(8, 80, 900), 64), (of(8, 200, 900), 4)], ids=["256", "16"]
)
def test_few_rows_are_ours_and_many_onednns_where_both_read_one_memory(
    monkeypatch: pytest.MonkeyPatch, theirs: dict[int, float], num_rows: int
) -> None:
    measured = {OURS: of(9, 90, 300), ONEDNN: theirs}
    choice = choose(monkeypatch, measured)
    assert choice.make.func is SharedPanels and choice.make.keywords == {"num_rows": num_rows}
    assert str(num_rows) in choice.name
    choice = choose(monkeypatch, measured, shares=False)
    assert (choice.name, choice.make) == (ONEDNN, Packed)  # at most 1.1 times slower, not 3 times
    slow = {OURS: of(9, 90, 300), ONEDNN: of(1, 10, 330)}
    assert choose(monkeypatch, slow, shares=False).make is FloatPanels


def test_few_rows_faster_but_not_many_is_nothing_to_share(monkeypatch: pytest.MonkeyPatch) -> None:
    choice = choose(monkeypatch, {OURS: of(9, 90, 300), ONEDNN: of(20, 90, 300)})
    assert choice == (ONEDNN, Packed)


def test_a_small_model_is_not_worth_a_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "rates", lambda *args: pytest.fail("measured"))
    for dtype in (torch.float32, BF16, torch.float16):
        choice = choose_form(dtype, calibration.MATRIX_BYTES - 1)
        assert choice == (next(iter(forms(dtype))), forms(dtype)[choice.name])
    assert choose_form(torch.float32, 1).make is FloatPanels


def test_a_batch_invariant_engine_never_multiplies_with_onednn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    faster = {OURS: of(9, 90, 300), ONEDNN: of(90, 900, 3000)}
    assert choose(monkeypatch, faster).name == ONEDNN
    assert choose_form(BF16, LARGE, batch_invariant=True) == (OURS, FloatPanels)
    monkeypatch.setattr(gemm_select, "forms", lambda dtype: {"torch": Plain})
    with pytest.raises(ValueError, match=r"torch\.float32.*pip install 'nanoserve\[cpu\]'"):
        choose_form(torch.float32, 1, batch_invariant=True)


def test_the_log_tells_what_was_chosen_and_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    choose(monkeypatch, {OURS: of(9, 90, 300), ONEDNN: of(8, 80, 200)})
    assert "torch.bfloat16 weights: own tiles (" in caplog.text
    assert "own tiles 9, 90, 300; oneDNN packed 8, 80, 200" in caplog.text


def test_without_numba_the_products_are_torchs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(gemm_select, "find_spec", lambda name: None)
    monkeypatch.setattr(packed_linear, "works", lambda: False)
    assert [*forms(torch.float32)] == ["torch"]
    assert [*forms(BF16)] == [*forms(torch.float16)] == ["torch, widened tiles", "torch"]
    assert choose_form(torch.float32, LARGE) == ("torch", Plain)
    assert "pip install 'nanoserve[cpu]'" in caplog.text
    monkeypatch.setattr(packed_linear, "works", lambda: True)
    assert next(iter(forms(BF16))) == ONEDNN and ONEDNN not in forms(torch.float16)


def test_float16_has_no_tiles_where_the_processor_cannot_convert_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from nanoserve.kernels.cpu import cpu_features

    monkeypatch.setattr(cpu_features, "converts_float16", lambda: False)
    assert OURS not in forms(torch.float16) and OURS in forms(torch.float32)
