"""Run bundles with torch or onnxruntime: recognition, live speech, voice activity, codecs, TTS.

A model may run in its own thread. Torch is only imported to run a bundle with it. For live speech,
a `StreamingRecognizer` opens a `Session`, which turns samples into `Event`s.
"""
