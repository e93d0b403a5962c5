"""Families of the transformers library: tiny models, their exports, and the record of them."""
