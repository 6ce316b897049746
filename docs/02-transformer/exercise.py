"""Exercise: rotation, and causal attention over a packed batch.

Both functions take and return numpy arrays of float64. A packed batch has the tokens of all its
sequences one after the other: sequence i has the rows cu_seqlens[i] to cu_seqlens[i + 1] - 1.

Use numpy (exp, cos, matmul, einsum), but no library that has attention.

Run the test with: pytest -x docs/02-transformer/test_exercise.py
"""

import numpy as np


def rotate(x: np.ndarray, positions: np.ndarray, theta: float) -> np.ndarray:
    """Apply rotary position embedding; [num_tokens, num_heads, head_dim] -> the same shape.

    In each head, dimensions i and i + head_dim / 2 are a point in a plane. Rotate it by the angle
    positions[token] x theta^(-2i / head_dim). `positions` are integers [num_tokens].
    """
    raise NotImplementedError


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, cu_seqlens: np.ndarray) -> np.ndarray:
    """Compute causal attention within each sequence; returns [num_tokens, num_heads, head_dim].

    q: [num_tokens, num_heads, head_dim]; k and v: [num_tokens, num_kv_heads, head_dim]. Query head
    h reads KV head h // (num_heads // num_kv_heads). Scores are divided by the root of head_dim. A
    token attends to itself and the tokens of its own sequence before it. A sequence may be empty.

    Scores can be as large as 1,000: softmax must not overflow.
    """
    raise NotImplementedError
