"""The update rules of recurrent linear attention: times, bounds and memory."""
