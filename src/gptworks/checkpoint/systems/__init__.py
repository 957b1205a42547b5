"""The checkpoints of other systems: names, folders, orders of QKV; one module each. Bytes are in formats/."""
