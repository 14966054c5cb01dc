"""Many clips are decoded by several processes, with the words and times of one."""

import os
import pickle
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from sbkit.base.errors import SbkitError
from sbkit.decoding import decoder as ctc_decoder
from sbkit.decoding.decoder import BeamDecoder, CtcDecoder, DecoderInput, DecoderPool
from sbkit.decoding.words import Confidence, WordAligner
from sbkit.lm.kneser_ney import train
from sbkit.lm.language_models import LanguageModels
from tests.decoding.spoken import char_tokenizer, spoken, train_models
from tests.runs import ROOT

TEXTS = ["call the north office", "the north is cold", "send me to the office"] * 3
STEP = 640  # samples of a frame


@pytest.fixture
def decoder(tmp_path: Path) -> CtcDecoder:
    tokenizer, file = char_tokenizer(tmp_path, TEXTS), tmp_path / "lm.safetensors"
    train_models(file, tokenizer, TEXTS)
    beam = BeamDecoder(tokenizer=tokenizer, language_models=file, weights={})
    words = WordAligner(tokenizer=tokenizer, samples_per_frame=STEP, sample_rate=16_000)
    return CtcDecoder(beam.with_hotwords(["norse"]), words)


def clips_of(decoder: CtcDecoder) -> list[DecoderInput]:
    rows = [spoken(decoder.aligner.tokenizer, text, {}) for text in TEXTS]
    return [
        DecoderInput(log_probs=row, samples=len(row) * STEP, start=10.0 * index)
        for index, row in enumerate(rows)
    ]


@pytest.fixture
def always_pooled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctc_decoder, "MIN_FRAMES_FOR_POOL", 0)


def test_pool_of_processes_equals_one_process(
    decoder: CtcDecoder, always_pooled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    clips = clips_of(decoder)
    bad = DecoderInput(log_probs=np.full((3, 99), np.nan), samples=3 * STEP, start=0)
    pool = DecoderPool(decoder, processes=2)
    results = pool.decode(clips, times=True)
    assert pool._processes is not None
    assert pool.decode(clips[:2], times=True) == results[:2]
    with pytest.raises(SbkitError, match="99 columns"):
        pool.decode([bad], times=True)
    pool.close()
    monkeypatch.setattr(ctc_decoder, "MIN_FRAMES_FOR_POOL", 1 << 30)
    unused = DecoderPool(decoder, processes=2)
    assert unused.decode(clips, times=True) == results
    assert unused._processes is None
    assert [result.text for result in results] == TEXTS


@pytest.mark.parametrize("processes", [1, 2])
def test_phrases_of_a_clip_bias_only_that_clip(
    decoder: CtcDecoder, always_pooled: None, processes: int
) -> None:
    """A request with a prompt had processes of its own."""
    tokenizer, beam = decoder.aligner.tokenizer, decoder.decoder
    assert isinstance(beam, BeamDecoder)
    judged = replace(decoder.aligner, confidence=Confidence(0.0, {"posterior": 1.0}))
    log_probs = spoken(tokenizer, "the forth is cold", {4: "n"})
    clip = DecoderInput(log_probs=log_probs, samples=len(log_probs) * STEP)
    clips = [clip, replace(clip, phrases=("forth",)), clip]
    pool = DecoderPool(CtcDecoder(beam.with_hotwords(()), judged), processes=processes)
    plain, expected, again = pool.decode(clips, times=True)
    assert (pool._processes is None) == (processes == 1)
    pool.close()
    assert plain == again
    assert (plain.text, expected.text) == ("the north is cold", "the forth is cold")
    has_confidence = [word.confidence is not None for word in expected.words]
    assert has_confidence == [True, False, True, True]


def test_pool_reports_a_killed_process(decoder: CtcDecoder, always_pooled: None) -> None:
    many, clips = DecoderPool(decoder, processes=2), clips_of(decoder)
    many.decode(clips, times=True)
    assert many._processes is not None
    os.kill(next(iter(many._processes._processes)), signal.SIGKILL)
    with pytest.raises(SbkitError, match="decoding processes was killed"):
        for _ in range(1000):
            many.decode(clips, times=True)
    assert len(many.decode(clips, times=True)) == len(TEXTS)
    many.close()


NEVER_CLOSED = """
import builtins
import pickle
import sys
from pathlib import Path
from sbkit.decoding import decoder as ctc_decoder
ctc_decoder.MIN_FRAMES_FOR_POOL = 0
decoder, clips = pickle.loads(Path(sys.argv[1]).read_bytes())
many = builtins.many = ctc_decoder.DecoderPool(decoder, processes=2)  # there until the very end
print(len(many.decode(clips, times=False)))
"""


def test_pool_needs_no_main_block_and_need_not_be_closed(
    decoder: CtcDecoder, tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text(NEVER_CLOSED)
    (tmp_path / "reader").write_bytes(pickle.dumps((decoder, clips_of(decoder))))
    done = subprocess.run(
        [sys.executable, "-W", "error", tmp_path / "script.py", tmp_path / "reader"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert (done.stdout, done.stderr) == (f"{len(TEXTS)}\n", "")


def test_decoder_with_sentences_as_words_is_pickled(decoder: CtcDecoder) -> None:
    """A language without spaces has sentences as words, whose trees are deep."""
    beam, tokenizer = decoder.decoder, decoder.aligner.tokenizer
    assert isinstance(beam, BeamDecoder)
    sentence = "callthenorthoffice" * 50
    models = LanguageModels(train([[sentence]], order=1).model, None)
    long = beam.with_language_models(models).with_hotwords([sentence])
    log_probs = spoken(tokenizer, TEXTS[0], {})
    expected = long.nbest(log_probs)
    assert pickle.loads(pickle.dumps(long)).nbest(log_probs) == expected
