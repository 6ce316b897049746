"""Model architectures. Each has one file and is built from shared layers."""
