"""Output that obeys a grammar: what may come next, token by token."""
