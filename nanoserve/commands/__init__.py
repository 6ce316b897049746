"""What `nanoserve` does in a shell: a module for each command."""
