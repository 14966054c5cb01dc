"""Long audio has the text of its sentences, and a bad file does not stop the others."""

import os
import tarfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from io import BytesIO, StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock, patch

import numpy as np
import pytest
import soundfile
import torch
from datasets import Dataset
from starlette.datastructures import UploadFile

from sbkit.audio.io import Samples
from sbkit.base.errors import SbkitError
from sbkit.bundle.protocols import EffectiveRuntime
from sbkit.bundle.task import ClipBatch
from sbkit.decoding.greedy import best_tokens
from sbkit.decoding.pool import RecognizedClip
from sbkit.decoding.word_times import WordOffsets
from sbkit.runtime import runtimes
from sbkit.tasks.asr.predict import CPU_BATCH_SECONDS, Transcriber, Transcript
from sbkit.tasks.asr.task import AsrTask
from sbkit.tasks.vad.predict import VoiceDetector
from sbkit.text.normalization import TextTable
from tests.runtime.scripted_speech import ScriptedSpeech
from tests.runtime.tones import RATE, UnsureModel, silence, speak, tone_bundle, tone_transcriber

SENTENCES = ("the dog jumps", "over a fox", "lazy", "a quick brown fox is the dog of a lazy fox")
WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog"]


class Entry:
    """A path of bytes, as `os.scandir` yields them in a folder of bytes."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __fspath__(self) -> bytes:
        return os.fsencode(self._file)


class Upload:
    """Passes all on to a file and is no IOBase, as FileStorage and temporary files."""

    def __init__(self, file: Path) -> None:
        self._content = BytesIO(file.read_bytes())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._content, name)


class OnlyRead:
    """A file that cannot be read twice, and that has a buffer of its own."""

    def __init__(self, file: Path) -> None:
        self._content = BytesIO(file.read_bytes())

    def read(self, size: int = -1) -> bytearray:
        return bytearray(self._content.read(size))

    def seekable(self) -> bool:
        return False


def in_piped_tar(file: Path) -> Any:
    content = BytesIO()
    with tarfile.open(fileobj=content, mode="w") as tar:
        tar.add(file)
    content.seek(0)
    with tarfile.open(fileobj=content, mode="r|") as tar:  # which need not stay open
        return tar.extractfile(cast("tarfile.TarInfo", tar.next()))


# A clip of samples or its file, in the forms of the libraries that people read audio with.
SOURCES: Mapping[str, Callable[[Samples, Path], Any]] = {
    "path": lambda clip, file: file,
    "bytes": lambda clip, file: file.read_bytes(),
    "DirEntry": lambda clip, file: Entry(file),
    "bytearray": lambda clip, file: bytearray(file.read_bytes()),
    "memoryview": lambda clip, file: memoryview(file.read_bytes()),
    "bytes of NumPy": lambda clip, file: np.fromfile(file, np.uint8),
    "FileStorage of Flask": lambda clip, file: Upload(file),
    "UploadFile of FastAPI": lambda clip, file: UploadFile(BytesIO(file.read_bytes())),
    "FileField of aiohttp": lambda clip, file: SimpleNamespace(file=BytesIO(file.read_bytes())),
    "soundfile": lambda clip, file: soundfile.read(file),
    "torch": lambda clip, file: (torch.from_numpy(clip / 32768)[None].requires_grad_(), RATE),
    "bfloat16": lambda clip, file: (torch.from_numpy(clip / 32768).bfloat16(), float(RATE)),
    "gradio": lambda clip, file: (RATE, clip),
    "array of datasets": lambda clip, file: {"array": clip, "sampling_rate": RATE, "path": None},
    "raw of transformers": lambda clip, file: {"raw": clip / 32768, "sampling_rate": RATE},
    "bytes of datasets": lambda clip, file: {"bytes": file.read_bytes(), "path": "fox.wav"},
    "bytes of NumPy of datasets": lambda clip, file: {"bytes": np.fromfile(file, np.uint8)},
    "no bytes of datasets": lambda clip, file: {"bytes": b"", "path": str(file)},
    "path of datasets": lambda clip, file: {"bytes": None, "path": str(file)},
    "AudioDecoder of torchcodec": lambda clip, file: SimpleNamespace(
        get_all_samples=lambda: SimpleNamespace(data=torch.from_numpy(clip)[None], sample_rate=RATE)
    ),
}


def say(seconds: float, *, seed: int = 0) -> str:
    """Return a text of this duration; it may repeat a word."""
    random = np.random.default_rng(seed)
    text = ""
    while len(text) * 0.12 < seconds:
        text += f" {random.choice(WORDS)}"
    return text.strip()


@pytest.mark.parametrize("pause", [0.6, 1.0, 3.0, 40.0])
def test_transcriber_joins_segments_at_pauses(pause: float, tmp_path: Path) -> None:
    transcriber, tokenizer, _ = tone_transcriber(tmp_path)
    spoken = [speak(tokenizer, text) for text in SENTENCES]
    audio = np.concatenate([part for text in spoken for part in (text, silence(pause))])
    assert [transcriber.transcribe(audio, RATE).text for audio in spoken] == [*SENTENCES]
    joined = transcriber.transcribe(audio, RATE)
    assert joined.text == " ".join(SENTENCES)
    assert joined.seconds == pytest.approx(len(audio) / RATE)


@pytest.mark.parametrize(("spaces", "text"), [(False, "我爱北京天安门"), (True, "我爱北京 天安门")])
def test_transcriber_joins_segments_as_transcripts_are_written(
    spaces: bool, text: str, tmp_path: Path
) -> None:
    bundle, tokenizer, _ = tone_bundle(tmp_path, "我爱北京天安门")
    bundle = replace(bundle, config=replace(bundle.config, normalizer=TextTable(spaces=spaces)))
    audio = np.concatenate([speak(tokenizer, "我爱北京"), silence(40), speak(tokenizer, "天安门")])
    parts: list[str] = []
    transcriber = Transcriber(bundle=bundle)
    (transcript,) = transcriber.stream([audio], RATE, on_text=parts.append, nbest=1)
    assert str(transcript) == "".join(parts) == transcript.nbest[0].text == text
    assert len(parts) > 1
    (call,) = transcriber.stream([np.stack([audio, audio], axis=1)], RATE, channel="each")
    assert f"1:{' ' if spaces else ''}{text}" in str(call)
    with patch.object(AsrTask, "decodes_frames", False):  # such a task takes clips of 30 s
        assert bundle.transcribe([audio]) == [text]


@pytest.mark.parametrize("seed", range(6))
def test_joined_overlaps_lose_repeat_and_move_no_words(seed: int, tmp_path: Path) -> None:
    bundle, tokenizer, model = tone_bundle(tmp_path)
    read_ahead_seconds = 40.0 if seed % 2 else 480.0  # at 40 overlapping segments are in two pools
    transcriber = Transcriber(bundle=bundle, read_ahead_seconds=read_ahead_seconds)
    text = say(130, seed=seed)
    lead = silence(0.24 * seed)  # so that the cuts lie elsewhere
    transcript = transcriber.transcribe(np.concatenate([lead, speak(tokenizer, text)]), RATE)
    assert sum(map(len, model.batches)) == 5
    assert transcript.text == text
    assert [word.text for word in transcript.words] == text.split()
    letters = 2 * seed
    for word in transcript.words:
        start, end = 0.12 * letters, 0.12 * (letters + len(word.text))
        assert start - 0.05 <= word.start < word.end <= end + 0.05
        letters += len(word.text) + 1


class Shouting(AsrTask):
    decodes_frames = True

    def predict(self, bundle: Any, batch: ClipBatch) -> Sequence[RecognizedClip]:
        return [replace(heard, text=heard.text.upper()) for heard in super().predict(bundle, batch)]


class Undeclared(Shouting):
    decodes_frames = False


def test_task_that_changes_texts_of_ctc_is_joined_at_overlaps_if_it_says_so(
    tmp_path: Path,
) -> None:
    bundle, tokenizer, _ = tone_bundle(tmp_path)
    audio = speak(tokenizer, text := say(70))
    transcriber = Transcriber(bundle=replace(bundle, task=Shouting()))
    assert transcriber.transcribe(audio, RATE).text == text.upper()
    with pytest.raises(SbkitError, match="`decodes_frames`"):
        Transcriber(bundle=replace(bundle, task=Undeclared())).transcribe(audio, RATE)


@pytest.mark.parametrize("seed", range(3))
def test_transcriber_writes_quiet_speech_before_loud_speech_once(seed: int, tmp_path: Path) -> None:
    """Beside loud speech quiet speech is a pause, also in the overlap of two segments."""
    transcriber, tokenizer, _ = tone_transcriber(tmp_path)
    text = say(60, seed=seed)
    loudness = np.full(len(text), 0.15)
    for first, end in ((218, 223), (232, 237), (250, None)):  # letters of 120 ms
        loudness[first:end] = 1.6
    letters = speak(tokenizer, text).reshape(len(text), -1) * loudness[:, None]
    transcript = transcriber.transcribe(letters.ravel().astype(np.int16), RATE)
    assert transcript.text == text


def test_unspellable_hotwords_are_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bundle, tokenizer, _ = tone_bundle(tmp_path, lm_texts=SENTENCES)
    bundle = bundle.with_hotwords_option("Fox, fox, 日本")
    assert "hotword 日本 is ignored: the model has no tokens" in caplog.text
    decoding = {"decoder": "beam", "hotwords": ("fox",), "refused_hotwords": ("日本",)}
    facts = bundle.facts(Dataset.from_dict({"text": ["a fox"]}))
    assert {name: facts[name] for name in decoding} == decoding
    assert bundle.with_more_hotwords(["dog", "東京"]).refused_hotwords == ("日本", "東京")
    assert bundle.with_more_hotwords("lazy dog").decoder.phrases == ("fox", "lazy dog")
    audio = speak(tokenizer, SENTENCES[1])
    assert Transcriber(bundle=bundle).transcribe(audio, RATE).text == SENTENCES[1]


def test_onnx_is_refused_if_the_decoder_needs_the_attention_decoder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle, _, _ = tone_bundle(tmp_path, lm_texts=SENTENCES, attention_rescoring=True)
    monkeypatch.setattr(runtimes, "read_bundle", lambda *_, **__: bundle)
    on_onnx = replace(bundle.model.runs_on, runtime="onnx")
    monkeypatch.setattr(bundle.model, "runs_on", on_onnx)
    monkeypatch.setattr(runtimes, "_load_onnx", lambda *_: bundle.model)
    with pytest.raises(SbkitError, match="which the runtime onnx lacks"):
        Transcriber.load(tmp_path, runtime="onnx")


def test_transcript_last_word_may_end_after_the_last_whole_frame(tmp_path: Path) -> None:
    bundle, tokenizer, _ = tone_bundle(tmp_path)
    config = replace(bundle.config, word_offsets=WordOffsets(0.0, 9.0))
    audio = np.append(speak(tokenizer, "a fox"), silence(1.0)[:300])
    transcript = Transcriber(bundle=replace(bundle, config=config)).transcribe(audio, RATE)
    assert transcript.words[-1].end == transcript.seconds == len(audio) / RATE


def test_transcriber_batches_similar_lengths_across_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sbkit.runtime.model_thread.usable_cores", lambda: 2)
    transcriber, tokenizer, model = tone_transcriber(tmp_path)
    texts = ["a", "fox", "the quick brown dog", "lazy"] * 50
    transcripts = transcriber.stream([speak(tokenizer, text) for text in texts], RATE)
    assert [*map(str, transcripts)] == texts
    assert len(model.batches) < 25
    for batch in model.batches:
        assert len(batch) * max(batch) <= CPU_BATCH_SECONDS
        assert len(batch) * max(batch) < 2 * sum(batch)


def test_first_transcripts_come_before_much_is_read(tmp_path: Path) -> None:
    transcriber, tokenizer, _ = tone_transcriber(tmp_path)
    sources = iter([speak(tokenizer, say(70))] * 100)  # of 40 s
    next(transcriber.stream(sources, RATE))
    assert len([*sources]) >= 97


def test_transcriber_does_not_split_gpu_batches_by_cpu_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sbkit.runtime.model_thread.usable_cores", lambda: 64)
    bundle, tokenizer, model = tone_bundle(tmp_path)
    bundle.model.runs_on = replace(bundle.model.runs_on, device="cuda:0")
    transcriber = Transcriber(bundle=bundle)
    assert len([*transcriber.stream([speak(tokenizer, "a fox")] * 64, RATE)]) == 64
    assert [len(batch) for batch in model.batches] == [64]


def test_transcriber_errors_of_the_model_name_the_file(tmp_path: Path) -> None:
    transcriber, tokenizer, model = tone_transcriber(tmp_path)
    model.encode = Mock(side_effect=RuntimeError("too loud"))  # type: ignore[method-assign]
    soundfile.write(tmp_path / "loud.wav", speak(tokenizer, "a dog"), RATE)
    says = f"The model raised RuntimeError for {tmp_path / 'loud.wav'}: too loud"
    with pytest.raises(SbkitError, match=says):
        transcriber.transcribe(tmp_path / "loud.wav")


def test_stream_refuses_a_single_file(tmp_path: Path) -> None:
    transcriber, _, _ = tone_transcriber(tmp_path)
    with pytest.raises(SbkitError, match=r"`ab\.wav` is a single input\. Pass a list of inputs"):
        next(transcriber.stream("ab.wav"))


def test_load_refuses_a_detector_of_another_rate(plain_bundle: Path) -> None:
    speech = ScriptedSpeech()
    speech.sample_rate = 8000
    with pytest.raises(SbkitError, match="takes audio at 8000 Hz"):
        Transcriber.load(plain_bundle, device="cpu", detector=VoiceDetector(speech))


def test_transcriber_recovers_after_a_truncated_file(tmp_path: Path) -> None:
    """Its first segment is decoded before the damage is reached, and leaves frames to a second."""
    transcriber, tokenizer, _ = tone_transcriber(tmp_path)
    file = tmp_path / "broken.flac"
    soundfile.write(file, speak(tokenizer, say(130)), RATE)
    content = bytearray(file.read_bytes())
    damaged = len(content) * 19 // 20
    content[damaged : damaged + 2000] = bytes(2000)
    file.write_bytes(content)
    broken, second = transcriber.stream([file, speak(tokenizer, SENTENCES[0])], RATE)
    assert isinstance(broken, SbkitError)
    assert isinstance(second, Transcript) and second.text == SENTENCES[0]


def test_transcriber_refuses_arrays_that_are_no_audio(tmp_path: Path) -> None:
    transcriber, _, _ = tone_transcriber(tmp_path)
    cases: Sequence[tuple[Any, Any, str]] = (
        (np.zeros(100), None, "needs `sample_rate` in Hz, or a pair"),
        (np.zeros(100), "16000", "`sample_rate` must be a whole number of Hz, but is '16000'"),
        (["one.wav", "two.wav"], None, "must be a whole number of Hz, but is 'two.wav'"),
        ({"audio": np.zeros(100)}, None, "A mapping must have .*, but this one has audio"),
        (np.zeros(0), RATE, "array is empty"),
    )
    for array, rate, says in cases:
        with pytest.raises(SbkitError, match=says):
            transcriber.transcribe(array, rate)


def test_input_that_cannot_be_read_is_one_error(tmp_path: Path) -> None:
    transcriber, tokenizer, _ = tone_transcriber(tmp_path)
    soundfile.write(file := tmp_path / "fox.wav", spoken := speak(tokenizer, "a fox"), RATE)
    closed = file.open("rb")
    closed.close()
    with file.open(encoding="latin-1") as text:
        bad = [text, StringIO("a fox"), closed, "x" * 300]
        pipes = [OnlyRead(file), in_piped_tar(file)]
        first, *errors, third, last = transcriber.stream([spoken, *bad, *pipes], RATE)
    says = ["reading text. Open it in mode rb", "Open it in mode rb", "is closed", "too long"]
    assert [part in str(error) for part, error in zip(says, errors, strict=True)] == 4 * [True]
    assert [str(first), str(third), str(last)] == 3 * ["a fox"]


def test_bundle_takes_arrays_of_any_layout(tmp_path: Path) -> None:
    bundle, tokenizer, _ = tone_bundle(tmp_path)
    spoken = speak(tokenizer, "a fox")
    floats = spoken / np.float32(32768)
    assert bundle.transcribe([spoken, spoken[None], floats]) == ["a fox"] * 3
    (words,) = bundle.align([floats[None]], ["a fox"])
    assert [word.text for word in words] == ["a", "fox"]


@pytest.mark.parametrize("form", SOURCES)
def test_transcribe_and_encode_take_audio_in_every_form(form: str, tmp_path: Path) -> None:
    transcriber, tokenizer, _ = tone_transcriber(tmp_path)
    spoken = speak(tokenizer, "a fox")
    soundfile.write(tmp_path / "fox.wav", spoken, RATE)
    source = SOURCES[form](spoken, tmp_path / "fox.wav")
    assert transcriber.transcribe(source).text == "a fox"
    ((segment, encoded),) = transcriber.encode(source)
    assert len(segment.samples) == len(spoken)
    assert len(encoded.log_probs) * transcriber.frame_seconds == len(spoken) / RATE
    tokens = best_tokens(encoded.log_probs, transcriber.tokenizer.vocabulary.blank)
    assert transcriber.tokenizer.decode(tokens) == "a fox"
    assert transcriber.sample_rate == RATE


def test_transcriber_returns_the_most_probable_texts(tmp_path: Path) -> None:
    for options in ({}, {"lm_texts": SENTENCES}):
        bundle, tokenizer, _ = tone_bundle(tmp_path, model_class=UnsureModel, **options)
        spoken = speak(tokenizer, "a fox")
        transcriber = Transcriber(bundle=bundle)
        audio = np.concatenate([spoken, silence(40), spoken])
        transcript = transcriber.transcribe(audio, RATE, nbest=3)
        texts = [alternative.text for alternative in transcript.nbest]
        log_probs = [alternative.log_prob for alternative in transcript.nbest]
        assert texts[0] == transcript.text == "a fox a fox"
        assert len({*texts}) == 3 and log_probs == sorted(log_probs, reverse=True)
        of_segments = [segment.nbest[0].log_prob for segment in transcript.utterances]
        assert len(of_segments) > 1 and max(of_segments) < 0
        assert log_probs[0] == pytest.approx(sum(of_segments))
        assert transcriber.transcribe(spoken, RATE).nbest == ()


def test_transcriber_tells_that_channels_cancel_each_other_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    transcriber, tokenizer, _ = tone_transcriber(tmp_path)
    spoken = speak(tokenizer, "a fox")
    channels = np.stack([spoken, -spoken], 1)
    assert transcriber.transcribe(channels, RATE).text == ""
    assert "channels of the audio cancel each other out" in caplog.text
    caplog.clear()
    assert transcriber.transcribe(channels, RATE, channel=1).text == "a fox"
    assert not caplog.text


def test_transcriber_reports_what_it_runs_on(plain_bundle: Path) -> None:
    for precision in ("fp32", "bf16"):
        with Transcriber.load(plain_bundle, device="cpu", precision=precision) as transcriber:
            runs_on = EffectiveRuntime(runtime="torch", device="cpu", precision=precision)
            assert transcriber.runs_on == runs_on
            assert transcriber.transcribe(silence(1), RATE).runs_on == runs_on
    for wrong in ({"device": "gpu"}, {"precision": "fp16"}, {"runtime": "tf"}):
        with pytest.raises(SbkitError, match="must be"):
            Transcriber.load(plain_bundle, **{"device": "cpu", **wrong})  # type: ignore[arg-type]
