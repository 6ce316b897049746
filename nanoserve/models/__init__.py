"""Model architectures, one file each, built from shared layers."""
