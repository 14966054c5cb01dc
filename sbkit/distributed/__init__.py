"""Devices and ranks: one device and precision for each process, and collective operations."""
