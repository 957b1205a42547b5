"""Is this machine ready? Nothing here imports torch before it is looked at: it may be what is missing."""
