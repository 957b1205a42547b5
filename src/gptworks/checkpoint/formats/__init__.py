"""The bytes of weight containers, one module each."""
