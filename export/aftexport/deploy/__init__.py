"""Deployment on one machine: engines are built, chosen and exported to Triton repositories."""
