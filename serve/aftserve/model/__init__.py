"""The loaded model: its classifier, its costs, evidence, and reloading."""
