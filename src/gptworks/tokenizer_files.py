"""The files in which tokenizers come, by their names."""

JSON = "tokenizer.json"
PAIRS = (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe"))  # Hugging Face's and OpenAI's names
SENTENCEPIECE = ("sentencepiece.model", "tokenizer.model", "spiece.model")
SETTINGS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")

VOCABULARIES = (JSON, *(vocabulary for vocabulary, _ in PAIRS))  # a folder with one of these has a tokenizer
EVERY = (JSON, *(name for pair in PAIRS for name in pair), *SETTINGS)
