"""`nanoserve bench`: compare engines with each other and with the hardware; measure servers."""
