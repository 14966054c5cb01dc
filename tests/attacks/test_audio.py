"""Clients upload any bytes: a damaged file of any format is read or refused, in bounded memory."""

import os
import random
import resource
from io import BytesIO

from sbkit.audio.containers import AudioError
from sbkit.audio.io import declared_seconds, stream_audio
from tests.audio.formats import FORMATS, encode_tone

MUTATIONS = int(os.environ.get("SBKIT_MUTATIONS", "400"))  # 20,000 take a quarter of an hour
NUMBERS = (b"\xff\xff\xff\xff", bytes(4), b"\x7f\xff\xff\xff", b"\x80\0\0\0", b"\1\0\0\0")
MAX_GROWTH_MB = 500


def mutated(random: random.Random, file: bytes) -> bytes:
    """Change, remove, insert or truncate bytes, more often near the start."""
    content = bytearray(file)
    kind = random.choice(("byte", "number", "remove", "insert", "truncate"))
    for _ in range(random.choice((1, 2, 8, 40))):
        if not content:
            break
        index = random.randrange(random.choice((len(content), min(len(content), 400))))
        match kind:
            case "byte":
                content[index] = random.randrange(256)
            case "number":
                content[index : index + 4] = random.choice(NUMBERS)
            case "remove":
                del content[index : index + random.randrange(1, 64)]
            case "insert":
                content[index:index] = random.randbytes(random.randrange(1, 64))
            case "truncate":
                del content[index:]
    return bytes(content)


def test_mutated_files_are_read_or_refused() -> None:
    random_ = random.Random(1)
    files = [encode_tone(name, seconds=0.6) for name in FORMATS]
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    outcomes: set[str] = set()
    for _ in range(MUTATIONS):
        content = mutated(random_, random_.choice(files))
        declared_seconds(BytesIO(content))
        try:
            for _ in stream_audio(BytesIO(content), block_seconds=5):
                pass
            outcomes.add("read")
        except AudioError as error:
            outcomes.add(error.reason)
    assert {"read", "not audio", "cut short or damaged"} <= outcomes
    growth = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory) / 1000
    assert growth < MAX_GROWTH_MB
