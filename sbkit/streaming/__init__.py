"""Streaming speech: sessions of a recognizer.

A `StreamingRecognizer` runs many `Session`s; a session turns samples into `Event`s.
"""

from sbkit.streaming.session import EndpointRules as EndpointRules
from sbkit.streaming.session import Event as Event
from sbkit.streaming.session import Final as Final
from sbkit.streaming.session import Session as Session
from sbkit.streaming.session import StreamingRecognizer as StreamingRecognizer
from sbkit.streaming.sources import audio_blocks as audio_blocks
