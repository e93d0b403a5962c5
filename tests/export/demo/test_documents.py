from aftexport.demo.corpus import Corpus
from aftexport.demo.documents import tokenized, train_tokenizer

TEXTS = ("def one(x):\n    return x\n" * 20, "class Two:\n\tvalue = 'zwei'\n" * 20)


def test_text_survives_round_trip() -> None:
    tokenizer = train_tokenizer(TEXTS, 300)
    texts = (*TEXTS, "never seen: \N{SNOWMAN}\x00\r\n  end", " leading")
    for document in tokenized(tokenizer, Corpus(texts, ("a",) * 4)):
        assert tokenizer.decode(document.ids) == document.text


def test_frequent_words_become_one_token() -> None:
    tokenizer = train_tokenizer(TEXTS, 300)
    assert tokenizer.get_vocab_size() <= 300
    (document,) = tokenized(tokenizer, Corpus((" return",), ("a",)))
    assert len(document) == len(document.ids) == 1


def test_same_texts_give_same_tokenizer() -> None:
    assert train_tokenizer(TEXTS, 300).to_str() == train_tokenizer(TEXTS, 300).to_str()
