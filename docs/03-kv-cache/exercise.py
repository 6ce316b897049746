"""Exercise: generate with a KV cache.

A model is given in parts, and you write the loop around them. All arrays are numpy's, float64.

    model.num_layers                       how many layers there are
    model.embed(token_id, position)        the vector x [hidden] with which a token enters
    model.project(layer, x)                (q, k, v) of a token in a layer, [head_dim] each
    model.finish(layer, x, attended)       the token's vector [hidden] after this layer
    model.choose(x)                        the next token id, from a token's last vector

There is one head. `attended` [head_dim] is the attention of the token's q over the k and v of all
tokens up to and including itself: softmax of (q . k / sqrt(head_dim)), times the values.

Run the test with: pytest -x docs/03-kv-cache/test_exercise.py
"""

from typing import Any


def generate(model: Any, prompt: list[int], num_new: int) -> list[int]:
    """Return the `num_new` tokens that follow `prompt`, which has at least one token.

    `model.project` may be called once for each token and layer, and not at all for the last new
    token: its K and V are never read. `model.choose` may be called `num_new` times. With
    `num_new` 0, nothing needs to be computed.
    """
    raise NotImplementedError
