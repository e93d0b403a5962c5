"""Documents of the demo with their tokens, and the byte-level BPE tokenizer that makes them."""

from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

from aftexport.demo.corpus import Corpus


@dataclass(frozen=True)
class Document:
    """A document and its tokens."""

    text: str
    label: str
    ids: list[int]

    def __len__(self) -> int:
        return len(self.ids)


def train_tokenizer(texts: Sequence[str], vocab_size: int) -> Tokenizer:
    """Train a tokenizer of at most ``vocab_size`` tokens, including the 256 bytes, on ``texts``."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=sorted(ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def tokenized(tokenizer: Tokenizer, corpus: Corpus) -> list[Document]:
    """Return the documents of a corpus with their tokens."""
    encoded = tokenizer.encode_batch(list(corpus.texts))
    return [
        Document(text, label, tokens.ids)
        for text, label, tokens in zip(corpus.texts, corpus.labels, encoded, strict=True)
    ]
