"""The kinds of tokenizers beside byte-level BPE, made known to `Tokenizer.from_pretrained`, in the order it looks."""

from gptworks.tokenizer import nanogpt_meta, sentencepiece
from gptworks.tokenizer.characters import CharacterTokenizer, is_of_characters
from gptworks.tokenizer.tokenizer import KINDS_OF_FILES, KINDS_OF_VOCABULARIES, KindOfFile

KINDS_OF_FILES += [
    KindOfFile(".model", sentencepiece.model_in, sentencepiece.SentencePieceTokenizer.read),
    KindOfFile(".pkl", nanogpt_meta.find, nanogpt_meta.read_tokenizer),
]
KINDS_OF_VOCABULARIES += [(is_of_characters, CharacterTokenizer)]
