"""An extension of one's own, which a request needs: its prompt is computed token by token."""

from nanoserve.engine.extension import Extension


class TokenByToken(Extension):
    def __init__(self, engine) -> None:
        self.num_limited = 0

    def limit_tokens(self, seq, num_tokens: int, plan) -> int:
        self.num_limited += num_tokens > 1
        return min(num_tokens, 1)
