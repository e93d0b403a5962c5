"""Ray clusters, and the server as a Ray Serve deployment."""
