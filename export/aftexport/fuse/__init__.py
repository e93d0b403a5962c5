"""Rewrites of exported graphs into operators of the domain."""
