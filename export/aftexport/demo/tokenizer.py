"""The demo's tokenizer: byte-level BPE, which has a token for every byte."""

from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer


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


def encode(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """Return the token ids of each text."""
    return [encoding.ids for encoding in tokenizer.encode_batch(list(texts))]
