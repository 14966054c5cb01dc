"""The version of sbkit, in its only place."""

__version__ = "0.1.0"
