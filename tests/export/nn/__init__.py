"""Tests of the layers and of the document classifier."""
