"""The options of `sbkit serve` that no other command has; it imports nothing of the server."""

from sbkit.base.arguments import flag, path, text

LISTENING = (
    text("--host", "HOST", "to listen on (default: 127.0.0.1)", default="127.0.0.1"),
    text("--port", "N", "(default: 8000; 0: a free one)", type=int, default=8000),
    text("--alias", "NAME", "that clients may have for the model; repeatable", action="append"),
    path("--api-key-file", "FILE", "the keys of clients, one on each line; SIGHUP reads it again"),
    flag("--no-key", "admit clients on other machines without a key"),
    text("--allow-origin", "URL", "whose pages may use it; repeatable, * for all", action="append"),
)
LIMITING = (
    text("--max-batch-seconds", "S", "of padded audio in a batch", type=float),
    text("--max-wait-ms", "MS", "to wait for others (default: 10)", type=float, default=10.0),
    text("--max-mb", "N", "of a request (default: 25)", type=float),
    text("--max-seconds", "S", "of its audio (default: 7200)", type=float),
    text("--max-concurrent", "N", "requests transcribed at a time (default: 32)", type=int),
    text("--max-queue", "N", "requests that wait beside them (default: 128)", type=int),
    text("--max-sessions", "N", "realtime ones (default: 64)", type=int),
    text("--max-session-seconds", "S", "of a realtime session (default: 7200)", type=float),
    text("--max-connections", "N", "of clients (default: 1000)", type=int),
    text("--receive-seconds", "S", "for a request to arrive (default: 60)", type=float),
    text("--answer-seconds", "S", "until its answer (default: 600)", type=float),
    text("--drain-seconds", "S", "to go on after SIGTERM (default: 5)", type=float),
    text("--grace-seconds", "S", "to finish after that (default: 30)", type=float),
)
