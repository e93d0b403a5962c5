"""Softmax attention in graphs of standard operators, replaced by one operator."""
