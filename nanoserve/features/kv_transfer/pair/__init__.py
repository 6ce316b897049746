"""The connector "socket": a prefill engine computes prompts for a decode engine."""
