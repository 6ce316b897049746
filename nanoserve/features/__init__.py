"""Features: each plugs into the engine through extensions, inputs, stages, heads and registries."""
