"""A file of requests in, a file of answers out: OpenAI's batch format, without a server."""
