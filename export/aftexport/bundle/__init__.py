"""The bundle: the folder that an export writes, with its manifest, golden cases and tokenizer."""
