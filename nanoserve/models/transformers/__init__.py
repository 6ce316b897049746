"""Any decoder of transformers, with the paged attention of nanoserve."""
