"""Published formats of quantised checkpoints: one reader each; all end in one canonical form."""
