"""The model on devices: which processes there are, and the order in which a model is built on them."""
