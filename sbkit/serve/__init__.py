"""`sbkit serve`: a server with OpenAI's API for transcripts, realtime sessions and speech.

Starlette receives and answers all requests in one thread. `Workers` process them in threads, which
share the model of a bundle through a `Batcher`.
"""
