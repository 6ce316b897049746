"""Scheduler side of the engine: it plans steps with plain integers and imports no torch."""
