"""What a checkpoint says and holds: where it is, its `config.json`, its weights."""
