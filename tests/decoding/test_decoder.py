"""Beam decoders: hotwords, streams, rescoring, and pools of processes that decode many clips."""

import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from multiprocessing import active_children
from pathlib import Path

import numpy as np
import pytest
import torch
from loky import ProcessPoolExecutor

from sbkit.base.arrays import LogProbs
from sbkit.base.errors import ConfigError, SbkitError
from sbkit.base.workers import start_processes
from sbkit.decoding import pool as clip_module
from sbkit.decoding.attention import AttentionScorer
from sbkit.decoding.beam import BeamDecoder
from sbkit.decoding.decoder import DecoderWeights, rescore
from sbkit.decoding.greedy import GreedyDecoder, best_tokens
from sbkit.decoding.pool import ClipDecoder, DecoderInput, DecoderPool, RecognizedClip
from sbkit.decoding.prefix_beam import PrefixBeamSearch
from sbkit.decoding.word_times import Confidence
from sbkit.lm.kneser_ney import train
from sbkit.lm.language_models import LanguageModels
from sbkit.models.loss import attention_loss
from sbkit.text.tokenizer import Tokenizer
from tests.decoding.by_definition import SETTINGS, best_of, enumerate_paths, random_matrices
from tests.decoding.spoken import (
    TEXTS,
    char_tokenizer,
    make_aligner,
    misheard,
    silence,
    spoken,
    train_models,
    transcribe,
)
from tests.models.test_asr import make_model, sbkit_parts
from tests.processes import in_fork
from tests.runs import ROOT
from tests.shortage import LOKY_REFUSALS, NO_PROCESS, refusing

STEP = 640  # samples of a frame


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return char_tokenizer(tmp_path)


@pytest.fixture
def beam(tmp_path: Path, tokenizer: Tokenizer) -> BeamDecoder:
    file = tmp_path / "lm.safetensors"
    train_models(file, tokenizer)
    return BeamDecoder(tokenizer=tokenizer, language_models=file, weights={})


@pytest.mark.parametrize("variant", ["greedy", "hotwords", "rescoring"])
def test_stream_of_frames_is_decoded_as_the_whole_clip(beam: BeamDecoder, variant: str) -> None:
    decoder: BeamDecoder | GreedyDecoder = beam
    attention, vocabulary = None, beam.tokenizer.vocabulary
    if variant == "greedy":
        decoder = GreedyDecoder(vocabulary)
    elif variant == "hotwords":
        decoder = beam.with_hotwords(["lam", "north"])
    else:
        beam.attention_rescoring = True
        attention = AttentionScorer(
            score_texts=lambda texts: -(texts != 2).sum(1) - np.ones(len(texts)), end=2
        )
    random = np.random.default_rng(3)
    pause = silence(beam.tokenizer, 30)
    for utterance in misheard(beam.tokenizer):
        log_probs = np.concatenate([pause, utterance.log_probs, pause, utterance.log_probs, pause])
        state = decoder.start()
        for part in np.split(log_probs, np.sort(random.integers(0, len(log_probs), 60))):
            state = decoder.advance(state, part)
        streamed, *_ = decoder.finish(state, attention)
        whole, *_ = decoder.nbest(log_probs, attention)
        assert streamed.tokens == whole.tokens
        assert streamed.score == pytest.approx(whole.score, abs=1e-9)


def test_decoder_refuses_invalid_weights(tokenizer: Tokenizer) -> None:
    for weights, message in (
        ({"words": 1}, "are word, .*, but are {'words': 1}"),
        ({"word": 1000}, "a number between -1000 and 1000, but are {'word': 1000}"),
    ):
        with pytest.raises(ConfigError, match=message):
            BeamDecoder(tokenizer=tokenizer, language_models=Path("x"), weights=weights)


def test_nothing_is_written_where_greedy_decoding_hears_nothing(decoder: ClipDecoder) -> None:
    """Summed over ten minutes, the little that a blank of 0.9 leaves would be words."""
    tokenizer = decoder.aligner.tokenizer
    clip = DecoderInput(log_probs=silence(tokenizer, 15_000), samples=15_000 * STEP)
    assert decoder.decode(clip, with_times=True).text == ""
    call, pause = spoken(tokenizer, "call", {}), silence(tokenizer, 1500)
    c = tokenizer.encode("c")[-1]
    call[0, [c, tokenizer.vocabulary.blank]] = np.log([0.25, 0.7])  # greedy decoding hears "all"
    pause[700, c] = np.log(0.5)
    log_probs = np.concatenate([pause, call, pause, call, pause])
    clip = DecoderInput(log_probs=log_probs, samples=len(log_probs) * STEP)
    words = decoder.decode(clip, with_times=True).words
    assert [word.text for word in words] == ["call", "call"]
    starts = [1500 * STEP / 16_000, (3000 + len(call)) * STEP / 16_000]
    assert [word.start for word in words] == pytest.approx(starts, abs=0.1)


