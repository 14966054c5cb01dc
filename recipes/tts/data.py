"""The data of a TTS model: the symbols and the pitch of each clip, in columns."""

from collections.abc import Iterator
from pathlib import Path

from datasets import Dataset

from recipes.prepare import prepare_transcripts, with_column
from sbkit.data.corpus import SettingValues
from sbkit.data.shard import read_rows
from sbkit.data.splits import Splits, read_column
from sbkit.models.vocoder import FRAME_HOPS
from sbkit.tasks.tts.recordings import PITCH, PITCH_VERSION, SYMBOLS, pitch_text
from sbkit.tasks.tts.symbols import read_texts, symbols_version, to_symbols
from sbkit.tasks.tts.task import SYMBOL_FILE
from sbkit.text.vocabulary import ClassLabels, ensure_labels


def prepare_spoken(settings: SettingValues) -> Splits:
    """Prepare audio and transcripts, and add the symbols and the pitch of each clip as columns."""
    symbol_type = settings["symbols"]
    language = str(settings["language"])
    rate = settings["sample_rate"]
    frame = FRAME_HOPS * settings["hop"]
    splits = with_column(
        prepare_transcripts(settings),
        SYMBOLS,
        lambda split: read_texts(split["sentence"][:], language, symbol_type),
        identity=[symbol_type, language, symbols_version(symbol_type)],
    )

    def pitches(split: Dataset) -> Iterator[str]:
        for row in read_rows(split, range(len(split))):
            yield pitch_text(row["audio"], rate, frame)

    return with_column(splits, PITCH, pitches, identity=[rate, frame, PITCH_VERSION])


def prepare_symbols(settings: SettingValues, splits: Splits) -> ClassLabels:
    """List the symbols of the training set."""
    texts = read_column(splits.train, SYMBOLS)
    names = {symbol for text in texts for symbol in to_symbols(text)}
    return ensure_labels(Path(settings["output_folder"]) / SYMBOL_FILE, names)
