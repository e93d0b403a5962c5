"""The page at ``/``, for people with a browser."""