def test_word_times_do_not_depend_on_the_decoder(beam: BeamDecoder) -> None:
    """Greedy decoding writes twelve spaces, a beam one; the times follow from the text.

    The last of the spaces could also be the start of the n.
    """
    tokenizer = beam.tokenizer
    space, blank, n = tokenizer.silent_ids[1], tokenizer.vocabulary.blank, tokenizer.encode("n")[-1]
    pause = np.full((24, tokenizer.vocab_size), 0.001)
    pause[::2, space] = pause[1::2, blank] = 0.9
    pause[22, [space, n]], pause[23, [blank, n]] = (0.5, 0.4), (0.6, 0.3)
    call, north = (spoken(tokenizer, text, {}) for text in ("call", "north"))
    log_probs = np.concatenate([call, np.log(pause), north])
    searching = beam.with_weights(DecoderWeights(word=0, token=3, token_bonus=0))
    clip = DecoderInput(log_probs=log_probs, samples=len(log_probs) * STEP)
    num_spaces, words = [], []
    for decoder in (None, searching):
        clip_decoder = ClipDecoder(decoder, make_aligner(tokenizer))
        tokens = clip_decoder.decoder.nbest(log_probs)[0].tokens
        num_spaces.append(tokens.count(space))
        words.append(clip_decoder.decode(clip, with_times=True).words)
    assert num_spaces == [12, 1]
    assert [word.text for word in words[0]] == ["call", "north"]
    assert words[0] == words[1]
    spelled = tokenizer.encode("call north")
    assert make_aligner(tokenizer).align(log_probs, spelled, samples=clip.samples) == words[0]


def test_space_in_a_pause_is_silence(beam: BeamDecoder) -> None:
    """A frame that allows nothing but a space leaves the words around it alone."""
    tokenizer = beam.tokenizer
    pause = silence(tokenizer, 50)
    pause[25] = -np.inf
    pause[25, tokenizer.silent_ids[1]] = 0.0
    call = spoken(tokenizer, "call", {})
    assert transcribe(beam, np.concatenate([call, pause, call])) == "call call"


def test_weak_token_beside_a_heard_one_is_found(beam: BeamDecoder) -> None:
    """Greedy decoding hears "cll": a blank is likelier than the a."""
    tokenizer = beam.tokenizer
    log_probs = spoken(tokenizer, "call", {})
    log_probs[2, [tokenizer.encode("a")[-1], tokenizer.vocabulary.blank]] = np.log([0.45, 0.55])
    assert tokenizer.decode(best_tokens(log_probs, tokenizer.vocabulary.blank)) == "cll"
    assert transcribe(beam, log_probs) == "call"


def test_clip_that_allows_no_text_is_empty(beam: BeamDecoder, decoder: ClipDecoder) -> None:
    """Only the unknown token is possible in its frame, and no decoder may write it."""
    log_probs = np.full((1, beam.tokenizer.vocab_size), -np.inf)
    log_probs[0, beam.tokenizer.vocabulary.unk] = 0.0
    clip = DecoderInput(log_probs=log_probs, samples=STEP)
    for clip_decoder in (ClipDecoder(beam, decoder.aligner), decoder):  # the second has hotwords
        assert clip_decoder.decode(clip, with_times=True).text == ""


# -- rescoring


