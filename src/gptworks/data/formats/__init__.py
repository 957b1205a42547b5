"""The bytes of dataset formats, one module each."""
