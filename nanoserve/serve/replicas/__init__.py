"""Data parallel replicas of an engine on Ray Serve, with prefix-aware routing of requests."""