class RandomDecoder(AttentionScorer):
    """An attention decoder of random numbers."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def score(self, sequences: Sequence[tuple[int, ...]]) -> list[float]:
        return [np.random.default_rng([self._seed, *tokens]).normal() for tokens in sequences]


def test_rescore_of_all_hypotheses_equals_enumeration() -> None:
    for seed, log_probs in enumerate(random_matrices(30)):
        attention, beam = RandomDecoder(seed), PrefixBeamSearch(settings=SETTINGS).decode(log_probs)
        scores = {
            tokens: ctc_score + 1.5 * attention.score([tokens])[0]
            for tokens, ctc_score in enumerate_paths(log_probs).items()
        }
        rescored = rescore(beam, attention, 1.5)
        assert rescored[0].tokens == best_of(scores)
        ordered = sorted(scores.values(), reverse=True)
        assert [hypothesis.score for hypothesis in rescored] == pytest.approx(ordered, abs=1e-9)


@torch.no_grad()
def test_attention_decoder_scores_texts_as_the_training_loss_does() -> None:
    torch.manual_seed(0)
    model = make_model(sbkit_parts())
    states, lengths = torch.randn(2, 7, 16), torch.tensor([7, 4])
    tokens, counts = torch.tensor([[4, 5, 6], [8, 0, 0]]), torch.tensor([3, 1])
    logits = model.decoder_log_probs(tokens, states, lengths)
    eos = model.vocabulary.eos
    losses = attention_loss(logits, tokens, counts, eos, 0.0).sums
    long, short = (
        AttentionScorer(score_texts=partial(model.score_texts, row[:count]), end=eos)
        for row, count in zip(states, lengths.tolist(), strict=True)
    )
    assert long.score([(4, 5, 6), (8,)])[0] == pytest.approx(-float(losses[0]), abs=1e-5)
    assert short.score([(8,)]) == [pytest.approx(-float(losses[1]), abs=1e-5)]
    end = model.decoder_log_probs(tokens[:1, :0], states[:1], lengths[:1])[0, 0, eos]
    assert long.score([()]) == [pytest.approx(float(end), abs=1e-5)]


def test_text_of_a_decoder_with_own_tokens_wins_only_where_ctc_hears_it(
    tokenizer: Tokenizer,
) -> None:
    """Its repetitions, and its words in silence, lose; greedy decoding takes it as it is."""
    models = LanguageModels(words=None, tokens=None)
    beam = BeamDecoder(
        tokenizer=tokenizer, language_models=models, weights={}, attention_rescoring=True
    )
    greedy = GreedyDecoder(tokenizer.vocabulary)
    end = 2

    def decode(log_probs: LogProbs, proposal: str) -> list[str]:
        """Decode with a decoder that is 50 nats surer of its proposal than of all else."""
        attention = AttentionScorer(
            score_texts=lambda texts: np.where(texts[:, 0] == end, -50.0, 0.0),
            end=end,
            spell=lambda tokens: [7] if tokenizer.decode(tokens) == proposal else [],
            propose=lambda: [tuple(tokenizer.encode(proposal))],
        )
        decoded = (decoder.nbest(log_probs, attention)[0] for decoder in (beam, greedy))
        return [tokenizer.decode(hypothesis.tokens) for hypothesis in decoded]

    heard = spoken(tokenizer, "call me", {5: "d", 6: "a"})
    assert transcribe(beam.copy_with(attention_rescoring=False), heard) == "call da"
    assert decode(heard, "call me") == ["call me", "call me"]
    looped = " ".join(["call me"] * 9)
    assert decode(heard, looped) == ["call da", looped]
    assert decode(silence(tokenizer, 99), "it") == ["", "it"]


# -- pools


@pytest.fixture
def decoder(beam: BeamDecoder) -> ClipDecoder:
    return ClipDecoder(beam.with_hotwords(["norse"]), make_aligner(beam.tokenizer))


@pytest.fixture
def clips(tokenizer: Tokenizer) -> list[DecoderInput]:
    rows = enumerate(spoken(tokenizer, text, {}) for text in TEXTS)
    return [DecoderInput(log_probs=row, samples=len(row) * STEP, start=10.0 * n) for n, row in rows]


@pytest.fixture
def always_pooled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clip_module, "MIN_FRAMES_FOR_POOL", 0)


@pytest.mark.usefixtures("always_pooled")
def test_pool_of_processes_equals_one_process(
    decoder: ClipDecoder, clips: list[DecoderInput], monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = DecoderInput(log_probs=np.full((3, 99), np.nan), samples=3 * STEP, start=0)
    pool = DecoderPool(decoder, processes=2)
    results = pool.decode(clips, with_times=True)
    assert pool.decode(clips[:2], with_times=True) == results[:2]
    with pytest.raises(SbkitError, match="99 columns"):
        pool.decode([bad], with_times=True)
    pool.close()
    monkeypatch.setattr(clip_module, "MIN_FRAMES_FOR_POOL", 1 << 30)
    unused = DecoderPool(decoder, processes=2)
    assert unused.decode(clips, with_times=True) == results
    assert [result.text for result in results] == TEXTS


@pytest.mark.parametrize("processes", [1, 2])
def test_phrases_of_a_clip_bias_only_that_clip(
    beam: BeamDecoder, decoder: ClipDecoder, always_pooled: None, processes: int
) -> None:
    """Once, each request with a prompt started processes of its own."""
    aligner = replace(decoder.aligner, confidence=Confidence(0.0, 1.0, 0.0, 0.0))
    log_probs = spoken(beam.tokenizer, "the forth is cold", {4: "n"})
    clip = DecoderInput(log_probs=log_probs, samples=len(log_probs) * STEP)
    clips = [clip, replace(clip, phrases=("forth",)), clip]
    pool = DecoderPool(ClipDecoder(beam, aligner), processes=processes)
    unbiased, biased, unbiased_again = pool.decode(clips, with_times=True)
    pool.close()
    assert unbiased == unbiased_again
    assert (unbiased.text, biased.text) == ("the north is cold", "the forth is cold")
    has_confidence = [word.confidence is not None for word in biased.words]
    assert has_confidence == [True, False, True, True]


@pytest.mark.usefixtures("always_pooled")
def test_pool_reports_a_killed_process(decoder: ClipDecoder, clips: list[DecoderInput]) -> None:
    before = {*active_children()}
    pool = DecoderPool(decoder, processes=2)
    pool.decode(clips, with_times=True)
    os.kill(({*active_children()} - before).pop().pid or 0, signal.SIGKILL)
    with pytest.raises(SbkitError, match="decoding processes was killed"):
        for _ in range(1000):
            pool.decode(clips, with_times=True)
    assert len(pool.decode(clips, with_times=True)) == len(TEXTS)
    pool.close()


@pytest.mark.usefixtures("always_pooled")
@pytest.mark.parametrize(("call", "error", "after"), LOKY_REFUSALS)
def test_clips_are_decoded_without_processes_that_cannot_start(
    call: str,
    error: Exception,
    after: int,
    decoder: ClipDecoder,
    clips: list[DecoderInput],
    caplog: pytest.LogCaptureFixture,
) -> None:
    children = {*active_children()}
    pool = DecoderPool(decoder, processes=2)
    with refusing(call, error, after=after):
        for _ in range(2):
            texts = [clip.text for clip in pool.decode(clips, with_times=False)]
            assert texts == TEXTS
    assert caplog.text.count("decoding texts without other processes") == 1
    assert {*active_children()} <= children
    pool.close()


def test_processes_that_cannot_start_leave_those_of_other_pools() -> None:
    with ProcessPoolExecutor(1) as other:

        def start_other_and_fail() -> ProcessPoolExecutor:
            other.submit(os.getpid).result()
            raise NO_PROCESS

        assert start_processes("decoding texts", start_other_and_fail) is None
        assert other.submit(os.getppid).result() == os.getpid()


@pytest.mark.usefixtures("always_pooled")
def test_forked_process_starts_decoding_processes_of_its_own(
    decoder: ClipDecoder, clips: list[DecoderInput]
) -> None:
    pool = DecoderPool(decoder, processes=2)
    expected = pool.decode(clips, with_times=True)

    def decode() -> tuple[int, list[RecognizedClip]]:
        results = pool.decode(clips, with_times=True)
        return len([child for child in active_children() if child.is_alive()]), results

    assert in_fork(decode) == (2, expected)
    assert in_fork(decode, daemon=True) == (0, expected)  # it may have no children
    assert pool.decode(clips, with_times=True) == expected
    pool.close()


NEVER_CLOSED = """
import builtins
import os
import pickle
import sys
from pathlib import Path
from sbkit.decoding import pool as clip_module
clip_module.MIN_FRAMES_FOR_POOL = 0
decoder, clips = pickle.loads(Path(sys.argv[1]).read_bytes())
pool = builtins.pool = clip_module.DecoderPool(decoder, processes=2)  # outlives this module
print(len(pool.decode(clips, with_times=False)), flush=True)
if os.fork():
    os.wait()
"""


def test_pool_needs_no_main_block_and_need_not_be_closed(
    decoder: ClipDecoder, clips: list[DecoderInput], tmp_path: Path
) -> None:
    files = [tmp_path / "script.py", tmp_path / "input.pickle"]
    files[0].write_text(NEVER_CLOSED)
    files[1].write_bytes(pickle.dumps((decoder, clips)))
    process = subprocess.run(
        [sys.executable, "-W", "error", "-W", "ignore:This process", *files],  # 3.12: it may hang
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert (process.stdout, process.stderr) == (f"{len(TEXTS)}\n", "")


def test_decoder_with_sentences_as_words_is_pickled(beam: BeamDecoder) -> None:
    """In a language without spaces, a sentence counts as a word, and the lexicon is deep."""
    sentence = "callthenorthoffice" * 50
    models = LanguageModels(train([[sentence]], order=1).model, None)
    decoder = beam.copy_with(language_models=models).with_hotwords([sentence])
    log_probs = spoken(beam.tokenizer, TEXTS[0], {})
    expected = decoder.nbest(log_probs)
    assert pickle.loads(pickle.dumps(decoder)).nbest(log_probs) == expected
