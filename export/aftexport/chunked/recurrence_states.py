"""The names of states in the graphs of a recurrence in chunks."""

LEFT_STATE = "chunk_left_state"
"""The input with the state of all tokens before a chunk, float32 ``[1, *shape]``."""
RIGHT_STATE = "chunk_right_state"
"""The input with the state of all tokens after a chunk, float32 ``[1, *shape]``."""
NEXT_STATE = "chunk_next_state"
"""The output with the state for the next chunk, float32 ``[1, *shape]``."""
