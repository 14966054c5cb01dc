"""The pretrained encoder of a run: its sizes become plain data of the YAML when the run begins.

`pretrained` names a folder, and `encoder_config` becomes what it says. So the resolved YAML, the
declaration and the bundle hold every size, and a run that has begun needs the folder no more.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sbkit.base.errors import SbkitError
from sbkit.checkpoint.declaration import CHECKPOINTS, read_declaration
from sbkit.checkpoint.folder import newest_described
from sbkit.config.document import read_document
from sbkit.config.hparams import read_knobs
from sbkit.config.references import holds_object, plain_value
from sbkit.models.pretrained.config import complete_config, read_encoder_config
from sbkit.models.pretrained.folder import find_folder
from sbkit.models.pretrained.weights import check_weights
from sbkit.train.initialize import encoder_config_of

KNOB, CONFIG = "pretrained", "encoder_config"


def with_encoder_config(yaml_file: Path, overrides: Mapping[str, object]) -> dict[str, object]:
    """Return the overrides with the sizes of the encoder, in a YAML that has `encoder_config`.

    They are those that the run began with; else those of the folder; without one, those that are
    given, of an encoder that begins with random weights, or those of `init_from`.
    Raises SbkitError for what cannot be loaded, and for a model that does not fit into the memory.
    """
    given: Any = overrides.get(CONFIG) or {}
    if "source" in given:
        return dict(overrides)  # done
    given = given or plain_value(read_document(yaml_file).root.get(CONFIG))
    if isinstance(given, dict) and not holds_object(given):  # the YAML refers to sizes in it
        overrides = {**overrides, CONFIG: complete_config(given, of=f"`{CONFIG}`")}
    knobs = read_knobs(yaml_file, overrides)
    if CONFIG not in knobs:
        return dict(overrides)
    run = Path(knobs["output_folder"])
    if newest_described(run / CHECKPOINTS) is not None:
        return {**overrides, CONFIG: read_declaration(run).values[CONFIG]}
    config = _config_of(knobs)
    if config["sample_rate"] != knobs["sample_rate"]:
        raise SbkitError(
            f"`sample_rate` must be the {config['sample_rate']} Hz that the encoder was trained on "
            f"(its preprocessor_config.json), but is {knobs['sample_rate']}. Take an encoder of "
            f"that rate, or pass --sample_rate={config['sample_rate']}."
        )
    return {**overrides, CONFIG: config}


def _config_of(knobs: Mapping[str, Any]) -> dict[str, Any]:
    named, given = knobs.get(KNOB), knobs[CONFIG]
    if named is None:
        if given is None and (source := knobs.get("init_from")):
            given = encoder_config_of(Path(source))
        if isinstance(given, Mapping):
            return complete_config(given, of=f"`{CONFIG}`")
        raise SbkitError(
            f"`{KNOB}` must name the folder of a pretrained encoder, but is null. Pass "
            f"--{KNOB}=FOLDER, or as `{CONFIG}` a mapping: an encoder of random weights."
        )
    config = read_encoder_config(named)
    if given is None:
        check_weights(find_folder(named), config)
    elif given != config:
        raise SbkitError(
            f"`{CONFIG}` must be null, or what `{KNOB}` says, but {named} says something else. "
            "Take one of the two out."
        )
    return config
