"""Anthropic's Messages API: requests and answers of content blocks, and its errors."""
