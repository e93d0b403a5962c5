"""From queued jobs to runs of the engine."""
