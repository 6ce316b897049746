"""Worker side of the engine: it imports torch, and executes the steps that the scheduler plans."""
