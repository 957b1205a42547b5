"""A campaign of faults against gptworks, from outside: `make soak MINUTES=30`; one try: `make soak REPEAT=kills:17`.

Each part makes tries, each try is a function of its seed and of a folder of its own, and what it finds is a `Found`.
"""
