"""The muscle: torch lives here. It executes what the brain has decided."""
