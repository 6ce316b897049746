"""Optional features. Each plugs into the engine through its extension points and registries."""
