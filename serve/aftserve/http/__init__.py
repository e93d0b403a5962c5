"""The HTTP layer below the application: connections, listeners and limits on bodies."""
