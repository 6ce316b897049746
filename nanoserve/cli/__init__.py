"""What `nanoserve COMMAND` does in a shell: one module for each command, with a `main`."""
