"""Words become annotations that ELAN's and Praat's libraries read back."""

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import soundfile
from praatio import textgrid
from pympi import Eaf

from sbkit.data.annotations import read_annotations
from sbkit.data.tables import TableOptions
from sbkit.tasks.asr.annotation_files import annotation_tiers, to_eaf, to_textgrid
from sbkit.text.recognized_word import Word

TEXTS = ("ǃxóõ", '"no"', "a&b<c", "ts’a", "house")


def drawn_words(random: random.Random) -> Iterator[Word]:
    """Yield words with pauses, some of which overlap or have no length, in one or two channels."""
    channels = random.choice([(None,), (1, 2)])
    for channel in channels:
        end = 0.0
        for _ in range(random.randint(1, 15)):
            start = max(0.0, end + random.choice([0.0, 0.0004, 0.3, 2.5, -0.01]))
            end = start + random.choice([0.0, 0.0003, 0.25, 0.4811])
            confidence = random.choice([None, 0.5, 0.98765])
            yield Word(random.choice(TEXTS), start, end, confidence, channel=channel)


@pytest.mark.parametrize("seed", range(20))
def test_libraries_read_what_is_written(seed: int, tmp_path: Path) -> None:
    words = [*drawn_words(random.Random(seed))]
    expected = annotation_tiers(words)
    assert sum(len(spans) for name, spans in expected.items() if "words" in name) == len(words)
    recording = tmp_path / "a talk.wav"
    soundfile.write(recording, np.zeros(16_000, np.int16), 16_000)
    elan, praat = tmp_path / "a talk.eaf", tmp_path / "a talk.TextGrid"
    elan.write_text(to_eaf(words, recording), encoding="utf-8")
    praat.write_text(to_textgrid(words, 40.0), encoding="utf-8")
    document = Eaf(str(elan))
    assert [*document.get_tier_names()] == [*expected]
    grid = textgrid.openTextgrid(str(praat), includeEmptyIntervals=False)
    for name, spans in expected.items():
        assert sorted(span[:3] for span in document.get_annotation_data_for_tier(name)) == spans
        entries = [(round(1000 * s), round(1000 * e), text) for s, e, text in grid.getTier(name)]
        assert entries == spans
        assert all(spans[i][1] <= spans[i + 1][0] for i in range(len(spans) - 1))
        for file in (elan, praat):
            rows = read_annotations(str(file), TableOptions(tiers=(name,))).rows.to_pylist()
            read = [(float(r["start_ms"]), float(r["end_ms"]), r["text"]) for r in rows]
            assert read == spans and {row["path"] for row in rows} == {str(recording)}


def test_utterances_end_at_pauses_of_a_second() -> None:
    words = [Word("a", 0.0, 0.5), Word("b", 1.4, 1.6), Word("c", 2.7, 3.0, 0.25)]
    assert annotation_tiers(words) == {
        "utterances": [(0, 1600, "a b"), (2700, 3000, "c")],
        "words": [(0, 500, "a"), (1400, 1600, "b"), (2700, 3000, "c")],
        "confidences": [(2700, 3000, "0.250")],
    }
