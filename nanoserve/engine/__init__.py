"""The scheduler side of the engine, which plans steps with plain integers and without torch."""
