"""The operating system: files, archives, memory, signals, cores and arguments."""
