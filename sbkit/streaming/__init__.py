"""Streaming speech: sessions of a recognizer.

A `StreamingRecognizer` runs many `Session`s, each of which turns samples into `Event`s.
"""

from typing import TYPE_CHECKING

from sbkit.base.imports import lazy_names

if TYPE_CHECKING:
    from sbkit.streaming.session import EndpointRules as EndpointRules
    from sbkit.streaming.session import Event as Event
    from sbkit.streaming.session import Final as Final
    from sbkit.streaming.session import Session as Session
    from sbkit.streaming.session import StreamingRecognizer as StreamingRecognizer
    from sbkit.streaming.sources import audio_blocks as audio_blocks

__getattr__ = lazy_names(
    "sbkit.streaming",
    EndpointRules="session",
    Event="session",
    Final="session",
    Session="session",
    StreamingRecognizer="session",
    audio_blocks="sources",
)
