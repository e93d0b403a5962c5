"""The bundle: the folder written by an export, with its manifest, golden cases and tokenizer."""
