"""`sbkit serve`: a server with OpenAI's API for transcripts, realtime sessions and speech.

Starlette answers in one thread. Requests are worked on in threads of `Workers`, and share the model
of a bundle through a `Batcher`.
"""
