"""Tests of what the README and the documentation say."""
