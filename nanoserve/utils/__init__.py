"""Validation, registries and the table of sampling parameters, used by all other packages."""
