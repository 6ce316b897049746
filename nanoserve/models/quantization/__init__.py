"""Weights of fewer bits: one canonical form, the formats that end in it, the ways to execute it."""
