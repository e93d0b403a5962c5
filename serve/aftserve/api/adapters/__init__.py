"""Endpoints in the formats of other servers, one file for each, over the same service."""
