"""OpenAI's Responses API: requests of items, typed events, and a store of earlier responses."""
