"""What a layout would do, found with its own code and without its machines."""
