"""Exercise: quantize in groups, pack two codes per byte, and multiply integers.

Complete the six functions, in numpy. All values are rounded to the nearest, ties to even
(`np.rint`); floats are float32. The rules:

1. `int4_scales`: a row is divided into groups of `group_size` inputs. A group's scale is its value
   of largest magnitude, with its sign, divided by -8, so this value gets the code -8. If a group
   has both x and -x, use the negative one. A group of zeros has the scale 0.
2. `int4_codes`: the nearest code for each value, given the scale of its group, from -8 to 7, and 0
   if the scale is 0.
3. `pack_nibbles`: the codes, plus 8, two per byte. The first of a pair is in the low four bits.
   `unpack_nibbles` is the inverse.
4. `int8_rows`: a scale for each row, its largest magnitude / 127; codes from -127 to 127. A row of
   zeros has the scale 0 and codes of 0.
5. `int8_product`: x W^T of activations in floats and weights in int8 with a scale per output. Each
   row of x is quantized by `int8_rows`. Codes are multiplied and added in an integer type that is
   wide enough for the sum, which is multiplied by both scales at the end.

Test it with `pytest -x docs/20-quantization/test_exercise.py`.
"""

from numpy import ndarray


def int4_scales(weight: ndarray, group_size: int) -> ndarray:
    """float32 [out, in] -> float32 [out, in / group_size]."""
    raise NotImplementedError


def int4_codes(weight: ndarray, scales: ndarray) -> ndarray:
    """float32 [out, in] and [out, groups] -> int8 [out, in]."""
    raise NotImplementedError


def pack_nibbles(codes: ndarray) -> ndarray:
    """int8 [out, in], in even -> uint8 [out, in / 2]."""
    raise NotImplementedError


def unpack_nibbles(packed: ndarray) -> ndarray:
    """uint8 [out, in / 2] -> int8 [out, in]."""
    raise NotImplementedError


def int8_rows(x: ndarray) -> tuple[ndarray, ndarray]:
    """float32 [rows, in] -> int8 [rows, in] and float32 [rows]."""
    raise NotImplementedError


def int8_product(x: ndarray, codes: ndarray, scales: ndarray) -> ndarray:
    """float32 [rows, in], int8 [out, in], float32 [out] -> float32 [rows, out]."""
    raise NotImplementedError
