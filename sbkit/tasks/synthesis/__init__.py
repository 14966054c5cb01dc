"""Synthesis: text to speech."""
