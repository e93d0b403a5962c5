"""The loaded model: its classifier, costs, evidence, tokenizer threads, and reload."""
