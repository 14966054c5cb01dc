"""Run bundles with torch or onnxruntime: recognition, live speech, voice activity, codecs, TTS.

A model runs in a thread of its own. Torch is only imported to run a bundle with it. Speech that is
still being spoken has a `Session` of a `StreamingRecognizer`, which turns samples into `Event`s.
"""
