"""The comparison of two runs tensor by tensor, and the search for the cause of an error."""
