"""Exercise: route a packed batch, group it by expert, and multiply by each expert's weights once.

Complete the three functions in numpy, with floats in float32. A *pair* is a token with one of its
experts; pair number p is choice p % top_k of token p // top_k. The rules:

1. `route`: the softmax over *all* experts, then the `top_k` most probable, the best first (of equal
   ones the lower number first). With `renormalise`, the weights are divided by their sum.
2. `group_by_expert`: the pairs in the order of their experts, and within an expert in their own
   order. Expert e has the pairs order[bounds[e] : bounds[e + 1]], which may be none.
3. `sum_of_experts`: for each token, the weighted sum of the outputs of its experts. An expert
   computes `down (silu(gate x) * up x)`; `gate_up` holds the rows of gate, then those of up. Call
   `multiply(x, weight)`, which is x @ weight.T, for all products: twice for each expert that is on
   this rank and has pairs, with all of its tokens, and for nothing else.

The experts on this rank are `first_expert` and those that follow, as many as `down` has. Pairs of
other experts add nothing: another rank has them.

Test it with `pytest -x docs/22-experts/test_exercise.py`.
"""

from collections.abc import Callable

from numpy import ndarray


def route(logits: ndarray, top_k: int, renormalise: bool) -> tuple[ndarray, ndarray]:
    """float32 [tokens, experts] -> integers and float32, both [tokens, top_k]."""
    raise NotImplementedError


def group_by_expert(ids: ndarray, num_experts: int) -> tuple[ndarray, ndarray]:
    """Integers [tokens, top_k] -> order [tokens x top_k] and bounds [num_experts + 1]."""
    raise NotImplementedError


def sum_of_experts(
    hidden: ndarray,
    ids: ndarray,
    weights: ndarray,
    gate_up: ndarray,
    down: ndarray,
    multiply: Callable[[ndarray, ndarray], ndarray],
    num_experts: int,
    first_expert: int = 0,
) -> ndarray:
    """[tokens, hidden], [tokens, top_k] twice, [here, 2 x size, hidden], [here, hidden, size] ->
    [tokens, hidden]."""
    raise NotImplementedError
