"""The HTTP server over a bundle. Needs no torch."""
