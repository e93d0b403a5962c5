"""Functions of libraries whose loops over tokens are replaced by operators during a capture."""
