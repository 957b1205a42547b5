"""Other systems' use of the memory of a card: a step of each on tensors without memory, by the facts of its code."""
