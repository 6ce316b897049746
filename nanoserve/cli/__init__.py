"""The commands of `nanoserve COMMAND`. Each is a module with a function `main`."""
