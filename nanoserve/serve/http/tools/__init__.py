"""Tools: what a model may call, and what it has called."""
