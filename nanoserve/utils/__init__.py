"""Validation, registries and the table of sampling parameters: used by every other package."""
