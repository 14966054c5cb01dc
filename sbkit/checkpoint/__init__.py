"""Checkpoints: whole or absent, resumed bit for bit, averaged, and bound to one configuration."""
