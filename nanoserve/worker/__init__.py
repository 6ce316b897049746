"""The worker side of the engine imports torch and executes the steps that the scheduler plans."""
