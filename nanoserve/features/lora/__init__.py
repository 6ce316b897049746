"""LoRA adapters by the request: many of them in one batch, loaded while other requests run."""
