"""Tool calling, i.e. the tools of a request and the calls in the model's output."""
