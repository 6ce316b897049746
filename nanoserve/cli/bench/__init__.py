"""`nanoserve bench`: engines beside each other and beside their hardware; servers over HTTP."""
