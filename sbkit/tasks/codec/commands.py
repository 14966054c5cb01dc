"""`sbkit encode` and `sbkit decode`: audio as a file of codes, and back."""

from argparse import Namespace
from pathlib import Path

from sbkit.base.files import require_writable
from sbkit.cli.arguments import Parser


def add_commands(parser: Parser) -> None:
    """Add `encode` and `decode`."""
    for name, handler, help in (
        ("encode", encode, "write audio as codes"),
        ("decode", decode, "write the audio of codes"),
    ):
        add = parser.add_command(name, handler, help, "model runtime import", opens_bundle=True)
        add("file", metavar="FILE", type=Path, help="the file to read")
        add("--out", metavar="FILE", type=Path, required=True, help="the file to write")


def encode(options: Namespace) -> None:
    """Write the codes of an audio file."""
    from sbkit.tasks.codec.codes import write_codes
    from sbkit.tasks.codec.predict import Codec

    require_writable(options.out.parent, option="--out")
    with Codec.from_options(options) as codec:
        write_codes(options.out, codec.encode(options.file), codec.space, codec.fingerprint)


def decode(options: Namespace) -> None:
    """Write the audio of a file of codes, as WAV."""
    from sbkit.audio.io import write_wav
    from sbkit.tasks.codec.codes import read_codes
    from sbkit.tasks.codec.predict import Codec

    require_writable(options.out.parent, option="--out")
    with Codec.from_options(options) as codec:
        coded = read_codes(options.file, codec.space, codec.fingerprint, frame=codec.frame)
        write_wav(options.out, codec.decode(coded), codec.sample_rate)
