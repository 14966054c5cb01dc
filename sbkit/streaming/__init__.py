"""Streaming speech: sessions of a recognizer, and a pipeline that answers.

A `StreamingRecognizer` runs many `Session`s, each of which turns samples into `Event`s.
"""

from typing import TYPE_CHECKING

from sbkit.base.imports import lazy_names

if TYPE_CHECKING:
    from sbkit.streaming.devices import audio_blocks as audio_blocks
    from sbkit.streaming.pipeline import Pipeline as Pipeline
    from sbkit.streaming.pipeline import Turn as Turn
    from sbkit.streaming.session import EndpointRules as EndpointRules
    from sbkit.streaming.session import Event as Event
    from sbkit.streaming.session import Final as Final
    from sbkit.streaming.session import Session as Session
    from sbkit.streaming.session import StreamingRecognizer as StreamingRecognizer

__getattr__ = lazy_names(
    "sbkit.streaming",
    EndpointRules="session",
    Event="session",
    Final="session",
    Pipeline="pipeline",
    Session="session",
    StreamingRecognizer="session",
    Turn="pipeline",
    audio_blocks="devices",
)
