"""What Python programs call besides the model and the tokenizer: the same functions as the command line's, by name."""
