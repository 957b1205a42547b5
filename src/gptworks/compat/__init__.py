"""Python of other systems, by their names: `from mindformers` becomes `from gptworks.compat.mindformers`."""
