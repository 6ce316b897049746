"""The architectures, one file each, over shared layers."""
