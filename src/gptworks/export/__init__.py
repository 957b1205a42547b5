"""A model for other runtimes: a folder that needs nothing of ours, and running such a folder with its own runtime."""
