"""Language models come back as they were stored, and a damaged file is refused in one sentence."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from sbkit.base.errors import SbkitError
from sbkit.lm.kneser_ney import train
from sbkit.lm.language_models import load, save
from tests.decoding.by_definition import sentence_log_prob

TEXT = (Path(__file__).parent / "data/sentences.txt").read_text()
SENTENCES = [line.split() for line in TEXT.splitlines()]


def stored(folder: Path) -> Path:
    models = {
        "words": train(SENTENCES, order=3).model,
        "tokens": train([list("".join(words)) for words in SENTENCES], order=2).model,
    }
    save(models, folder / "lm.safetensors", metadata={"tokenizer": "x"})
    return folder / "lm.safetensors"


def test_save_and_load_keep_the_models(tmp_path: Path) -> None:
    models, about = load(stored(tmp_path))
    assert about["tokenizer"] == "x"
    assert {name: model.order for name, model in models.items()} == {"words": 3, "tokens": 2}
    model = train(SENTENCES, order=3).model
    for words in SENTENCES:
        assert sentence_log_prob(models["words"], words) == sentence_log_prob(model, words)


def test_equal_models_give_equal_bytes(tmp_path: Path) -> None:
    about = {name: name for name in "abcdefgh"}
    models = {"words": train(SENTENCES, order=2).model}
    contents = set()
    for number in range(3):
        save(models, tmp_path / f"{number}.safetensors", metadata=about)
        contents.add((tmp_path / f"{number}.safetensors").read_bytes())
    assert len(contents) == 1
    assert about.items() <= load(tmp_path / "0.safetensors")[1].items()


def change(file: Path, name: str, array: np.ndarray[Any, Any], **orders: object) -> None:
    arrays = safetensors.numpy.load_file(file) | {name: array}
    about = {"orders": json.dumps({"words": 3, "tokens": 2} | orders)}
    safetensors.numpy.save_file(arrays, file, metadata=about)


def spoil_last(field: str, value: float) -> Callable[[Path], None]:
    def spoil(file: Path) -> None:
        array = safetensors.numpy.load_file(file)[f"words.{field}_2"].copy()
        array[-1] = value
        change(file, f"words.{field}_2", array)

    return spoil


FEW = np.zeros(4, np.int64)
SPOILED: dict[str, Callable[[Path], object]] = {
    "cut": lambda file: file.write_bytes(file.read_bytes()[:-100]),
    "no metadata": lambda file: safetensors.numpy.save_file({"a": np.zeros(2)}, file),
    "an order of thousands": lambda file: change(file, "more", FEW, words=5000),
    "an order of text": lambda file: change(file, "more", FEW, words="3"),
    "no order": lambda file: change(file, "more", FEW, words=0),
    "floats for keys": lambda file: change(file, "words.keys_2", FEW.astype(np.float32)),
    "other first words": lambda file: change(file, "words.words", np.frombuffer(b"a\nb", np.uint8)),
    "no text": lambda file: change(file, "words.words", np.array([255, 254], np.uint8)),
    "unsorted": lambda file: change(file, "words.keys_2", FEW),
    "another size": lambda file: change(file, "words.log_probs_1", np.zeros(3, np.float32)),
    "not a number": spoil_last("log_probs", np.nan),
    "above one": spoil_last("log_probs", 0.5),
    "infinite": spoil_last("backoffs", np.inf),
    "beyond the words": spoil_last("keys", 1 << 60),
}


@pytest.mark.parametrize("name", SPOILED)
def test_load_refuses_a_damaged_file(tmp_path: Path, name: str) -> None:
    file = stored(tmp_path)
    SPOILED[name](file)
    with pytest.raises(
        SbkitError, match=r"is not a file of language models, or is damaged .*\. Train them"
    ):
        load(file)
