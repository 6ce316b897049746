"""The commands of `nanoserve COMMAND` in a shell: one module each, with a `main`."""
