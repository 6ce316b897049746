"""Batch jobs, which answer a file of requests in OpenAI's batch format without a server."""
